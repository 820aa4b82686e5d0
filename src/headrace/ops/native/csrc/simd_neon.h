// Sixteen lanes as four NEON registers (AArch64 with the dot product instructions). See simd_portable.h for the meaning
// of each operation.
#pragma once

#include <arm_neon.h>

#include <cstddef>
#include <cstdint>

#define HR_INLINE static inline __attribute__((always_inline))

namespace headrace::HEADRACE_ISA {
namespace {

struct F {
  float32x4_t a, b, c, d;
};
struct I {
  uint32x4_t a, b, c, d;
};

inline constexpr int kTileRows = 6;  // 24 accumulators, 4 weights
inline constexpr int kDirectRows = 6;
inline constexpr int kInt8Rows = 4;

template <class Op>
HR_INLINE auto each(F x, F y, Op op) {
  return F{op(x.a, y.a), op(x.b, y.b), op(x.c, y.c), op(x.d, y.d)};
}
template <class Op>
HR_INLINE I each(I x, Op op) {
  return {op(x.a), op(x.b), op(x.c), op(x.d)};
}

HR_INLINE F set1(float x) {
  const float32x4_t v = vdupq_n_f32(x);
  return {v, v, v, v};
}
HR_INLINE F zero() { return set1(0.0f); }
HR_INLINE F load(const float* p) { return {vld1q_f32(p), vld1q_f32(p + 4), vld1q_f32(p + 8), vld1q_f32(p + 12)}; }
HR_INLINE void store(float* p, F x) {
  vst1q_f32(p, x.a);
  vst1q_f32(p + 4, x.b);
  vst1q_f32(p + 8, x.c);
  vst1q_f32(p + 12, x.d);
}
HR_INLINE F add(F x, F y) {
  return each(x, y, [](float32x4_t a, float32x4_t b) { return vaddq_f32(a, b); });
}
HR_INLINE F sub(F x, F y) {
  return each(x, y, [](float32x4_t a, float32x4_t b) { return vsubq_f32(a, b); });
}
HR_INLINE F mul(F x, F y) {
  return each(x, y, [](float32x4_t a, float32x4_t b) { return vmulq_f32(a, b); });
}
HR_INLINE F div(F x, F y) {
  return each(x, y, [](float32x4_t a, float32x4_t b) { return vdivq_f32(a, b); });
}
// Not vmaxq and vminq, which make NaN of one NaN.
HR_INLINE float32x4_t greater(float32x4_t a, float32x4_t b) { return vbslq_f32(vcgtq_f32(a, b), a, b); }
HR_INLINE float32x4_t lesser(float32x4_t a, float32x4_t b) { return vbslq_f32(vcltq_f32(a, b), a, b); }
HR_INLINE F max(F x, F y) {
  return each(x, y, [](float32x4_t a, float32x4_t b) { return greater(a, b); });
}
HR_INLINE F min(F x, F y) {
  return each(x, y, [](float32x4_t a, float32x4_t b) { return lesser(a, b); });
}
HR_INLINE F fma(F x, F y, F z) {
  return {vfmaq_f32(z.a, x.a, y.a), vfmaq_f32(z.b, x.b, y.b), vfmaq_f32(z.c, x.c, y.c), vfmaq_f32(z.d, x.d, y.d)};
}

HR_INLINE I set1_u32(uint32_t x) {
  const uint32x4_t v = vdupq_n_u32(x);
  return {v, v, v, v};
}
HR_INLINE I load_u32(const uint32_t* p) { return {vld1q_u32(p), vld1q_u32(p + 4), vld1q_u32(p + 8), vld1q_u32(p + 12)}; }
HR_INLINE I bit_and(I x, uint32_t mask) {
  const uint32x4_t m = vdupq_n_u32(mask);
  return each(x, [m](uint32x4_t a) { return vandq_u32(a, m); });
}
HR_INLINE I bit_xor(I x, I y) {
  return {veorq_u32(x.a, y.a), veorq_u32(x.b, y.b), veorq_u32(x.c, y.c), veorq_u32(x.d, y.d)};
}
HR_INLINE I bit_or(I x, I y) {
  return {vorrq_u32(x.a, y.a), vorrq_u32(x.b, y.b), vorrq_u32(x.c, y.c), vorrq_u32(x.d, y.d)};
}
template <int N>
HR_INLINE I shift_left(I x) {
  return each(x, [](uint32x4_t a) { return vshlq_n_u32(a, N); });
}
template <int N>
HR_INLINE I shift_right(I x) {
  return each(x, [](uint32x4_t a) { return vshrq_n_u32(a, N); });
}
template <int N>
HR_INLINE I shift_right_signed(I x) {
  return each(x, [](uint32x4_t a) { return vreinterpretq_u32_s32(vshrq_n_s32(vreinterpretq_s32_u32(a), N)); });
}
HR_INLINE I load_pairs(const std::byte* p) {
  const auto widen = [p](int i) {
    return vreinterpretq_u32_s16(vmovl_s8(vld1_s8(reinterpret_cast<const int8_t*>(p + i))));
  };
  return {widen(0), widen(8), widen(16), widen(24)};
}
HR_INLINE I zero_int() { return set1_u32(0); }
HR_INLINE I add_i32(I x, int b) {
  const uint32x4_t v = vdupq_n_u32(static_cast<uint32_t>(b));
  return each(x, [v](uint32x4_t a) { return vaddq_u32(a, v); });
}
HR_INLINE I add_u32(I x, I y) {
  return {vaddq_u32(x.a, y.a), vaddq_u32(x.b, y.b), vaddq_u32(x.c, y.c), vaddq_u32(x.d, y.d)};
}
HR_INLINE void store_quads(int8_t* p, I pairs) {
  vst1q_u8(reinterpret_cast<uint8_t*>(p), vreinterpretq_u8_u32(vorrq_u32(pairs.a, vshlq_n_u32(pairs.c, 8))));
  vst1q_u8(reinterpret_cast<uint8_t*>(p + 16), vreinterpretq_u8_u32(vorrq_u32(pairs.b, vshlq_n_u32(pairs.d, 8))));
}
HR_INLINE I max_u32(I x, I y) {
  return {vmaxq_u32(x.a, y.a), vmaxq_u32(x.b, y.b), vmaxq_u32(x.c, y.c), vmaxq_u32(x.d, y.d)};
}
HR_INLINE F to_float(I x) {
  return {vcvtq_f32_s32(vreinterpretq_s32_u32(x.a)), vcvtq_f32_s32(vreinterpretq_s32_u32(x.b)),
          vcvtq_f32_s32(vreinterpretq_s32_u32(x.c)), vcvtq_f32_s32(vreinterpretq_s32_u32(x.d))};
}
HR_INLINE F as_float(I x) {
  return {vreinterpretq_f32_u32(x.a), vreinterpretq_f32_u32(x.b), vreinterpretq_f32_u32(x.c), vreinterpretq_f32_u32(x.d)};
}
HR_INLINE I as_int(F x) {
  return {vreinterpretq_u32_f32(x.a), vreinterpretq_u32_f32(x.b), vreinterpretq_u32_f32(x.c), vreinterpretq_u32_f32(x.d)};
}

HR_INLINE uint32x4_t dot(uint32x4_t sum, uint32x4_t w, int8x16_t x) {
  return vreinterpretq_u32_s32(vdotq_s32(vreinterpretq_s32_u32(sum), vreinterpretq_s8_u32(w), x));
}
HR_INLINE I quad_dot(I sum, I w, int32_t x) {
  const int8x16_t v = vreinterpretq_s8_s32(vdupq_n_s32(x));
  return {dot(sum.a, w.a, v), dot(sum.b, w.b, v), dot(sum.c, w.c, v), dot(sum.d, w.d, v)};
}
HR_INLINE I quad_total(I total, I sum) {
  return {vaddq_u32(total.a, sum.a), vaddq_u32(total.b, sum.b), vaddq_u32(total.c, sum.c), vaddq_u32(total.d, sum.d)};
}
HR_INLINE uint32x4_t pairs_of(uint32x4_t sum, uint32x4_t w, int8x16_t x) {
  const int8x16_t bytes = vreinterpretq_s8_u32(w);
  const int16x8_t pairs = vpaddq_s16(vmull_s8(vget_low_s8(bytes), vget_low_s8(x)), vmull_high_s8(bytes, x));
  return vreinterpretq_u32_s16(vaddq_s16(vreinterpretq_s16_u32(sum), pairs));
}
HR_INLINE I pair_dot(I sum, I w, int32_t x) {
  const int8x16_t v = vreinterpretq_s8_s32(vdupq_n_s32(x));
  return {pairs_of(sum.a, w.a, v), pairs_of(sum.b, w.b, v), pairs_of(sum.c, w.c, v), pairs_of(sum.d, w.d, v)};
}
HR_INLINE I pair_total(I total, I pairs, I factors) {
  const auto scaled = [](uint32x4_t sum, uint32x4_t x, uint32x4_t y) {
    const int16x8_t a = vreinterpretq_s16_u32(x), b = vreinterpretq_s16_u32(y);
    const int32x4_t both = vpaddq_s32(vmull_s16(vget_low_s16(a), vget_low_s16(b)), vmull_high_s16(a, b));
    return vaddq_u32(sum, vreinterpretq_u32_s32(both));
  };
  return {scaled(total.a, pairs.a, factors.a), scaled(total.b, pairs.b, factors.b),
          scaled(total.c, pairs.c, factors.c), scaled(total.d, pairs.d, factors.d)};
}
struct SignedBytes {
  I w;
};
HR_INLINE SignedBytes signed_bytes(I w) { return {w}; }
HR_INLINE I byte_dot(I sum, SignedBytes s, int32_t x) { return quad_dot(sum, s.w, x); }
HR_INLINE I byte_total(I sum, int32_t) { return sum; }

HR_INLINE F from_f16(const uint16_t* p) {
  const auto widen = [p](int i) { return vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(p + i))); };
  return {widen(0), widen(4), widen(8), widen(12)};
}
HR_INLINE F from_bf16(const uint16_t* p) {
  const auto widen = [p](int i) { return vreinterpretq_f32_u32(vshll_n_u16(vld1_u16(p + i), 16)); };
  return {widen(0), widen(4), widen(8), widen(12)};
}

