// What linear layers have in common: where the weights of a block are, and how sums become outputs. Included once for each
// instruction set, after kernels_maps.inl.

namespace headrace::HEADRACE_ISA {
namespace {

// Calls step<0>, step<1>, ... step<N - 1>.
template <int N, int K = 0, class Step>
HR_INLINE void unrolled(Step& step) {
  if constexpr (K < N) {
    step.template at<K>();
    unrolled<N, K + 1>(step);
  }
}

template <int N>
HR_INLINE I shifted(I x) {
  if constexpr (N > 0) return shift_left<N>(x);
  if constexpr (N < 0) return shift_right<-N>(x);
  return x;
}

// The record that a block of 32 inputs belongs to.
template <WeightType T>
HR_INLINE const std::byte* record_of(const std::byte* panel, int block) {
  return panel + static_cast<unsigned>(block) / (record_inputs(T) / 32) * record_bytes(T);
}
template <WeightType T>
HR_INLINE const uint32_t* words_of(const std::byte* panel, int block) {
  const size_t nth = static_cast<unsigned>(block) % (record_inputs(T) / 32);
  const std::byte* words = record_of<T>(panel, block) + header_bytes(T) + nth * (4 * kLanes * weight_bits(T));
  return reinterpret_cast<const uint32_t*>(words);
}
template <WeightType T>
HR_INLINE F scale_of(const std::byte* panel, int block) {
  return from_f16(reinterpret_cast<const uint16_t*>(record_of<T>(panel, block)));
}
template <WeightType T>
HR_INLINE F second_of_header(const std::byte* panel, int block) {  // minimum, -minimum or offset
  return from_f16(reinterpret_cast<const uint16_t*>(record_of<T>(panel, block)) + kLanes);
}
template <WeightType T>
HR_INLINE I block_factors(const std::byte* panel, int block) {
  return load_pairs(record_of<T>(panel, block) + 64 + static_cast<unsigned>(block) % 8 * 32);
}
HR_INLINE F first_of(I pairs) { return to_float(shift_right_signed<16>(shift_left<16>(pairs))); }
HR_INLINE F second_of(I pairs) { return to_float(shift_right_signed<16>(pairs)); }

// A weight is fma(q, scale, min), with q as it is stored. Scales and minima are products of a float16 and a small
// integer, and so exact, and so is the product with q: the only rounding is that of the sum.
struct Affine {
  F scale, min;
};
template <WeightType T>
HR_INLINE Affine affine(const std::byte* panel, int block) {
  const F scale = scale_of<T>(panel, block);
  if constexpr (T == WeightType::q4_k || T == WeightType::q5_k) {
    const I factors = block_factors<T>(panel, block);
    return {mul(scale, first_of(factors)), mul(second_of_header<T>(panel, block), second_of(factors))};
  } else if constexpr (has_offset(T)) {
    return {scale, mul(scale, second_of_header<T>(panel, block))};
  } else if constexpr (T == WeightType::q4_1 || T == WeightType::q5_1) {
    return {scale, second_of_header<T>(panel, block)};
  } else {  // q is raised by half its range
    return {scale, mul(scale, set1(-static_cast<float>(1 << (weight_bits(T) - 1))))};
  }
}

// Quads W and W + 4 of a block of up to six bits to a weight, as they are stored: never negative.
struct TwoQuads {
  I even, odd;
};
template <WeightType T, int W>
HR_INLINE TwoQuads quads_at(const uint32_t* words) {
  const I both = load_u32(words + W * kLanes);
  const I even = bit_and(both, 0x0f0f0f0fu), odd = bit_and(shift_right<4>(both), 0x0f0f0f0fu);
  if constexpr (weight_bits(T) == 5) {
    const I high = load_u32(words + 4 * kLanes);
    return {bit_or(even, bit_and(shifted<4 - W>(high), 0x10101010u)),
            bit_or(odd, bit_and(shifted<-W>(high), 0x10101010u))};
  } else if constexpr (weight_bits(T) == 6) {
    return {bit_or(even, bit_and(shifted<4 - 2 * W>(load_u32(words + 4 * kLanes)), 0x30303030u)),
            bit_or(odd, bit_and(shifted<4 - 2 * W>(load_u32(words + 5 * kLanes)), 0x30303030u))};
  } else {
    return {even, odd};
  }
}

// Add the bias and write the outputs that exist.
HR_INLINE void finish_panel(const LinearSpan& s, int panel, int rows, const float* sums, int first_row) {
  const int first = panel * kLanes;
  const int lanes = least(s.num_outputs - first, kLanes);
  for (int r = 0; r < rows; ++r, sums += kLanes) {
    float* out = s.out + (first_row + r) * s.out_stride + first;
    if (lanes == kLanes) {
      store(out, s.bias ? add(load(sums), load(s.bias + first)) : load(sums));
    } else {
      for (int i = 0; i < lanes; ++i) out[i] = s.bias ? sums[i] + s.bias[first + i] : sums[i];
    }
  }
}

// As finish_panel does, from registers where it can.
template <int R>
HR_INLINE void finish_rows(const LinearSpan& s, int panel, const F* acc, int first_row) {
  const int first = panel * kLanes;
  if (s.num_outputs - first >= kLanes) {
    float* out = s.out + first_row * s.out_stride + first;
    for (int r = 0; r < R; ++r) store(out + r * s.out_stride, s.bias ? add(acc[r], load(s.bias + first)) : acc[r]);
  } else {
    alignas(64) float sums[R * kLanes];
    for (int r = 0; r < R; ++r) store(sums + r * kLanes, acc[r]);
    finish_panel(s, panel, R, sums, first_row);
  }
}

}  // namespace
}  // namespace headrace::HEADRACE_ISA
