// Linear layers of weights of four bits and inputs of twelve: see Kernels::linear_int12. Included once for each instruction
// set, after kernels_int8.inl and kernels_scales.inl.
//
// All that depends on the instruction set is exact, so its bits do not. High and low are like two rows of int8.

namespace headrace::HEADRACE_ISA {
namespace {

inline constexpr float kGreatestInput = 127.0f * 16.0f;

// The bits of magnitudes are in the order of these, and after them come those of what is no number.
void weight_bounds(WeightType type, const std::byte* panel, int num_inputs, float* out) {
  with_four_bits(type, [&](auto t) {
    I greatest = zero_int();
    for (int block = 0; block < num_inputs / 32; ++block)
      greatest = max_u32(greatest, magnitude_bits(greatest_of(affine<decltype(t)::value>(panel, block))));
    store(out, as_float(greatest));
  });
}

// The integer sums of one block: sum[n] += the 16 outputs' q times row n.
template <WeightType T, int N>
struct NibbleStep {
  const uint32_t* words;
  const QuantBlock* x;
  size_t x_stride;
  I flips;
  I sum[N];

  // Word W: quads W and W + 4.
  template <int W>
  __attribute__((always_inline)) void at() {
    const auto [even, odd] = quads_at<T, W>(words);
    const I first = bit_xor(even, flips), second = bit_xor(odd, flips);
    for (int n = 0; n < N; ++n) sum[n] = quad_dot(sum[n], first, quad_of(x[n * x_stride], W));
    for (int n = 0; n < N; ++n) sum[n] = quad_dot(sum[n], second, quad_of(x[n * x_stride], W + 4));
  }
};

template <int R>
struct Int12Sums {
  I highs[R], middle[R];
};

template <WeightType T, int R>
HR_INLINE void int12_block(const std::byte* panel, int block, F inverse, const QuantBlock* x, size_t x_stride,
                           Int12Sums<R>& sums) {
  const WholeScales scales = whole_scales<T>(panel, block, inverse);
  NibbleStep<T, 2 * R> step{words_of<T>(panel, block), x, x_stride, scales.flips, {}};
  for (int n = 0; n < 2 * R; ++n) step.sum[n] = zero_int();
  unrolled<4>(step);
  // q - 8 times the inputs, at most 8 * 127 * 32, which meets s, and their total, which meets c.
  const auto pairs = [&](int n) {
    const int32_t total = x[n * x_stride].total;
    const I centred = add_i32(quad_total(zero_int(), step.sum[n]), -8 * total);
    return bit_or(bit_and(centred, 0xffffu), set1_u32(static_cast<uint32_t>(total) << 16));
  };
  for (int r = 0; r < R; ++r) {
    const I high = pairs(2 * r);
    sums.highs[r] = pair_total(sums.highs[r], high, scales.high);
    sums.middle[r] = pair_total(sums.middle[r], high, scales.low);
    sums.middle[r] = pair_total(sums.middle[r], pairs(2 * r + 1), scales.high);
  }
}

// R rows times P panels.
template <WeightType T, int R, int P>
void int12_tile(const LinearSpan& s, int panel, int row) {
  const std::byte* weights = s.panels + panel * s.panel_bytes;
  const auto stride = static_cast<size_t>(s.num_inputs) / 32;
  const QuantBlock* x = reinterpret_cast<const QuantBlock*>(s.x_int12) + 2 * row * stride;
  const Ahead ahead = row == 0 ? Ahead::of(s, panel, P) : Ahead{nullptr, 0};
  Units units[P];
  Int12Sums<R> sums[P];
  for (int p = 0; p < P; ++p) {
    units[p] = units_of(s.bounds + (panel + p) * kLanes);
    for (int r = 0; r < R; ++r) sums[p].highs[r] = sums[p].middle[r] = zero_int();
  }
  for (int block = 0; block < s.num_inputs / 32; ++block, ++x)
    for (int p = 0; p < P; ++p) {
      ahead.fetch(p, block * step_bytes(T), step_bytes(T));
      int12_block<T, R>(weights + p * s.panel_bytes, block, units[p].inverse, x, stride, sums[p]);
    }
  for (int p = 0; p < P; ++p) {
    F acc[R];
    for (int r = 0; r < R; ++r) {
      const F sum = fma(to_float(sums[p].highs[r]), set1(16.0f), to_float(sums[p].middle[r]));
      acc[r] = mul(sum, mul(units[p].of_16, set1(s.x_scales[row + r])));
    }
    finish_rows<R>(s, panel + p, acc, row);
  }
}

inline constexpr int kInt12Rows = kInt8Rows / 2;

template <WeightType T, int R = kInt12Rows>
HR_INLINE void int12_tile_of(const LinearSpan& s, int panel, int row, int height) {
  if constexpr (R > 0) {
    if (height == R) return int12_tile<T, R, 1>(s, panel, row);
    int12_tile_of<T, R - 1>(s, panel, row, height);
  }
}

template <WeightType T, int P = kStreams>
HR_INLINE void int12_streams(const LinearSpan& s, int panel, int streams) {
  if constexpr (P > 0) {
    if (streams == P) return int12_tile<T, 1, P>(s, panel, 0);
    int12_streams<T, P - 1>(s, panel, streams);
  }
}

template <WeightType T>
void int12_panels(const LinearSpan& s) {
  if (s.rows == 1) return walk_streams(s.num_panels, [&](int panel, int n) { int12_streams<T>(s, panel, n); });
  const int num_tiles = (s.rows + kInt12Rows - 1) / kInt12Rows;
  for (int panel = 0; panel < s.num_panels; ++panel)
    for (int t = 0, row = 0; t < num_tiles; ++t) {
      const int height = (s.rows - row) / (num_tiles - t);
      int12_tile_of<T>(s, panel, row, height);
      row += height;
    }
}

void linear_int12(const LinearSpan& s) {
  with_four_bits(s.type, [&](auto t) { int12_panels<decltype(t)::value>(s); });
}

// Both parts of sixteen inputs, high from 1 to 255 (raised by 128) and low from 0 to 15 (raised by 8).
struct RaisedParts {
  I high, low;
};
HR_INLINE RaisedParts raised_parts(F x, F factor) {
  const I raised = add_i32(as_int(fma(x, factor, set1(kWholeInLowBits))), 128 * 16 + 8);
  return {bit_and(shift_right<4>(raised), 0xffu), bit_and(raised, 15)};
}
// As bytes, bytes 0 and 2 of each lane.
HR_INLINE I lowered(I first, I second, int raise) {
  return bit_and(add_i32(bit_or(first, shift_left<16>(second)), (256 - raise) * 0x10001), 0x00ff00ffu);
}
HR_INLINE void write_part(I first, I second, int raise, QuantBlock* out) {
  store_quads(out->q, lowered(first, second, raise));
  out->total = static_cast<int32_t>(sum_lanes(add_u32(first, second))) - 32 * raise;
}

// Symmetric, to nearest even, one scale for the row. What is no number makes the whole row NaN.
void to_int12(const float* x, int n, bool in_tile, std::byte* out, float* scale) {
  I magnitudes = zero_int();
  for (int k = 0; k < n; k += kLanes) magnitudes = max_u32(magnitudes, magnitude_bits(load(x + k)));
  const uint32_t greatest = max_lanes(magnitudes);
  const bool is_finite = greatest < 0x7f800000u;
  const float bound = __builtin_bit_cast(float, greatest);
  const bool is_something = is_finite && bound >= kSmallestBound;
  const F factor = set1(is_something ? kGreatestInput / bound : 0.0f);
  *scale = is_something ? bound / kGreatestInput : is_finite ? 0.0f : __builtin_nanf("");
  auto* blocks = reinterpret_cast<QuantBlock*>(out);
  auto* bytes = reinterpret_cast<int8_t*>(out);
  constexpr int kPart = kInt12Inputs * kLanes;  // a tile of high or low
  for (int k = 0; k < n; k += 32) {
    const RaisedParts a = raised_parts(is_finite ? load(x + k) : zero(), factor);
    const RaisedParts b = raised_parts(is_finite ? load(x + k + kLanes) : zero(), factor);
    if (!in_tile) {
      write_part(a.high, b.high, 128, blocks + k / 32);
      write_part(a.low, b.low, 8, blocks + (n + k) / 32);
      continue;
    }
    int8_t* at = bytes + k / kInt12Inputs * (2 * kPart) + k % kInt12Inputs;
    store_quads(at, lowered(a.high, b.high, 128));
    store_quads(at + kPart, lowered(a.low, b.low, 8));
    if (k + 32 == n && n % kInt12Inputs != 0) {
      __builtin_memset(at + 32, 0, 32);
      __builtin_memset(at + kPart + 32, 0, 32);
    }
  }
}

}  // namespace
}  // namespace headrace::HEADRACE_ISA
