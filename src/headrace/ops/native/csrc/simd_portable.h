// Sixteen lanes in plain C++. This file defines what the operations mean; the other simd_*.h files give the same bits.
//
// `fma` rounds once. `max(a, b)` is a > b ? a : b and `min(a, b)` is a < b ? a : b, so b wins where either is NaN.
// `sum_lanes` and `max_lanes` fold lane i with i + 8, then i + 4, i + 2, i + 1.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#define HR_INLINE static inline __attribute__((always_inline))
#define HR_CALL [[gnu::noinline, maybe_unused]] static  // long enough that a call costs nothing

namespace headrace::HEADRACE_ISA {
namespace {

typedef float F __attribute__((vector_size(64)));
typedef uint32_t I __attribute__((vector_size(64)));

inline constexpr int kTileRows = 4;    // rows of a register tile
inline constexpr int kDirectRows = 0;  // up to here weights are decoded in registers, without a copy in the cache
inline constexpr int kInt8Rows = 4;    // rows of a register tile of integers

// Fused multiply-add without the instruction. The product of two floats is exact in double; the sum is rounded to odd
// (Boldo and Melquiond, "Emulation of FMA and correctly rounded sums", 2008), which makes the final rounding to float
// the only one that counts.
HR_INLINE float fma1(float a, float b, float c) {
#if defined(__FMA__) || defined(__ARM_FEATURE_FMA)
  return __builtin_fmaf(a, b, c);
#else
  const double product = static_cast<double>(a) * static_cast<double>(b);
  const double addend = static_cast<double>(c);
  double sum = product + addend;
  const double part = sum - product;
  const double error = (product - (sum - part)) + (addend - part);
  int64_t bits;
  std::memcpy(&bits, &sum, sizeof bits);
  const int64_t away = (error > 0.0) == (sum > 0.0) ? 1 : -1;
  const bool inexact = error > 0.0 || error < 0.0;
  bits += (inexact && (bits & 1) == 0) ? away : 0;
  std::memcpy(&sum, &bits, sizeof sum);
  return static_cast<float>(sum);
#endif
}

HR_INLINE F set1(float x) { return F{x, x, x, x, x, x, x, x, x, x, x, x, x, x, x, x}; }
HR_INLINE F zero() { return set1(0.0f); }
HR_INLINE F load(const float* p) {
  F x;
  std::memcpy(&x, p, sizeof x);
  return x;
}
HR_INLINE void store(float* p, F x) { std::memcpy(p, &x, sizeof x); }
HR_INLINE F add(F a, F b) { return a + b; }
HR_INLINE F sub(F a, F b) { return a - b; }
HR_INLINE F mul(F a, F b) { return a * b; }
HR_INLINE F div(F a, F b) { return a / b; }
HR_INLINE F max(F a, F b) { return a > b ? a : b; }
HR_INLINE F min(F a, F b) { return a < b ? a : b; }
#if defined(__FMA__) || defined(__ARM_FEATURE_FMA)
HR_INLINE
#else
HR_CALL
#endif
F fma(F a, F b, F c) {
  F x = c;
  for (int i = 0; i < 16; ++i) x[i] = fma1(a[i], b[i], c[i]);
  return x;
}

HR_INLINE I load_u32(const uint32_t* p) {
  I x;
  std::memcpy(&x, p, sizeof x);
  return x;
}
HR_INLINE I bit_and(I a, uint32_t mask) { return a & mask; }
HR_INLINE I bit_or(I a, I b) { return a | b; }
HR_INLINE I bit_xor(I a, I b) { return a ^ b; }
template <int N>
HR_INLINE I shift_left(I a) {
  return a << N;
}
template <int N>
HR_INLINE I shift_right(I a) {
  return a >> N;
}
template <int N>
HR_INLINE I shift_right_signed(I a) {
  for (int i = 0; i < 16; ++i) a[i] = static_cast<uint32_t>(static_cast<int32_t>(a[i]) >> N);
  return a;
}
HR_INLINE I load_pairs(const std::byte* p) {  // lane i is two signed bytes, widened to 16 bits each
  I x;
  for (int i = 0; i < 16; ++i) {
    const auto lo = static_cast<uint32_t>(static_cast<int8_t>(p[2 * i]));
    const auto hi = static_cast<uint32_t>(static_cast<int8_t>(p[2 * i + 1]));
    x[i] = (lo & 0xffffu) | hi << 16;
  }
  return x;
}
HR_INLINE I zero_int() { return I{}; }
HR_INLINE I set1_u32(uint32_t x) { return I{x, x, x, x, x, x, x, x, x, x, x, x, x, x, x, x}; }
// Eight quads: bytes 0 and 2 are those of lanes 0 to 7, bytes 1 and 3 those of the lanes after them. Other bytes are zero.
HR_INLINE void store_quads(int8_t* p, I pairs) {
  for (int i = 0; i < 8; ++i) {
    const uint32_t quad = pairs[i] | pairs[i + 8] << 8;
    std::memcpy(p + 4 * i, &quad, sizeof quad);
  }
}
HR_INLINE I add_i32(I a, int b) { return a + static_cast<uint32_t>(b); }
HR_INLINE I add_u32(I a, I b) { return a + b; }
HR_INLINE I max_u32(I a, I b) { return a > b ? a : b; }
HR_INLINE F to_float(I a) {  // lanes are signed
  F x = zero();
  for (int i = 0; i < 16; ++i) x[i] = static_cast<float>(static_cast<int32_t>(a[i]));
  return x;
}
HR_INLINE F as_float(I a) {
  F x;
  std::memcpy(&x, &a, sizeof x);
  return x;
}
HR_INLINE I as_int(F a) {
  I x;
  std::memcpy(&x, &a, sizeof x);
  return x;
}

// Dot products of quads: lane i adds the four products of its bytes in `w` with the four signed bytes of `x`.
// Unsigned bytes, -127..127 in x. A sum means something only after `quad_total`, which adds it to a total. It may have
// to fit 16 bits after pairs of products: 8 quads of bytes up to 15 do, or 4 of bytes up to 31, or 2 of bytes up to 63.
HR_CALL I quad_dot(I sum, I w, int32_t x) {
  for (int i = 0; i < 16; ++i)
    for (int j = 0; j < 4; ++j) {
      const int32_t a = static_cast<int32_t>(w[i] >> (8 * j) & 0xff);
      const int32_t b = static_cast<int8_t>(static_cast<uint32_t>(x) >> (8 * j));
      sum[i] += static_cast<uint32_t>(a * b);
    }
  return sum;
}
HR_INLINE I quad_total(I total, I sum) { return total + sum; }
// The same, with the products of bytes 0 and 1 in the lower 16 bits of a lane and those of bytes 2 and 3 in the upper.
// `pair_total` multiplies these signed numbers by those in `factors` and adds both to a total.
HR_CALL I pair_dot(I sum, I w, int32_t x) {
  for (int i = 0; i < 16; ++i) {
    uint32_t halves[2] = {sum[i] & 0xffffu, sum[i] >> 16};
    for (int j = 0; j < 4; ++j) {
      const int32_t a = static_cast<int32_t>(w[i] >> (8 * j) & 0xff);
      const int32_t b = static_cast<int8_t>(static_cast<uint32_t>(x) >> (8 * j));
      halves[j / 2] += static_cast<uint32_t>(a * b);
    }
    sum[i] = (halves[0] & 0xffffu) | halves[1] << 16;
  }
  return sum;
}
HR_CALL I pair_total(I total, I pairs, I factors) {
  for (int i = 0; i < 16; ++i) {
    const int32_t lo = static_cast<int16_t>(pairs[i]) * static_cast<int16_t>(factors[i]);
    const int32_t hi = static_cast<int16_t>(pairs[i] >> 16) * static_cast<int16_t>(factors[i] >> 16);
    total[i] += static_cast<uint32_t>(lo + hi);
  }
  return total;
}
// Signed bytes, and -127..127 in x; `total` is the sum of all bytes of x.
struct SignedBytes {
  I w;
};
HR_INLINE SignedBytes signed_bytes(I w) { return {w}; }
HR_INLINE I byte_dot(I sum, SignedBytes s, int32_t x) {
  for (int i = 0; i < 16; ++i)
    for (int j = 0; j < 4; ++j) {
      const int32_t a = static_cast<int8_t>(s.w[i] >> (8 * j));
      const int32_t b = static_cast<int8_t>(static_cast<uint32_t>(x) >> (8 * j));
      sum[i] += static_cast<uint32_t>(a * b);
    }
  return sum;
}
HR_INLINE I byte_total(I sum, int32_t) { return sum; }

HR_INLINE float half_to_float(uint16_t half) {
  const uint32_t sign = static_cast<uint32_t>(half & 0x8000u) << 16;
  const uint32_t exponent = (half >> 10) & 0x1fu;
  const uint32_t mantissa = half & 0x3ffu;
  if (exponent == 0) {  // zero and subnormals: mantissa * 2^-24, exact
    const float magnitude = static_cast<float>(mantissa) * 0x1p-24f;
    return sign != 0 ? -magnitude : magnitude;
  }
  const uint32_t wide = exponent == 31 ? 255u : exponent + 112u;
  const uint32_t bits = sign | (wide << 23) | (mantissa << 13);
  float x;
  std::memcpy(&x, &bits, sizeof x);
  return x;
}
HR_INLINE F from_f16(const uint16_t* p) {
  F x = zero();
  for (int i = 0; i < 16; ++i) x[i] = half_to_float(p[i]);
  return x;
}
HR_INLINE F from_bf16(const uint16_t* p) {
  I x = {};
  for (int i = 0; i < 16; ++i) x[i] = static_cast<uint32_t>(p[i]) << 16;
  return as_float(x);
}

HR_INLINE F from_int8(const int8_t* p) {
  F x = zero();
  for (int i = 0; i < 16; ++i) x[i] = static_cast<float>(p[i]);
  return x;
}
// E4M3 lies in the bits of a half of 2^-8 its size, its subnormals as subnormals; all ones are NaN.
HR_INLINE F from_fp8(const uint8_t* p) {
  F x = zero();
  for (int i = 0; i < 16; ++i) {
    const int bits = (p[i] & 0x80) << 8 | (p[i] & 0x7f) << 7;
    x[i] = (p[i] & 0x7f) == 0x7f ? __builtin_nanf("") : half_to_float(static_cast<uint16_t>(bits)) * 256.0f;
  }
  return x;
}

// Lanes below n, and `other` in the rest.
HR_INLINE F keep_first(F x, int n, float other) {
  for (int i = n < 0 ? 0 : n; i < 16; ++i) x[i] = other;
  return x;
}

// Lanes of `x` that are NaN, as quiet ones, and `other` in the rest.
HR_INLINE F number_or_nan(F other, F x) { return x == x ? other : x + x; }

HR_INLINE float sum_lanes(F x) {
  for (int step = 8; step > 0; step /= 2)
    for (int i = 0; i < step; ++i) x[i] = x[i] + x[i + step];
  return x[0];
}
HR_INLINE float max_lanes(F x) {
  for (int step = 8; step > 0; step /= 2)
    for (int i = 0; i < step; ++i) x[i] = x[i] > x[i + step] ? x[i] : x[i + step];
  return x[0];
}
HR_INLINE uint32_t sum_lanes(I x) {
  uint32_t sum = 0;
  for (int i = 0; i < kLanes; ++i) sum += x[i];
  return sum;
}
HR_INLINE uint32_t max_lanes(I x) {
  uint32_t top = 0;
  for (int i = 0; i < kLanes; ++i) top = x[i] > top ? x[i] : top;
  return top;
}

}  // namespace
}  // namespace headrace::HEADRACE_ISA
