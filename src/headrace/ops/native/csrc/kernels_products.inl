// Products of attention, in one of two ways to multiply. Included once for each instruction set, after kernels_tile.inl.
//
// Exact: one chain of fused multiply-adds for each sum. In bf16: what the tiles of AMX compute. Both factors are exact in
// bf16, and a sum takes them in stretches of 32: the even ones in one chain, the odd ones in another, both from zero, then
// sum + (even + odd). Subnormal numbers count as zero, as inputs and as results: see `Flushing`.
#include "flushing.h"

namespace headrace::HEADRACE_ISA {
namespace {

constexpr int kPairStretch = 32;
constexpr int kPartSteps = kBlockTokens;  // a walk asks for its second factor by as many steps

// Rounded to bf16, to nearest even. There are no subnormal numbers where it is used; NaN stays NaN.
HR_INLINE F rounded_to_bf16(F x) {
  const I bits = as_int(x);
  const I even = bit_and(shift_right<16>(bits), 1);
  return number_or_nan(as_float(bit_and(add_u32(add_i32(bits, 0x7fff), even), 0xffff0000u)), x);
}

// Steps of the walk from `k` on, up to `count` of kPartSteps, into one chain, or the even or the odd ones. `b` gives the
// second factor of column c, and may fetch ahead.
enum class Steps { all, even, odd };
template <Steps Taken, int R, int C, class B>
HR_INLINE void add_part(F (&sums)[R][C], const B& b, const float* a, size_t a_stride, int k, int count) {
  constexpr int kStep = Taken == Steps::all ? 1 : 2;
  constexpr int kFirst = Taken == Steps::odd ? 1 : 0;
  constexpr int kNum = kPartSteps / kStep;
  const auto part = b.part(k);
  const auto take = [&](int i) __attribute__((always_inline)) {
#pragma GCC unroll 4
    for (int c = 0; c < C; ++c) {
      const F x = part(i, c);
#pragma GCC unroll 32
      for (int r = 0; r < R; ++r) sums[r][c] = fma(x, set1(a[r * a_stride + k + i]), sums[r][c]);
    }
  };
  if (count < kPartSteps) {
    for (int i = kFirst; i < count; i += kStep) {
      b.fetch(k, i);
      take(i);
    }
    return;
  }
#pragma GCC unroll 8
  for (int n = 0; n < kNum; ++n) {
    b.fetch(k, kFirst * kNum + n);
    take(kFirst + n * kStep);
  }
}

template <Steps Taken, int R, int C, class B>
HR_INLINE void add_chain(F (&sums)[R][C], const B& b, const float* a, size_t a_stride, int begin, int end) {
  for (int k = begin; k < end; k += kPartSteps) add_part<Taken>(sums, b, a, a_stride, k, end - k);
}

template <int R, int C>
HR_INLINE void clear(F (&sums)[R][C]) {
#pragma GCC unroll 32
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
    for (int c = 0; c < C; ++c) sums[r][c] = zero();
}

// sums[r][c] += a[r][k] * b(k, c) over k < depth.
template <bool Exact, int R, int C, class B>
HR_INLINE void add_products(F (&sums)[R][C], const B& b, const float* a, size_t a_stride, int depth) {
  if constexpr (Exact) return add_chain<Steps::all>(sums, b, a, a_stride, 0, depth);
  for (int begin = 0; begin < depth; begin += kPairStretch) {
    const int end = least(begin + kPairStretch, depth);
    F even[R][C], odd[R][C];
    clear(even);
    add_chain<Steps::even>(even, b, a, a_stride, begin, end);
    clear(odd);
    add_chain<Steps::odd>(odd, b, a, a_stride, begin, end);
#pragma GCC unroll 32
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
      for (int c = 0; c < C; ++c) sums[r][c] = add(sums[r][c], add(even[r][c], odd[r][c]));
  }
}

// A sum as it is kept between windows: never -0, so that tokens of weight 0 behind it change nothing.
template <bool Exact>
HR_INLINE F kept(F sum) {
  return Exact ? sum : add(sum, zero());
}

// The second factor where it lies as floats, `stride` apart, one column of 16.
struct FloatSteps {
  const float* data;
  size_t stride;
  __attribute__((always_inline)) auto part(int k) const {
    const float* first = data + k * stride;
    return [first, stride = stride](int i, int) __attribute__((always_inline)) { return load(first + i * stride); };
  }
  __attribute__((always_inline)) void fetch(int, int) const {}
};

}  // namespace
}  // namespace headrace::HEADRACE_ISA
