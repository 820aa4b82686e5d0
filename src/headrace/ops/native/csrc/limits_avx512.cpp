#define HEADRACE_ISA avx512
#include "kernels.h"
#include "machine_limits.h"
#include "simd_avx512.h"

namespace headrace::avx512 {
namespace {

inline constexpr int kIntChains = 12;  // more than two units times the latency of a dot product

template <class V>
HR_INLINE void hide(V& x) {
#if defined(HEADRACE_EMULATE_AVX512)
  asm volatile("" : "+m"(x));
#else
  asm volatile("" : "+v"(x));
#endif
}

}  // namespace
}  // namespace headrace::avx512

#include "limits.inl"

namespace headrace {
namespace avx512 {
namespace {

#if defined(__AVX512BF16__) || defined(HEADRACE_EMULATE_AVX512)
void bf16_products(int64_t steps) {
  const uint32_t pairs[kLanes] = {0x3f803f80u};
  I w = load_u32(pairs), x = load_u32(pairs);
  hide(w);
  hide(x);
  F sum[kTileRows];
  for (F& s : sum) {
    s = zero();
    hide(s);
  }
  for (int64_t step = 0; step < steps; ++step)
    for (F& s : sum) s = _mm512_dpbf16_ps(s, reinterpret_cast<__m512bh>(w), reinterpret_cast<__m512bh>(x));
  for (F& s : sum) hide(s);
}
constexpr ProductLoop kBf16{bf16_products, kTileRows * kLanes * 2 * 2};
#else
constexpr ProductLoop kBf16{nullptr, 0};
#endif

}  // namespace
}  // namespace avx512

const LimitLoops* avx512_limits() {
  using namespace avx512;
  static constexpr LimitLoops loops{"avx512", read_bytes, kF32, kInt4, kInt8, kBf16};
  return &loops;
}

}  // namespace headrace