HR_INLINE F from_int8(const int8_t* p) {
  const int8x16_t v = vld1q_s8(p);
  const int16x8_t low = vmovl_s8(vget_low_s8(v));
  const int16x8_t high = vmovl_s8(vget_high_s8(v));
  const auto widen = [](int16x4_t four) { return vcvtq_f32_s32(vmovl_s16(four)); };
  return {widen(vget_low_s16(low)), widen(vget_high_s16(low)), widen(vget_low_s16(high)), widen(vget_high_s16(high))};
}
HR_INLINE F from_fp8(const uint8_t* p) {  // see simd_avx2.h
  const uint8x16_t v = vld1q_u8(p);
  const auto halves = [](uint8x8_t eight) {
    const uint16x8_t wide = vreinterpretq_u16_s16(vmovl_s8(vreinterpret_s8_u8(eight)));
    const uint16x8_t magnitude = vdupq_n_u16(0x7f);
    const uint16x8_t nan = vceqq_u16(vandq_u16(wide, magnitude), magnitude);
    return vorrq_u16(vandq_u16(vshlq_n_u16(wide, 7), vdupq_n_u16(0xbf80)), nan);
  };
  const auto widen = [](uint16x4_t four) { return vmulq_n_f32(vcvt_f32_f16(vreinterpret_f16_u16(four)), 256.0f); };
  const uint16x8_t low = halves(vget_low_u8(v));
  const uint16x8_t high = halves(vget_high_u8(v));
  return {widen(vget_low_u16(low)), widen(vget_high_u16(low)), widen(vget_low_u16(high)), widen(vget_high_u16(high))};
}

