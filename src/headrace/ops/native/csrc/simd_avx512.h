// Sixteen lanes as one AVX-512 register. See simd_portable.h for the meaning of each operation.
#pragma once

#ifdef HEADRACE_EMULATE_AVX512
#include "emulate_avx512.h"
#else
#include <immintrin.h>
#endif

#include <cstddef>
#include <cstdint>

#define HR_INLINE static inline __attribute__((always_inline))

namespace headrace::HEADRACE_ISA {
namespace {

using F = __m512;
using I = __m512i;

inline constexpr int kTileRows = 12;
inline constexpr int kDirectRows = 6;
inline constexpr int kInt8Rows = 8;

HR_INLINE F zero() { return _mm512_setzero_ps(); }
HR_INLINE F set1(float x) { return _mm512_set1_ps(x); }
HR_INLINE F load(const float* p) { return _mm512_loadu_ps(p); }
HR_INLINE void store(float* p, F x) { _mm512_storeu_ps(p, x); }
HR_INLINE F add(F a, F b) { return _mm512_add_ps(a, b); }
HR_INLINE F sub(F a, F b) { return _mm512_sub_ps(a, b); }
HR_INLINE F mul(F a, F b) { return _mm512_mul_ps(a, b); }
HR_INLINE F div(F a, F b) { return _mm512_div_ps(a, b); }
HR_INLINE F max(F a, F b) { return _mm512_max_ps(a, b); }
HR_INLINE F min(F a, F b) { return _mm512_min_ps(a, b); }
HR_INLINE F fma(F a, F b, F c) { return _mm512_fmadd_ps(a, b, c); }

HR_INLINE I load_u32(const uint32_t* p) { return _mm512_loadu_si512(p); }
HR_INLINE I bit_and(I a, uint32_t mask) {
  return _mm512_and_si512(a, _mm512_set1_epi32(static_cast<int>(mask)));
}
HR_INLINE I bit_or(I a, I b) { return _mm512_or_si512(a, b); }
HR_INLINE I bit_xor(I a, I b) { return _mm512_xor_si512(a, b); }
template <int N>
HR_INLINE I shift_left(I a) {
  return _mm512_slli_epi32(a, N);
}
template <int N>
HR_INLINE I shift_right(I a) {
  return _mm512_srli_epi32(a, N);
}
template <int N>
HR_INLINE I shift_right_signed(I a) {
  return _mm512_srai_epi32(a, N);
}
HR_INLINE I load_pairs(const std::byte* p) {
  return _mm512_cvtepi8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
}
HR_INLINE I zero_int() { return _mm512_setzero_si512(); }
HR_INLINE I set1_u32(uint32_t x) { return _mm512_set1_epi32(static_cast<int>(x)); }
HR_INLINE void store_quads(int8_t* p, I pairs) {
  const __m256i odd = _mm256_slli_epi32(_mm512_extracti64x4_epi64(pairs, 1), 8);
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm256_or_si256(_mm512_castsi512_si256(pairs), odd));
}
HR_INLINE I add_i32(I a, int b) { return _mm512_add_epi32(a, _mm512_set1_epi32(b)); }
HR_INLINE I add_u32(I a, I b) { return _mm512_add_epi32(a, b); }
HR_INLINE I max_u32(I a, I b) { return _mm512_max_epu32(a, b); }
HR_INLINE F to_float(I a) { return _mm512_cvtepi32_ps(a); }
HR_INLINE F as_float(I a) { return _mm512_castsi512_ps(a); }
HR_INLINE I as_int(F a) { return _mm512_castps_si512(a); }

HR_INLINE I quad_dot(I sum, I w, int32_t x) { return _mm512_dpbusd_epi32(sum, w, _mm512_set1_epi32(x)); }
HR_INLINE I quad_total(I total, I sum) { return _mm512_add_epi32(total, sum); }
HR_INLINE I pair_dot(I sum, I w, int32_t x) {
  return _mm512_add_epi16(sum, _mm512_maddubs_epi16(w, _mm512_set1_epi32(x)));
}
HR_INLINE I pair_total(I total, I pairs, I factors) { return _mm512_dpwssd_epi32(total, pairs, factors); }
// The instruction multiplies unsigned by signed bytes: weights are raised by 128, and the sum is lowered to match.
struct SignedBytes {
  I raised;
};
HR_INLINE SignedBytes signed_bytes(I w) {
  return {_mm512_xor_si512(w, _mm512_set1_epi32(static_cast<int>(0x80808080u)))};
}
HR_INLINE I byte_dot(I sum, SignedBytes w, int32_t x) {
  return _mm512_dpbusd_epi32(sum, w.raised, _mm512_set1_epi32(x));
}
HR_INLINE I byte_total(I sum, int32_t total) { return add_i32(sum, -128 * total); }

HR_INLINE F from_f16(const uint16_t* p) {
  return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
}
HR_INLINE F from_bf16(const uint16_t* p) {
  const __m256i v = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(v), 16));
}

