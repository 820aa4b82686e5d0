#define HEADRACE_ISA avx2
#include "kernels.h"
#include "machine_limits.h"
#include "simd_avx2.h"

namespace headrace::avx2 {
namespace {

inline constexpr int kIntChains = kInt8Rows;

template <class V>
HR_INLINE void hide(V& x) {
  asm volatile("" : "+x"(x.lo), "+x"(x.hi));
}

}  // namespace
}  // namespace headrace::avx2

#include "limits.inl"

namespace headrace {

const LimitLoops* avx2_limits() {
  using namespace avx2;
  static constexpr LimitLoops loops{"avx2", read_bytes, kF32, kInt4, kInt8, kNone};
  return &loops;
}

}  // namespace headrace
