#define HEADRACE_ISA avx512
#include <type_traits>

#include "kernels.h"
#include "simd_avx512.h"
#include "kernels_maps.inl"
#include "kernels_ahead.inl"
#include "kernels_tile.inl"
#include "kernels_blocks.inl"
#include "kernels_linear.inl"
#include "kernels_int8.inl"
#include "kernels_scales.inl"
#include "kernels_int12.inl"
#include "kernels_rows.inl"
#include "kernels_kv.inl"
#include "kernels_products.inl"
#include "kernels_softmax.inl"
#include "kernels_attention.inl"

namespace headrace {
namespace avx512 {
namespace {

inline constexpr int kBf16Bytes = sizeof(uint16_t);

void to_bf16(const float* x, int n, std::byte* out) {
  auto* halves = reinterpret_cast<uint16_t*>(out);
  for (int i = 0; i < n; ++i) halves[i] = bf16_of(x[i]);
  for (int i = n; i < kBf16Inputs * bf16_stretches(n); ++i) halves[i] = 0;
}

// acc += w[2i] x[2i] + w[2i + 1] x[2i + 1], inputs in bf16, pairs in order.
template <int R>
void dot_rows(const LinearSpan& s, const std::byte* panel, const std::byte* x, float* sums) {
  const auto* w = reinterpret_cast<const uint32_t*>(panel);
  const int pairs = (s.num_inputs + 1) / 2;
  F acc[R];
  for (int r = 0; r < R; ++r) acc[r] = zero();
  for (int i = 0; i < pairs; ++i) {
    const auto weight = reinterpret_cast<__m512bh>(load_u32(w + i * kLanes));
    for (int r = 0; r < R; ++r) {
      int pair;
      __builtin_memcpy(&pair, x + r * s.x_stride * kBf16Bytes + i * sizeof pair, sizeof pair);
      acc[r] = _mm512_dpbf16_ps(acc[r], weight, reinterpret_cast<__m512bh>(_mm512_set1_epi32(pair)));
    }
  }
  for (int r = 0; r < R; ++r) store(sums + r * kLanes, acc[r]);
}

template <int R = kTileRows>
void dot_any(int rows, const LinearSpan& s, const std::byte* panel, const std::byte* x, float* sums) {
  if constexpr (R > 0) {
    if (rows == R) return dot_rows<R>(s, panel, x, sums);
    dot_any<R - 1>(rows, s, panel, x, sums);
  }
}

void linear_bf16(const LinearSpan& s) {
  alignas(64) float sums[kTileRows * kLanes];
  for (int panel = 0; panel < s.num_panels; ++panel) {
    const int num_tiles = (s.rows + kTileRows - 1) / kTileRows;
    for (int t = 0, row = 0; t < num_tiles; ++t) {
      const int height = (s.rows - row) / (num_tiles - t);
      dot_any(height, s, s.panels + panel * s.panel_bytes, s.x_bf16 + row * s.x_stride * kBf16Bytes, sums);
      finish_panel(s, panel, height, sums, row);
      row += height;
    }
  }
}
}  // namespace
}  // namespace avx512

const Kernels* avx512_kernels() {
  using namespace avx512;
  static constexpr Kernels kernels{"avx512",    linear,   linear_bf16, "dot", kBf16Bytes, linear_int8, linear_int12, weight_bounds, to_bf16, to_int8, to_int12, weight_row,     add_row,
                                   rms_norm, silu_mul, rope_row, attend,      merge_segments, max_row, exp_row,
                                   sum_exp_row, divide_row, find_row};
  return &kernels;
}

}  // namespace headrace