HR_INLINE F from_int8(const int8_t* p) {
  return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))));
}
HR_INLINE F from_fp8(const uint8_t* p) {  // see simd_avx2.h
  const __m256i wide = _mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
  const __m256i magnitude = _mm256_set1_epi16(0x7f);
  const __m256i nan = _mm256_cmpeq_epi16(_mm256_and_si256(wide, magnitude), magnitude);
  const __m256i half = _mm256_and_si256(_mm256_slli_epi16(wide, 7), _mm256_set1_epi16(static_cast<short>(0xbf80)));
  return _mm512_mul_ps(_mm512_cvtph_ps(_mm256_or_si256(half, nan)), _mm512_set1_ps(256.0f));
}

HR_INLINE F keep_first(F x, int n, float other) {
  const __mmask16 kept = static_cast<__mmask16>(n >= 16 ? 0xffff : (1u << n) - 1u);
  return _mm512_mask_blend_ps(kept, _mm512_set1_ps(other), x);
}

HR_INLINE F number_or_nan(F other, F x) {
  return _mm512_mask_add_ps(other, _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q), x, x);
}

HR_INLINE __m256 upper_half(F x) {
  return _mm256_castpd_ps(_mm512_extractf64x4_pd(_mm512_castps_pd(x), 1));
}
HR_INLINE float sum_lanes(F x) {
  const __m256 eight = _mm256_add_ps(_mm512_castps512_ps256(x), upper_half(x));
  const __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_add_ss(two, _mm_shuffle_ps(two, two, 1)));
}
HR_INLINE float max_lanes(F x) {
  const __m256 eight = _mm256_max_ps(_mm512_castps512_ps256(x), upper_half(x));
  const __m128 four = _mm_max_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  const __m128 two = _mm_max_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_max_ss(two, _mm_shuffle_ps(two, two, 1)));
}
HR_INLINE __m256i upper_half(I x) { return _mm256_castps_si256(upper_half(as_float(x))); }
HR_INLINE uint32_t sum_lanes(I x) {
  const __m256i eight = _mm256_add_epi32(_mm512_castsi512_si256(x), upper_half(x));
  const __m128i four = _mm_add_epi32(_mm256_castsi256_si128(eight), _mm256_extracti128_si256(eight, 1));
  const __m128i two = _mm_add_epi32(four, _mm_unpackhi_epi64(four, four));
  return static_cast<uint32_t>(_mm_cvtsi128_si32(_mm_add_epi32(two, _mm_shuffle_epi32(two, 1))));
}
HR_INLINE uint32_t max_lanes(I x) {
  const __m256i eight = _mm256_max_epu32(_mm512_castsi512_si256(x), upper_half(x));
  const __m128i four = _mm_max_epu32(_mm256_castsi256_si128(eight), _mm256_extracti128_si256(eight, 1));
  const __m128i two = _mm_max_epu32(four, _mm_unpackhi_epi64(four, four));
  return static_cast<uint32_t>(_mm_cvtsi128_si32(_mm_max_epu32(two, _mm_shuffle_epi32(two, 1))));
}

}  // namespace
}  // namespace headrace::HEADRACE_ISA
