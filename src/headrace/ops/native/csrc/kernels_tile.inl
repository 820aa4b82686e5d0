// The register tile: to[r][16] = from[r][16] + a[r][k] * b(k)[16], k in order. Included once for each instruction set, after
// its simd header.

namespace headrace::HEADRACE_ISA {
namespace {

struct Sums {
  const float* from;  // null: sums begin at zero
  size_t from_stride;
  float* to;
  size_t to_stride;
  const float* bias;  // is added in the end; may be null

  __attribute__((always_inline)) Sums at(int row) const {
    return {from ? from + row * from_stride : nullptr, from_stride, to + row * to_stride, to_stride, bias};
  }
};

template <int R, class B>
HR_INLINE void tile(B b, const float* a, size_t a_stride, const Sums& sums, int depth) {
  F acc[R];
  for (int r = 0; r < R; ++r) acc[r] = sums.from ? load(sums.from + r * sums.from_stride) : zero();
#pragma GCC unroll 4
  for (int k = 0; k < depth; ++k) {
    const F w = b(k);
    for (int r = 0; r < R; ++r) acc[r] = fma(w, set1(a[r * a_stride + k]), acc[r]);
  }
  for (int r = 0; r < R; ++r)
    store(sums.to + r * sums.to_stride, sums.bias ? add(acc[r], load(sums.bias)) : acc[r]);
}

template <int R = kTileRows, class B>
void tile_rows(int rows, B b, const float* a, size_t a_stride, const Sums& sums, int depth) {
  if constexpr (R > 0) {
    if (rows == R) return tile<R>(b, a, a_stride, sums, depth);
    tile_rows<R - 1>(rows, b, a, a_stride, sums, depth);
  }
}

// All rows, in tiles of nearly equal height: a tile of one or two rows would wait for its own sums.
template <class B>
HR_INLINE void matmul(int rows, B b, const float* a, size_t a_stride, const Sums& sums, int depth) {
  const int num_tiles = (rows + kTileRows - 1) / kTileRows;
  for (int t = 0, row = 0; t < num_tiles; ++t) {
    const int height = (rows - row) / (num_tiles - t);
    tile_rows(height, b, a + row * a_stride, a_stride, sums.at(row), depth);
    row += height;
  }
}
template <class B>
HR_INLINE void matmul(int rows, B b, const float* a, size_t a_stride, float* c, size_t c_stride, int depth,
                      bool accumulate) {
  matmul(rows, b, a, a_stride, Sums{accumulate ? c : nullptr, c_stride, c, c_stride, nullptr}, depth);
}

struct Floats {
  const float* data;
  size_t stride;
  __attribute__((always_inline)) F operator()(int k) const { return load(data + k * stride); }
};

}  // namespace
}  // namespace headrace::HEADRACE_ISA
