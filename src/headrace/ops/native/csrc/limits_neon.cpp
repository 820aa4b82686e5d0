#define HEADRACE_ISA neon
#include "kernels.h"
#include "machine_limits.h"
#include "simd_neon.h"

namespace headrace::neon {
namespace {

inline constexpr int kIntChains = kInt8Rows;

template <class V>
HR_INLINE void hide(V& x) {
  asm volatile("" : "+w"(x.a), "+w"(x.b), "+w"(x.c), "+w"(x.d));
}

}  // namespace
}  // namespace headrace::neon

#include "limits.inl"

namespace headrace {

const LimitLoops* neon_limits() {
  using namespace neon;
  static constexpr LimitLoops loops{"neon", read_bytes, kF32, kInt4, kInt8, kNone};
  return &loops;
}

}  // namespace headrace
