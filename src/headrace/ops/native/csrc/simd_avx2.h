// Sixteen lanes as two AVX2 registers. See simd_portable.h for the meaning of each operation.
#pragma once

#include <immintrin.h>

#include <cstddef>
#include <cstdint>

#define HR_INLINE static inline __attribute__((always_inline))

namespace headrace::HEADRACE_ISA {
namespace {

struct F {
  __m256 lo, hi;
};
struct I {
  __m256i lo, hi;
};

inline constexpr int kTileRows = 6;  // 12 accumulators, 2 weights, 1 broadcast: 15 of 16 registers
inline constexpr int kDirectRows = 6;
inline constexpr int kInt8Rows = 4;

HR_INLINE F zero() { return {_mm256_setzero_ps(), _mm256_setzero_ps()}; }
HR_INLINE F set1(float x) {
  const __m256 v = _mm256_set1_ps(x);
  return {v, v};
}
HR_INLINE F load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
HR_INLINE void store(float* p, F x) {
  _mm256_storeu_ps(p, x.lo);
  _mm256_storeu_ps(p + 8, x.hi);
}
HR_INLINE F add(F a, F b) { return {_mm256_add_ps(a.lo, b.lo), _mm256_add_ps(a.hi, b.hi)}; }
HR_INLINE F sub(F a, F b) { return {_mm256_sub_ps(a.lo, b.lo), _mm256_sub_ps(a.hi, b.hi)}; }
HR_INLINE F mul(F a, F b) { return {_mm256_mul_ps(a.lo, b.lo), _mm256_mul_ps(a.hi, b.hi)}; }
HR_INLINE F div(F a, F b) { return {_mm256_div_ps(a.lo, b.lo), _mm256_div_ps(a.hi, b.hi)}; }
HR_INLINE F max(F a, F b) { return {_mm256_max_ps(a.lo, b.lo), _mm256_max_ps(a.hi, b.hi)}; }
HR_INLINE F min(F a, F b) { return {_mm256_min_ps(a.lo, b.lo), _mm256_min_ps(a.hi, b.hi)}; }
HR_INLINE F fma(F a, F b, F c) {
  return {_mm256_fmadd_ps(a.lo, b.lo, c.lo), _mm256_fmadd_ps(a.hi, b.hi, c.hi)};
}

HR_INLINE I load_u32(const uint32_t* p) {
  return {_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)),
          _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p + 8))};
}
HR_INLINE I bit_and(I a, uint32_t mask) {
  const __m256i m = _mm256_set1_epi32(static_cast<int>(mask));
  return {_mm256_and_si256(a.lo, m), _mm256_and_si256(a.hi, m)};
}
HR_INLINE I bit_xor(I a, I b) { return {_mm256_xor_si256(a.lo, b.lo), _mm256_xor_si256(a.hi, b.hi)}; }
HR_INLINE I bit_or(I a, I b) { return {_mm256_or_si256(a.lo, b.lo), _mm256_or_si256(a.hi, b.hi)}; }
template <int N>
HR_INLINE I shift_left(I a) {
  return {_mm256_slli_epi32(a.lo, N), _mm256_slli_epi32(a.hi, N)};
}
template <int N>
HR_INLINE I shift_right(I a) {
  return {_mm256_srli_epi32(a.lo, N), _mm256_srli_epi32(a.hi, N)};
}
template <int N>
HR_INLINE I shift_right_signed(I a) {
  return {_mm256_srai_epi32(a.lo, N), _mm256_srai_epi32(a.hi, N)};
}
HR_INLINE I load_pairs(const std::byte* p) {
  return {_mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))),
          _mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p + 16)))};
}
HR_INLINE I zero_int() { return {_mm256_setzero_si256(), _mm256_setzero_si256()}; }
HR_INLINE I set1_u32(uint32_t x) {
  const __m256i v = _mm256_set1_epi32(static_cast<int>(x));
  return {v, v};
}
HR_INLINE void store_quads(int8_t* p, I pairs) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm256_or_si256(pairs.lo, _mm256_slli_epi32(pairs.hi, 8)));
}
HR_INLINE I add_i32(I a, int b) {
  const __m256i v = _mm256_set1_epi32(b);
  return {_mm256_add_epi32(a.lo, v), _mm256_add_epi32(a.hi, v)};
}
HR_INLINE I add_u32(I a, I b) { return {_mm256_add_epi32(a.lo, b.lo), _mm256_add_epi32(a.hi, b.hi)}; }
HR_INLINE I max_u32(I a, I b) { return {_mm256_max_epu32(a.lo, b.lo), _mm256_max_epu32(a.hi, b.hi)}; }
HR_INLINE F to_float(I a) { return {_mm256_cvtepi32_ps(a.lo), _mm256_cvtepi32_ps(a.hi)}; }
HR_INLINE F as_float(I a) { return {_mm256_castsi256_ps(a.lo), _mm256_castsi256_ps(a.hi)}; }
HR_INLINE I as_int(F a) { return {_mm256_castps_si256(a.lo), _mm256_castps_si256(a.hi)}; }

