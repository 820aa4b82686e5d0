#define HEADRACE_ISA portable
#include "kernels.h"
#include "machine_limits.h"
#include "simd_portable.h"

namespace headrace::portable {
namespace {

inline constexpr int kIntChains = kInt8Rows;

template <class V>
HR_INLINE void hide(V& x) {
  asm volatile("" : "+m"(x));
}

}  // namespace
}  // namespace headrace::portable

#include "limits.inl"

namespace headrace {

const LimitLoops* portable_limits() {
  using namespace portable;
  static constexpr LimitLoops loops{"portable", read_bytes, kF32, kInt4, kInt8, kNone};
  return &loops;
}

}  // namespace headrace
