// Linear layers of bf16 weights and inputs rounded to bf16, by tiles: up to 16 rows of x times a stretch of 32 inputs of a
// panel, which is a tile as it lies in memory. Included once, after tiles.h and kernels_ahead.inl.

#include "flushing.h"

namespace headrace::amx {
namespace {

inline constexpr int kTileHeight = 16;
inline constexpr size_t kStretchBytes = kBf16Inputs * kLanes * sizeof(uint16_t);
inline constexpr size_t kStretchRowBytes = kBf16Inputs * sizeof(uint16_t);
inline constexpr int kStreams = 4;  // panels that one tile of rows walks side by side: memory gives more to several streams

// Rows in tiles of equal height. Where they do not come out even, the last one begins earlier and computes rows again.
struct RowTiles {
  int rows, count, height;
  static RowTiles of(int rows) {
    const int count = (rows + kTileHeight - 1) / kTileHeight;
    return {rows, count, (rows + count - 1) / count};
  }
  int first_row(int tile) const { return tile + 1 < count ? tile * height : rows - height; }
};

// What some tiles of rows and some panels have in common.
struct Walk {
  const std::byte* x[2];
  size_t row_bytes;
  const std::byte* weights;
  size_t panel_bytes;
  int stretches;
  Ahead ahead;

