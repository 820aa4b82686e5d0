// The mode in which multiply-adds do what products of bf16 are defined by: numbers too small to be normal count as zero.
#pragma once

#include <cstdint>

#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

namespace headrace {
namespace {

// Until the end of a scope, on the calling thread. Compilers do not know that arithmetic depends on it: what is to run in
// this mode must be a call that cannot be inlined.
//
// x86 looks at a result after rounding, ARM before: they differ where a sum rounds up to the least normal number.
class Flushing {
 public:
#if defined(__x86_64__)
  Flushing() : before_(_mm_getcsr()) { _mm_setcsr(before_ | 0x8040); }
  ~Flushing() { _mm_setcsr(before_); }
#elif defined(__aarch64__)
  Flushing() {
    asm volatile("mrs %0, fpcr" : "=r"(before_));
    set(before_ | uint64_t{1} << 24);
  }
  ~Flushing() { set(before_); }
#else
  Flushing() {}
  ~Flushing() {}
#endif
  Flushing(const Flushing&) = delete;
  Flushing& operator=(const Flushing&) = delete;

 private:
#if defined(__x86_64__)
  unsigned before_;
#elif defined(__aarch64__)
  static void set(uint64_t mode) { asm volatile("msr fpcr, %0" : : "r"(mode) : "memory"); }
  uint64_t before_;
#endif
};

}  // namespace
}  // namespace headrace