// The compiler may not put a sum off: it would keep all the products until the end, more than there are registers.
HR_INLINE __m256i summed(__m256i sum) {
  asm("" : "+x"(sum));
  return sum;
}
// Pairs of products in 16 bits: 8 * 2 * 15 * 127 = 30480, 4 * 2 * 31 * 127 = 31496 and 2 * 2 * 63 * 127 = 32004 fit.
HR_INLINE I pair_dot(I sum, I w, int32_t x) {
  const __m256i v = _mm256_set1_epi32(x);
  return {summed(_mm256_add_epi16(sum.lo, _mm256_maddubs_epi16(w.lo, v))),
          summed(_mm256_add_epi16(sum.hi, _mm256_maddubs_epi16(w.hi, v)))};
}
HR_INLINE I pair_total(I total, I pairs, I factors) {
  return {summed(_mm256_add_epi32(total.lo, _mm256_madd_epi16(pairs.lo, factors.lo))),
          summed(_mm256_add_epi32(total.hi, _mm256_madd_epi16(pairs.hi, factors.hi)))};
}
HR_INLINE I quad_dot(I sum, I w, int32_t x) { return pair_dot(sum, w, x); }
HR_INLINE I quad_total(I total, I sum) {
  const __m256i one = _mm256_set1_epi16(1);
  return pair_total(total, sum, {one, one});
}
// The instruction multiplies unsigned by signed bytes, so the sign of a weight moves to its input.
struct SignedBytes {
  I magnitude, sign;
};
HR_INLINE SignedBytes signed_bytes(I w) { return {{_mm256_abs_epi8(w.lo), _mm256_abs_epi8(w.hi)}, w}; }
HR_INLINE I byte_dot(I sum, const SignedBytes& w, int32_t x) {
  const __m256i one = _mm256_set1_epi16(1);
  const __m256i v = _mm256_set1_epi32(x);
  const __m256i lo = _mm256_maddubs_epi16(w.magnitude.lo, _mm256_sign_epi8(v, w.sign.lo));
  const __m256i hi = _mm256_maddubs_epi16(w.magnitude.hi, _mm256_sign_epi8(v, w.sign.hi));
  return {summed(_mm256_add_epi32(sum.lo, _mm256_madd_epi16(lo, one))),
          summed(_mm256_add_epi32(sum.hi, _mm256_madd_epi16(hi, one)))};
}
HR_INLINE I byte_total(I sum, int32_t) { return sum; }

HR_INLINE F from_f16(const uint16_t* p) {
  return {_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))),
          _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p + 8)))};
}
HR_INLINE F from_bf16(const uint16_t* p) {
  const __m128i lo = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
  const __m128i hi = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p + 8));
  return {_mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(lo), 16)),
          _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(hi), 16))};
}

HR_INLINE F from_int8(const int8_t* p) {
  const __m128i v = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
  return {_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(v)), _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_srli_si128(v, 8)))};
}
// By way of halves, whose subnormals are converted at full speed: a product with subnormal floats may take 100 cycles.
HR_INLINE F from_fp8(const uint8_t* p) {
  const __m256i wide = _mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
  const __m256i magnitude = _mm256_set1_epi16(0x7f);
  const __m256i nan = _mm256_cmpeq_epi16(_mm256_and_si256(wide, magnitude), magnitude);  // all ones are one, too
  const __m256i half = _mm256_and_si256(_mm256_slli_epi16(wide, 7), _mm256_set1_epi16(static_cast<short>(0xbf80)));
  const __m256i bits = _mm256_or_si256(half, nan);
  const __m256 raise = _mm256_set1_ps(256.0f);
  return {_mm256_mul_ps(_mm256_cvtph_ps(_mm256_castsi256_si128(bits)), raise),
          _mm256_mul_ps(_mm256_cvtph_ps(_mm256_extracti128_si256(bits, 1)), raise)};
}

HR_INLINE F keep_first(F x, int n, float other) {
  const __m256i lanes = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
  const __m256 fill = _mm256_set1_ps(other);
  const __m256i lo = _mm256_cmpgt_epi32(_mm256_set1_epi32(n), lanes);
  const __m256i hi = _mm256_cmpgt_epi32(_mm256_set1_epi32(n - 8), lanes);
  return {_mm256_blendv_ps(fill, x.lo, _mm256_castsi256_ps(lo)),
          _mm256_blendv_ps(fill, x.hi, _mm256_castsi256_ps(hi))};
}

HR_INLINE __m256 number_or_nan(__m256 other, __m256 x) {
  return _mm256_blendv_ps(other, _mm256_add_ps(x, x), _mm256_cmp_ps(x, x, _CMP_UNORD_Q));
}
HR_INLINE F number_or_nan(F other, F x) { return {number_or_nan(other.lo, x.lo), number_or_nan(other.hi, x.hi)}; }

HR_INLINE float sum_lanes(F x) {
  const __m256 eight = _mm256_add_ps(x.lo, x.hi);
  const __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_add_ss(two, _mm_shuffle_ps(two, two, 1)));
}
HR_INLINE float max_lanes(F x) {
  const __m256 eight = _mm256_max_ps(x.lo, x.hi);
  const __m128 four = _mm_max_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  const __m128 two = _mm_max_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_max_ss(two, _mm_shuffle_ps(two, two, 1)));
}
HR_INLINE uint32_t sum_lanes(I x) {
  const __m256i eight = _mm256_add_epi32(x.lo, x.hi);
  const __m128i four = _mm_add_epi32(_mm256_castsi256_si128(eight), _mm256_extracti128_si256(eight, 1));
  const __m128i two = _mm_add_epi32(four, _mm_unpackhi_epi64(four, four));
  return static_cast<uint32_t>(_mm_cvtsi128_si32(_mm_add_epi32(two, _mm_shuffle_epi32(two, 1))));
}
HR_INLINE uint32_t max_lanes(I x) {
  const __m256i eight = _mm256_max_epu32(x.lo, x.hi);
  const __m128i four = _mm_max_epu32(_mm256_castsi256_si128(eight), _mm256_extracti128_si256(eight, 1));
  const __m128i two = _mm_max_epu32(four, _mm_unpackhi_epi64(four, four));
  return static_cast<uint32_t>(_mm_cvtsi128_si32(_mm_max_epu32(two, _mm_shuffle_epi32(two, 1))));
}

}  // namespace
}  // namespace headrace::HEADRACE_ISA
