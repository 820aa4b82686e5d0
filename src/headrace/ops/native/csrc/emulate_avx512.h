// AVX-512 on AVX2, for testing on CPUs without it: SIMD Everywhere, and what its version 0.7 lacks.
#pragma once

#define SIMDE_ENABLE_NATIVE_ALIASES
#include <simde/x86/avx512.h>
#include <simde/x86/f16c.h>

static inline __m512i headrace_join(__m256i lo, __m256i hi) {
  simde__m512i_private both;
  both.m256i[0] = lo;
  both.m256i[1] = hi;
  return simde__m512i_from_private(both);
}
static inline __m512 headrace_join(__m256 lo, __m256 hi) {
  return _mm512_castsi512_ps(headrace_join(_mm256_castps_si256(lo), _mm256_castps_si256(hi)));
}
static inline __m128i headrace_half(__m256i x, int half) {
  return half == 0 ? _mm256_castsi256_si128(x) : _mm256_extracti128_si256(x, 1);
}

#undef _mm512_cvtepi32_ps
#undef _mm512_cvtepi8_epi32
#undef _mm512_cvtepu16_epi32
#undef _mm512_cvtph_ps
#undef _mm512_srai_epi32
#define _mm512_cvtepi32_ps(a) ((__m512)__builtin_convertvector((__v16si)(a), __v16sf))
#define _mm512_cvtepi8_epi32(a) \
  headrace_join(_mm256_cvtepi8_epi32(a), _mm256_cvtepi8_epi32(_mm_unpackhi_epi64(a, a)))
#define _mm512_cvtepu16_epi32(a) \
  headrace_join(_mm256_cvtepu16_epi32(headrace_half(a, 0)), _mm256_cvtepu16_epi32(headrace_half(a, 1)))
#define _mm512_cvtph_ps(a) headrace_join(_mm256_cvtph_ps(headrace_half(a, 0)), _mm256_cvtph_ps(headrace_half(a, 1)))
#define _mm512_srai_epi32(a, n) ((__m512i)((__v16si)(a) >> (n)))
#undef _mm512_cvtepi32_epi16
#define _mm512_cvtepi32_epi16(a) ((__m256i)__builtin_convertvector((__v16si)(a), __v16hi))

// Lanes of 128 bits, and those of 32 bits within each.
static inline __m512 headrace_shuffle_f32x4(__m512 a, __m512 b, int which) {
  __v16sf to;
  for (int i = 0; i < 16; ++i) to[i] = ((__v16sf)(i < 8 ? a : b))[(which >> (2 * (i / 4)) & 3) * 4 + i % 4];
  return (__m512)to;
}
static inline __m512 headrace_shuffle_ps(__m512 a, __m512 b, int which) {
  __v16sf to;
  for (int i = 0; i < 16; ++i) to[i] = ((__v16sf)(i % 4 < 2 ? a : b))[i / 4 * 4 + (which >> (2 * (i % 4)) & 3)];
  return (__m512)to;
}
#undef _mm512_shuffle_f32x4
#undef _mm512_shuffle_ps
#define _mm512_shuffle_f32x4(a, b, which) headrace_shuffle_f32x4(a, b, which)
#define _mm512_shuffle_ps(a, b, which) headrace_shuffle_ps(a, b, which)