  static Walk of(const LinearSpan& s, int panel, int num_panels, int row, int next_row) {
    const size_t row_bytes = s.x_stride * sizeof(uint16_t);
    return {{s.x_bf16 + static_cast<size_t>(row) * row_bytes, s.x_bf16 + static_cast<size_t>(next_row) * row_bytes},
            row_bytes,
            s.panels + static_cast<size_t>(panel) * s.panel_bytes,
            s.panel_bytes,
            bf16_stretches(s.num_inputs),
            row == 0 ? Ahead::of(s, panel, num_panels) : Ahead{nullptr, 0}};
  }
  __attribute__((always_inline)) const std::byte* rows(int tile, int stretch) const {
    return x[tile] + static_cast<size_t>(stretch) * kStretchRowBytes;
  }
  __attribute__((always_inline)) const std::byte* panel(int nth, int stretch) const {
    const size_t offset = static_cast<size_t>(stretch) * kStretchBytes;
    ahead.fetch(nth, offset, kStretchBytes);
    return weights + static_cast<size_t>(nth) * panel_bytes + offset;
  }
};

// Two tiles of rows, or one, times N panels: the sum of tile m and panel n is in tile 2 * m + n.
template <int M, int N>
void multiply_many(const Walk& w) {
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  for (int i = 0; i < w.stretches; ++i) {
    _tile_loadd(4, w.rows(0, i), w.row_bytes);
    _tile_loadd(6, w.panel(0, i), 64);
    _tile_dpbf16ps(0, 4, 6);
    if constexpr (N > 1) {
      _tile_loadd(7, w.panel(1, i), 64);
      _tile_dpbf16ps(1, 4, 7);
    }
    if constexpr (M > 1) {
      _tile_loadd(5, w.rows(1, i), w.row_bytes);
      _tile_dpbf16ps(2, 5, 6);
      if constexpr (N > 1) _tile_dpbf16ps(3, 5, 7);
    }
  }
}

// One tile of rows times N panels, whose sums are in tiles 0 to N - 1.
template <int N>
void multiply_few(const Walk& w) {
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  for (int i = 0; i < w.stretches; ++i) {
    _tile_loadd(4, w.rows(0, i), w.row_bytes);
    _tile_loadd(5, w.panel(0, i), 64);
    _tile_dpbf16ps(0, 4, 5);
    if constexpr (N > 1) {
      _tile_loadd(6, w.panel(1, i), 64);
      _tile_dpbf16ps(1, 4, 6);
    }
    if constexpr (N > 2) {
      _tile_loadd(7, w.panel(2, i), 64);
      _tile_dpbf16ps(2, 4, 7);
    }
    if constexpr (N > 3) {
      _tile_loadd(5, w.panel(3, i), 64);
      _tile_dpbf16ps(3, 4, 5);
    }
  }
}

// Stores tile C: the sums of `height` rows and a panel. With the bias, in the mode of products of bf16.
template <int C>
void finish(const LinearSpan& s, int panel, int row, int height) {
  const int column = panel * kLanes;
  const int lanes = s.num_outputs - column < kLanes ? s.num_outputs - column : kLanes;
  float* out = s.out + static_cast<size_t>(row) * s.out_stride + column;
  const bool is_whole = lanes == kLanes && !s.bias;
  alignas(64) float sums[kTileHeight * kLanes];
  float* to = is_whole ? out : sums;
  const size_t stride = is_whole ? s.out_stride * sizeof(float) : kLanes * sizeof(float);
  if constexpr (C == 0) _tile_stored(0, to, stride);
  if constexpr (C == 1) _tile_stored(1, to, stride);
  if constexpr (C == 2) _tile_stored(2, to, stride);
  if constexpr (C == 3) _tile_stored(3, to, stride);
  if (is_whole) return;
  for (int r = 0; r < height; ++r, out += s.out_stride)
    for (int i = 0; i < lanes; ++i) out[i] = s.bias ? sums[r * kLanes + i] + s.bias[column + i] : sums[r * kLanes + i];
}

template <int N>
void few_rows(const LinearSpan& s, int panel) {
  multiply_few<N>(Walk::of(s, panel, N, 0, 0));
  finish<0>(s, panel, 0, s.rows);
  if constexpr (N > 1) finish<1>(s, panel + 1, 0, s.rows);
  if constexpr (N > 2) finish<2>(s, panel + 2, 0, s.rows);
  if constexpr (N > 3) finish<3>(s, panel + 3, 0, s.rows);
}

template <int N>
void many_rows(const LinearSpan& s, const RowTiles& tiles, int panel) {
  for (int t = 0; t < tiles.count; t += 2) {
    const int row = tiles.first_row(t);
    const bool has_two = t + 1 < tiles.count;
    const int next_row = has_two ? tiles.first_row(t + 1) : row;
    const Walk walk = Walk::of(s, panel, N, row, next_row);
    has_two ? multiply_many<2, N>(walk) : multiply_many<1, N>(walk);
    finish<0>(s, panel, row, tiles.height);
    if constexpr (N > 1) finish<1>(s, panel + 1, row, tiles.height);
    if (has_two) finish<2>(s, panel, next_row, tiles.height);
    if constexpr (N > 1)
      if (has_two) finish<3>(s, panel + 1, next_row, tiles.height);
  }
}

[[gnu::noinline]] void bf16_panels(const LinearSpan& s) {
  const RowTiles tiles = RowTiles::of(s.rows);
  TileShapes shapes;
  for (int sum = 0; sum < 4; ++sum) shapes.with(sum, tiles.height, kLanes * static_cast<int>(sizeof(float)));
  const bool few = tiles.count == 1;
  for (int tile = 4; tile < 8; ++tile) shapes.with(tile, tile < (few ? 5 : 6) ? tiles.height : 16, 64);
  const Tiles scope(shapes);
  before_tile_loads();
  int panel = 0;
  if (few) {
    for (; panel + kStreams <= s.num_panels; panel += kStreams) few_rows<kStreams>(s, panel);
    switch (s.num_panels - panel) {
      case 3: return few_rows<3>(s, panel);
      case 2: return few_rows<2>(s, panel);
      case 1: return few_rows<1>(s, panel);
      default: return;
    }
  }
  for (; panel + 2 <= s.num_panels; panel += 2) many_rows<2>(s, tiles, panel);
  if (panel < s.num_panels) many_rows<1>(s, tiles, panel);
}

void linear_bf16(const LinearSpan& s) {
  const Flushing flushing;
  bf16_panels(s);
}

}  // namespace
}  // namespace headrace::amx