HR_INLINE F keep_first(F x, int n, float other) {
  static const int32_t kFirst[4] = {0, 1, 2, 3};
  const int32x4_t lanes = vld1q_s32(kFirst);
  const float32x4_t fill = vdupq_n_f32(other);
  const auto keep = [&](float32x4_t v, int first) { return vbslq_f32(vcltq_s32(lanes, vdupq_n_s32(n - first)), v, fill); };
  return {keep(x.a, 0), keep(x.b, 4), keep(x.c, 8), keep(x.d, 12)};
}

HR_INLINE F number_or_nan(F other, F x) {
  const auto choose = [](float32x4_t o, float32x4_t v) { return vbslq_f32(vceqq_f32(v, v), o, vaddq_f32(v, v)); };
  return {choose(other.a, x.a), choose(other.b, x.b), choose(other.c, x.c), choose(other.d, x.d)};
}

HR_INLINE float sum_lanes(F x) {
  const float32x4_t four = vaddq_f32(vaddq_f32(x.a, x.c), vaddq_f32(x.b, x.d));
  const float32x2_t two = vadd_f32(vget_low_f32(four), vget_high_f32(four));
  return vget_lane_f32(two, 0) + vget_lane_f32(two, 1);
}
HR_INLINE float max_lanes(F x) {
  const float32x4_t four = greater(greater(x.a, x.c), greater(x.b, x.d));
  const float32x4_t two = greater(four, vextq_f32(four, four, 2));
  const float first = vgetq_lane_f32(two, 0);
  const float second = vgetq_lane_f32(two, 1);
  return first > second ? first : second;
}
HR_INLINE uint32_t sum_lanes(I x) { return vaddvq_u32(vaddq_u32(vaddq_u32(x.a, x.b), vaddq_u32(x.c, x.d))); }
HR_INLINE uint32_t max_lanes(I x) { return vmaxvq_u32(vmaxq_u32(vmaxq_u32(x.a, x.b), vmaxq_u32(x.c, x.d))); }

}  // namespace
}  // namespace headrace::HEADRACE_ISA
