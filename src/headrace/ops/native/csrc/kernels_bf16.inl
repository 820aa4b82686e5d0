// Linear layers of bf16 weights and inputs rounded to bf16, by multiply-adds of float32 with the bits of AMX's tiles: see
// `Kernels::linear_bf16`. Included once for each instruction set that has no such products, after kernels_linear.inl and
// kernels_rows.inl.

#include "flushing.h"

namespace headrace::HEADRACE_ISA {
namespace {

inline constexpr int kBf16Bytes = sizeof(float);  // of an input: as a register takes it from memory

void to_bf16(const float* x, int n, std::byte* out) {
  auto* bits = reinterpret_cast<uint32_t*>(out);
  for (int i = 0; i < n; ++i) bits[i] = static_cast<uint32_t>(bf16_of(x[i])) << 16;
  for (int i = n; i < kBf16Inputs * bf16_stretches(n); ++i) bits[i] = 0;
}

// The weights of input 2 * i + Odd, decoded before or where they are used.
struct DecodedPairs {
  const float* data;
  template <int Odd>
  __attribute__((always_inline)) F weight(int i) const {
    return load(data + (2 * i + Odd) * kLanes);
  }
};
struct StoredPairs {
  const uint32_t* data;
  template <int Odd>
  __attribute__((always_inline)) F weight(int i) const {
    const I pair = load_u32(data + i * kLanes);
    return as_float(Odd ? bit_and(pair, 0xffff0000u) : shift_left<16>(pair));
  }
};

// acc[r] += the even inputs' chain + the odd inputs' chain, of one stretch. Side by side if there are registers for both.
template <int R, class Pairs>
HR_INLINE void add_stretch(Pairs w, const float* x, size_t x_stride, F* acc) {
  constexpr int pairs = kBf16Inputs / 2;
  F even[R], odd[R];
  for (int r = 0; r < R; ++r) even[r] = odd[r] = zero();
  const auto step = [&]<int Odd>(F* sums, int i) __attribute__((always_inline)) {
    const F weight = w.template weight<Odd>(i);
    for (int r = 0; r < R; ++r) sums[r] = fma(weight, set1(x[r * x_stride + 2 * i + Odd]), sums[r]);
  };
  if constexpr (2 * R <= kTileRows) {
#pragma GCC unroll 4
    for (int i = 0; i < pairs; ++i) {
      step.template operator()<0>(even, i);
      step.template operator()<1>(odd, i);
    }
  } else {
#pragma GCC unroll 4
    for (int i = 0; i < pairs; ++i) step.template operator()<0>(even, i);
#pragma GCC unroll 4
    for (int i = 0; i < pairs; ++i) step.template operator()<1>(odd, i);
  }
  for (int r = 0; r < R; ++r) acc[r] = add(acc[r], add(even[r], odd[r]));
}

HR_INLINE const float* bf16_row(const LinearSpan& s, int row) {
  return reinterpret_cast<const float*>(s.x_bf16) + row * s.x_stride;
}

// ---- Few rows: weights are decoded in registers ----

template <int R, int P>
void bf16_direct(const LinearSpan& s, int panel) {
  const std::byte* weights = s.panels + panel * s.panel_bytes;
  const Ahead ahead = Ahead::of(s, panel, P);
  const float* x = bf16_row(s, 0);
  F acc[P][R];
  for (int p = 0; p < P; ++p)
    for (int r = 0; r < R; ++r) acc[p][r] = zero();
  constexpr size_t bytes = kBf16Inputs * kLanes * sizeof(uint16_t);
  for (size_t i = 0; i < static_cast<size_t>(bf16_stretches(s.num_inputs)); ++i, x += kBf16Inputs)
    for (int p = 0; p < P; ++p) {
      ahead.fetch(p, i * bytes, bytes);
      const auto* pairs = reinterpret_cast<const uint32_t*>(weights + p * s.panel_bytes + i * bytes);
      add_stretch<R>(StoredPairs{pairs}, x, s.x_stride, acc[p]);
    }
  for (int p = 0; p < P; ++p) finish_rows<R>(s, panel + p, acc[p], 0);
}

template <int R = kDirectRows>
HR_INLINE void bf16_direct_rows(const LinearSpan& s) {
  if constexpr (R > 0) {
    if (s.rows < R) return bf16_direct_rows<R - 1>(s);
    constexpr int P = R == 1 ? 2 : 1;
    int panel = 0;
    for (; panel + P <= s.num_panels; panel += P) bf16_direct<R, P>(s, panel);
    for (; panel < s.num_panels; ++panel) bf16_direct<R, 1>(s, panel);
  }
}

// ---- Many rows: they share what is decoded into the first-level cache ----

template <int R>
void bf16_tile(const float* decoded, int stretches, const float* x, size_t x_stride, const Sums& sums) {
  F acc[R];
  for (int r = 0; r < R; ++r) acc[r] = sums.from ? load(sums.from + r * sums.from_stride) : zero();
  for (int i = 0; i < stretches; ++i, decoded += kBf16Inputs * kLanes, x += kBf16Inputs)
    add_stretch<R>(DecodedPairs{decoded}, x, x_stride, acc);
  for (int r = 0; r < R; ++r)
    store(sums.to + r * sums.to_stride, sums.bias ? add(acc[r], load(sums.bias)) : acc[r]);
}
template <int R = kTileRows>
HR_INLINE void bf16_tile_rows(int rows, const float* decoded, int stretches, const float* x, size_t x_stride,
                              const Sums& sums) {
  if constexpr (R > 0) {
    if (rows == R) return bf16_tile<R>(decoded, stretches, x, x_stride, sums);
    bf16_tile_rows<R - 1>(rows, decoded, stretches, x, x_stride, sums);
  }
}

// Rows from `row` on times one panel; see decoded_panel.
void bf16_panel(const LinearSpan& s, int panel, int row, int rows, float* decoded, float* sums) {
  constexpr int most = kStretch / kBf16Inputs, steps = kBf16Inputs / step_inputs(WeightType::bf16);
  constexpr size_t bytes = steps * record_bytes(WeightType::bf16);
  const int column = panel * kLanes, stretches = bf16_stretches(s.num_inputs);
  const bool is_full = s.num_outputs - column >= kLanes;
  const Ahead ahead = Ahead::of(s, panel, 1);
  for (int first = 0, count; first < stretches; first += count) {
    count = least(stretches - first, most);
    decode<DecodeBF16>(s.panels + panel * s.panel_bytes, first * steps, count * steps, decoded);
    ahead.fetch(0, first * bytes, count * bytes);
    Sums of{first > 0 ? sums : nullptr, kLanes, sums, kLanes, nullptr};
    if (is_full && first + count == stretches) {
      of.to = s.out + row * s.out_stride + column;
      of.to_stride = s.out_stride;
      of.bias = s.bias ? s.bias + column : nullptr;
    }
    const int num_tiles = (rows + kTileRows - 1) / kTileRows;
    for (int t = 0, r = 0, height; t < num_tiles; ++t, r += height) {
      height = (rows - r) / (num_tiles - t);
      const float* x = bf16_row(s, row + r) + first * kBf16Inputs;
      bf16_tile_rows(height, decoded, count, x, s.x_stride, of.at(r));
    }
  }
  if (!is_full) finish_panel(s, panel, rows, sums, row);
}

[[gnu::noinline]] void bf16_panels(const LinearSpan& s) {
  if (s.rows <= kDirectRows) return bf16_direct_rows(s);
  alignas(64) float decoded[kStretch * kLanes];
  alignas(64) float sums[kGroupRows * kLanes];
  for (int row = 0; row < s.rows; row += kGroupRows)
    for (int panel = 0; panel < s.num_panels; ++panel)
      bf16_panel(s, panel, row, least(s.rows - row, kGroupRows), decoded, sums);
}

void linear_bf16(const LinearSpan& s) {
  const Flushing flushing;
  bf16_panels(s);
}

}  // namespace
}  // namespace headrace::HEADRACE_ISA
