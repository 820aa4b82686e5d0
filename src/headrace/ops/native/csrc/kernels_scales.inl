// Scales of weights of four bits as whole numbers of their output's unit: see Kernels::linear_int12. Included once for each
// instruction set, after kernels_blocks.inl.

namespace headrace::HEADRACE_ISA {
namespace {

inline constexpr float kGreatestWeight = 2000.0f;  // 2032 would fit, but scale and centre are rounded each by itself
inline constexpr float kWholeInLowBits = 12582912.0f;  // 1.5 * 2^23: a whole number added to it stays in the low bits
inline constexpr float kSmallestBound = 1e-30f;

HR_INLINE I magnitude_bits(F x) { return bit_and(as_int(x), 0x7fffffffu); }
HR_INLINE I all_if_negative(F x) { return shift_right_signed<31>(as_int(x)); }

// What a block's weights are where q, or 15 - q if its scale is negative, is 8.
HR_INLINE F centre_of(const Affine& block) {
  return fma(to_float(add_i32(all_if_negative(block.scale), 8)), block.scale, block.min);
}

// How far a block's weights are from zero at most.
HR_INLINE F greatest_of(const Affine& block) {
  return fma(set1(8.0f), as_float(magnitude_bits(block.scale)), as_float(magnitude_bits(centre_of(block))));
}

// How many units make one, and what 16 of them are worth.
struct Units {
  F inverse, of_16;
};
HR_INLINE Units units_of(const float* bounds) {
  const F bound = load(bounds);
  return {div(set1(kGreatestWeight), max(bound, set1(kSmallestBound))), mul(bound, set1(16.0f / kGreatestWeight))};
}

// The nearest whole number, plus `more`.
HR_INLINE I whole(F x, F inverse, int more) {
  constexpr auto kBits = __builtin_bit_cast(int32_t, kWholeInLowBits);
  return add_i32(as_int(fma(x, inverse, set1(kWholeInLowBits))), more - kBits);
}

// Of a block: which bits of q change where its scale is negative; and s1 and s0 in the lower halves of lanes, c1 and c0 in
// the upper ones.
struct WholeScales {
  I flips, high, low;
};
template <WeightType T>
HR_INLINE WholeScales whole_scales(const std::byte* panel, int block, F inverse) {
  const Affine of = affine<T>(panel, block);
  const I scale = whole(as_float(magnitude_bits(of.scale)), inverse, 0), centre = whole(centre_of(of), inverse, 8);
  const I high = bit_or(bit_and(shift_right<4>(scale), 15), bit_and(shift_left<12>(centre), 0xffff0000u));
  const I low = bit_or(bit_and(scale, 15), add_i32(shift_left<16>(bit_and(centre, 15)), -8 * 0x10000));
  return {bit_and(all_if_negative(of.scale), 0x0f0f0f0fu), high, low};
}

template <class Use>
HR_INLINE void with_four_bits(WeightType type, Use use) {
  switch (type) {
    case WeightType::q4_0: return use(std::integral_constant<WeightType, WeightType::q4_0>{});
    case WeightType::q4_1: return use(std::integral_constant<WeightType, WeightType::q4_1>{});
    case WeightType::q4_g32: return use(std::integral_constant<WeightType, WeightType::q4_g32>{});
    case WeightType::q4_g128: return use(std::integral_constant<WeightType, WeightType::q4_g128>{});
    case WeightType::q4_k: return use(std::integral_constant<WeightType, WeightType::q4_k>{});
    default: return;
  }
}

}  // namespace
}  // namespace headrace::HEADRACE_ISA
