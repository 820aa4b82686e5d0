// Attention in bf16 by tiles, for many rows. Included after kernels_softmax.inl. Its bits are those of kernels_attention.inl:
// a tile's product is the arithmetic that kernels_products.inl follows.

namespace headrace::amx {
namespace {

constexpr int kTileDims = 32;  // inputs of a tile's product
constexpr int kTokenPairs = kSoftmaxTokens / 2;
using WindowParts = Parts<1>;  // a block at a time: its keys, then its values
constexpr int wide(int head_dim) { return (head_dim + kTileDims - 1) / kTileDims * kTileDims; }

// Scores of a window's tokens, of the sixteen rows of a tile; then what weighs their values.
struct TileRows {
  alignas(64) float scores[kLanes * kSoftmaxTokens];
  alignas(64) uint16_t weights[kLanes * kSoftmaxTokens];
};

struct TileScratch {
  SoftmaxRows<kTiledRows> open, closed;
  alignas(64) uint16_t q[kTiledRows * kMaxHeadDim];  // [row][head_dim, padded to 32]
  alignas(64) uint32_t keys[kSoftmaxTokens * kMaxHeadDim / 2];    // of a window: [16 tokens][pair of elements][token][2]
  alignas(64) uint32_t values[kSoftmaxTokens * kMaxHeadDim / 2];  // [16 elements][pair of tokens][element][2]
  TileRows rows[2];
};

HR_INLINE int whole_tiles(int rows) { return (rows + kLanes - 1) / kLanes * kLanes; }

// Rounded to nearest even; there are no subnormal numbers here.
HR_INLINE __m256i to_bf16(F x) {
#ifdef HEADRACE_EMULATE_AVX512
  return _mm512_cvtepi32_epi16(shift_right<16>(as_int(rounded_to_bf16(x))));
#else
  return reinterpret_cast<__m256i>(_mm512_cvtneps_pbh(x));
#endif
}
HR_INLINE void store_bf16(uint16_t* p, F x) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), to_bf16(x)); }

// Both are exact in bf16.
HR_INLINE I pair_of(F even, F odd) { return bit_or(shift_right<16>(as_int(even)), bit_and(as_int(odd), 0xffff0000u)); }
HR_INLINE void store_pairs(uint32_t* p, I pairs) { _mm512_storeu_si512(p, pairs); }

void round_queries(const AttentionTile& t, TileScratch& s) {
  const int dim = wide(t.head_dim);
  alignas(64) float row[kMaxHeadDim] = {};
  for (int r = 0; r < whole_tiles(t.num_rows); ++r) {
    if (r < t.num_rows) {
      const float* q = row_pointer(t, r);
      map_row(t.head_dim, row, [&](auto get) { return mul(get(q), query_scale<false>(t)); });
    }
    for (int d = 0; d < dim; d += kLanes) store_bf16(s.q + r * dim + d, load(row + d));
  }
}

template <KvType T>
void pair_keys(const std::byte* keys, int head_dim, uint32_t* out) {
  const Stored<T> stored{keys, kLanes};
  int p = 0;
#pragma GCC unroll 4
  for (; p < head_dim / 2; ++p) store_pairs(out + p * kLanes, pair_of(stored(2 * p), stored(2 * p + 1)));
  for (; p < wide(head_dim) / 2; ++p) store_pairs(out + p * kLanes, zero_int());
}

// `count` values, and zeros where these are less than sixteen: behind the last ones of a pool there may be no memory.
template <KvType T>
HR_INLINE F first_values(const std::byte* values, int count) {
  if (count >= kLanes) return Stored<T>{values, kLanes}(0);
  alignas(64) std::byte some[kLanes * kv_element_bytes(T)] = {};
  __builtin_memcpy(some, values, static_cast<size_t>(count) * kv_element_bytes(T));
  return Stored<T>{some, kLanes}(0);
}

// Of a block, the first `count` tokens; the others count as zero.
template <KvType T>
void pair_values(const std::byte* values, int head_dim, int count, uint32_t* out) {
  const size_t bytes = static_cast<size_t>(head_dim) * kv_element_bytes(T);
  for (int p = 0; p < kBlockTokens / 2; ++p)
    for (int d = 0; d * kLanes < head_dim; ++d) {
      const auto of = [&](int token) __attribute__((always_inline)) {
        const std::byte* first = values + token * bytes + d * kLanes * kv_element_bytes(T);
        return token < count ? first_values<T>(first, head_dim - d * kLanes) : zero();
      };
      store_pairs(out + (d * kTokenPairs + p) * kLanes, pair_of(of(2 * p), of(2 * p + 1)));
    }
}

// Scores of sixteen rows from `row` on.
void score_tile(int row, int dim, TileScratch& s, float* scores) {
  const int block = dim / 2 * kLanes;
  before_tile_loads();
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  for (int d = 0; d < dim; d += kTileDims) {
    const uint32_t* keys = s.keys + d / 2 * kLanes;
    _tile_loadd(4, s.q + row * dim + d, dim * 2);
    _tile_loadd(5, keys, 64);
    _tile_dpbf16ps(0, 4, 5);
    _tile_loadd(6, keys + block, 64);
    _tile_dpbf16ps(1, 4, 6);
    _tile_loadd(7, keys + 2 * block, 64);
    _tile_dpbf16ps(2, 4, 7);
    _tile_loadd(5, keys + 3 * block, 64);
    _tile_dpbf16ps(3, 4, 5);
  }
  _tile_stored(0, scores, kSoftmaxTokens * 4);
  _tile_stored(1, scores + kLanes, kSoftmaxTokens * 4);
  _tile_stored(2, scores + 2 * kLanes, kSoftmaxTokens * 4);
  _tile_stored(3, scores + 3 * kLanes, kSoftmaxTokens * 4);
  before_tile_loads();  // nor does it know that these write it
}

// Add the weighted values of a window to the sums of sixteen rows.
void gather_tile(const uint16_t* weights, const uint32_t* all_values, int dim, int tokens, float* sum) {
  constexpr int kColumn = kTokenPairs * kLanes;  // from one column of 16 elements to the next
  const int stride = dim * 4;
  before_tile_loads();
  int d = 0;
  for (; d + 4 * kLanes <= dim; d += 4 * kLanes) {
    const uint32_t* values = all_values + d / kLanes * kColumn;
    _tile_loadd(0, sum + d, stride);
    _tile_loadd(1, sum + d + kLanes, stride);
    _tile_loadd(2, sum + d + 2 * kLanes, stride);
    _tile_loadd(3, sum + d + 3 * kLanes, stride);
    for (int i = 0; i < tokens; i += kTileDims, values += kTileDims / 2 * kLanes) {
      _tile_loadd(4, weights + i, kSoftmaxTokens * 2);
      _tile_loadd(5, values, 64);
      _tile_dpbf16ps(0, 4, 5);
      _tile_loadd(6, values + kColumn, 64);
      _tile_dpbf16ps(1, 4, 6);
      _tile_loadd(7, values + 2 * kColumn, 64);
      _tile_dpbf16ps(2, 4, 7);
      _tile_loadd(5, values + 3 * kColumn, 64);
      _tile_dpbf16ps(3, 4, 5);
    }
    _tile_stored(0, sum + d, stride);
    _tile_stored(1, sum + d + kLanes, stride);
    _tile_stored(2, sum + d + 2 * kLanes, stride);
    _tile_stored(3, sum + d + 3 * kLanes, stride);
  }
  for (; d < dim; d += kLanes) {
    const uint32_t* values = all_values + d / kLanes * kColumn;
    _tile_loadd(0, sum + d, stride);
    for (int i = 0; i < tokens; i += kTileDims, values += kTileDims / 2 * kLanes) {
      _tile_loadd(4, weights + i, kSoftmaxTokens * 2);
      _tile_loadd(5, values, 64);
      _tile_dpbf16ps(0, 4, 5);
    }
    _tile_stored(0, sum + d, stride);
  }
  before_tile_loads();
}

// The same where some values are no numbers, which 0 times would spread: a row takes exactly the tokens that it sees.
void gather_seen(const uint16_t* weights, const uint32_t* all_values, int dim, int seen, float* sum) {
  for (int d = 0; d < dim; d += kLanes) {
    const uint32_t* values = all_values + d * kTokenPairs;
    F total = load(sum + d);
    for (int first = 0; first < seen; first += kTileDims) {
      F chains[2] = {zero(), zero()};
      for (int i = first; i < least(first + kTileDims, seen); ++i) {
        const I pairs = load_u32(values + i / 2 * kLanes);
        const F value = as_float(i % 2 == 0 ? shift_left<16>(pairs) : bit_and(pairs, 0xffff0000u));
        const F weight = set1(__builtin_bit_cast(float, static_cast<uint32_t>(weights[i]) << 16));
        chains[i % 2] = fma(value, weight, chains[i % 2]);
      }
      total = add(total, add(chains[0], chains[1]));
    }
    store(sum + d, total);
  }
}

// One more than the greatest exponent is a sign.
bool are_numbers(const uint32_t* pairs, int count) {
  I signs = zero_int();
  for (int i = 0; i < count; i += kLanes)
    signs = bit_or(signs, add_i32(bit_and(load_u32(pairs + i), 0x7f807f80u), 0x00800080));
  return max_lanes(bit_and(signs, 0x80008000u)) == 0;
}

// `weight_of`: the same bits, in fewer instructions.
HR_INLINE F weight_by_scale(F difference) {
#ifdef HEADRACE_EMULATE_AVX512
  return weight_of<false>(difference);
#else
  const PowerOfTwo y = power_of_two(difference);
  return _mm512_scalef_ps(y.fraction, y.exponent);
#endif
}

template <KvType T>
struct TileWindow {
  const AttentionTile& t;
  Window w;
  int begin;  // the first row that sees some of it
  F key_scales[kWindowBlocks], value_scales[kWindowBlocks];  // int8 only
};

// One of sixteen rows folded as `sum_lanes` and `max_lanes` fold it, for all rows at once: lane r is that of row r. `row` makes
// the lanes of a row.
template <class Fold, class Row>
HR_INLINE F fold_rows(Fold fold, Row row) {
  const auto halves = [&](int a, int b) __attribute__((always_inline)) {
    const F x = row(a), y = row(b);
    return fold(_mm512_shuffle_f32x4(x, y, 0x44), _mm512_shuffle_f32x4(x, y, 0xee));
  };
  F fours[4];
#pragma GCC unroll 1
  for (int i = 0; i < 4; ++i) {
    const F x = halves(i, 4 + i), y = halves(8 + i, 12 + i);
    fours[i] = fold(_mm512_shuffle_f32x4(x, y, 0x88), _mm512_shuffle_f32x4(x, y, 0xdd));
  }
  const auto twos = [&](F x, F y) __attribute__((always_inline)) {
    return fold(_mm512_shuffle_ps(x, y, 0x44), _mm512_shuffle_ps(x, y, 0xee));
  };
  const F x = twos(fours[0], fours[1]), y = twos(fours[2], fours[3]);
  return fold(_mm512_shuffle_ps(x, y, 0x88), _mm512_shuffle_ps(x, y, 0xdd));
}

// Tokens that rows of a tile see of a window: all of them, or as many as `seen` has.
template <bool Whole>
struct SeenByRows {
  int seen[kLanes];
  __attribute__((always_inline)) bool any(int row, int token) const { return Whole || token < seen[row]; }
  __attribute__((always_inline)) F of(F x, int row, int token, float other) const { return Whole ? x : seen_or(x, seen[row] - token, other); }
};

// What `weigh` of kernels_softmax.inl does, for the sixteen rows from `first` on. Those that see nothing, or are none, get
// weights of 0.
template <KvType T, bool Whole>
void weigh_rows_of(const TileWindow<T>& window, int first, const SeenByRows<Whole>& seen, TileScratch& s, TileRows& rows) {
  const F top = fold_rows([](F a, F b) { return max(a, b); }, [&](int r) __attribute__((always_inline)) {
    float* row = rows.scores + r * kSoftmaxTokens;
    F top = set1(kMinusInf);
    for (int i = 0; i < kSoftmaxTokens; i += kLanes) {
      F score = load(row + i);
      if constexpr (T == KvType::int8) store(row + i, score = mul(score, window.key_scales[i / kLanes]));
      if (seen.any(r, i)) top = max(top, seen.of(score, r, i, kMinusInf));
    }
    return top;
  });
  const F before = load(s.open.max + first), now = max(top, before);
  alignas(64) float greatest[kLanes], decay[kLanes], mass[kLanes];
  store(greatest, now);
  const F by = weight_of<false>(sub(before, now));
  store(decay, by);
  const F sums = fold_rows([](F a, F b) { return add(a, b); }, [&](int r) __attribute__((always_inline)) {
    const float* row = rows.scores + r * kSoftmaxTokens;
    uint16_t* out = rows.weights + r * kSoftmaxTokens;
    const F max = set1(greatest[r]);
    F mass = zero();
    for (int i = 0; i < kSoftmaxTokens; i += kLanes) {
      F weights = zero();
      if (seen.any(r, i)) {
        weights = seen.of(weight_by_scale(sub(load(row + i), max)), r, i, 0.0f);
        mass = add(mass, weights);
        if constexpr (T == KvType::int8) weights = seen.of(mul(weights, window.value_scales[i / kLanes]), r, i, 0.0f);
      }
      store_bf16(out + i, weights);
    }
    return mass;
  });
  store(mass, add(mul(load(s.open.mass + first), by), sums));
  const int dim = padded(window.t.head_dim);
  for (int r = 0; r < kLanes; ++r) {
    if (!seen.any(r, 0)) continue;
    s.open.max[first + r] = greatest[r];
    s.open.mass[first + r] = mass[r];
    const F decays = set1(decay[r]);
    float* sum = s.open.sum + (first + r) * dim;
    for (int d = 0; d < dim; d += kLanes) store(sum + d, mul(kept<false>(load(sum + d)), decays));
  }
}

template <KvType T>
void weigh_tile(const TileWindow<T>& window, int first, TileScratch& s, TileRows& rows) {
  const AttentionTile& t = window.t;
  if (first >= window.begin && seen_by(t, first, window.w) == kSoftmaxTokens)
    return weigh_rows_of<T, true>(window, first, {}, s, rows);
  SeenByRows<false> seen{};
  for (int r = window.begin > first ? window.begin : first; r < least(first + kLanes, t.num_rows); ++r)
    seen.seen[r - first] = seen_by(t, r, window.w);
  weigh_rows_of<T, false>(window, first, seen, s, rows);
}

// Makes pairs of a window's keys and values. Tells whether 0 times any of its values is 0.
template <KvType T>
bool pair_window(TileWindow<T>& window, const WindowParts& parts, TileScratch& s) {
  const int dim = window.t.head_dim;
  const Window& w = window.w;
  const int num_blocks = (w.tokens + kBlockTokens - 1) / kBlockTokens;
  for (int i = 0; i < (w.tokens + kTileDims - 1) / kTileDims * 2; ++i) {
    const int block = w.block + least(i, num_blocks - 1);
    parts.prefetch(parts.nth_keys(block), 0, kv_part_bytes(T, dim));
    pair_keys<T>(parts.keys(block), dim, s.keys + i * wide(dim) / 2 * kLanes);
    parts.prefetch(parts.nth_values(block), 0, kv_part_bytes(T, dim));
    pair_values<T>(parts.values(block), dim, w.tokens - i * kBlockTokens, s.values + i * kBlockTokens / 2 * kLanes);
  }
  if constexpr (T == KvType::int8)
    for (int i = 0; i < kWindowBlocks; ++i) {
      const int block = w.block + least(i, num_blocks - 1);
      window.key_scales[i] = scales_of(parts.keys(block), dim);
      window.value_scales[i] = scales_of(parts.values(block), dim);
    }
  for (int d = 0; d < dim; d += kLanes)
    if (!are_numbers(s.values + d * kTokenPairs, (w.tokens + 1) / 2 * kLanes)) return false;
  return true;
}

// Each tile's products run beside the exponentials of the tile before it.
template <KvType T>
void run_tiles(const TileWindow<T>& window, bool are_all_numbers, TileScratch& s) {
  const AttentionTile& t = window.t;
  const int dim = padded(t.head_dim);
  const int begin = window.begin / kLanes * kLanes;
  const int end = whole_tiles(t.num_rows);
  const auto rows_of = [&](int row) -> TileRows& { return s.rows[row / kLanes % 2]; };
  const auto score = [&](int row) { score_tile(row, wide(t.head_dim), s, rows_of(row).scores); };
  const auto gather = [&](int row) {
    const uint16_t* weights = rows_of(row).weights;
    if (are_all_numbers) return gather_tile(weights, s.values, dim, window.w.tokens, s.open.sum + row * dim);
    for (int r = 0; r < least(kLanes, t.num_rows - row); ++r)
      if (row + r >= window.begin)
        gather_seen(weights + r * kSoftmaxTokens, s.values, dim, seen_by(t, row + r, window.w), s.open.sum + (row + r) * dim);
  };
  score(begin);
  for (int row = begin; row < end; row += kLanes) {
    if (row + kLanes < end) score(row + kLanes);
    if (row > begin) gather(row - kLanes);
    weigh_tile<T>(window, row, s, rows_of(row));
  }
  gather(end - kLanes);
}

template <KvType T>
void run_window(const AttentionTile& t, const WindowParts& parts, const Window& w, TileScratch& s) {
  TileWindow<T> window{.t = t, .w = w, .begin = first_seeing(t, w.first), .key_scales = {}, .value_scales = {}};
  const bool are_all_numbers = pair_window(window, parts, s);
  run_tiles<T>(window, are_all_numbers, s);
}

template <KvType T>
[[gnu::noinline]] void attend_by_tiles(const AttentionTile& t) {
  TileScratch s;
  const Tiles tiles([] {
    TileShapes shapes;
    for (int i = 0; i < 8; ++i) shapes.with(i, kLanes, 64);
    return shapes;
  }());
  round_queries(t, s);
  const int dim = padded(t.head_dim);
  attend_segments<false>(t, s.open, s.closed, [&](int segment) {
    begin_segment(s.open, whole_tiles(t.num_rows), dim);
    const WindowParts parts(t, segment, kv_part_bytes(T, t.head_dim));
    const int start = segment * kSegmentTokens;
    const int tokens = least(last_position(t) + 1 - start, kSegmentTokens);
    for (int i = 0; i < tokens; i += kSoftmaxTokens)
      run_window<T>(t, parts, {start + i, i / kBlockTokens, least(tokens - i, kSoftmaxTokens)}, s);
    for (int i = 0; i < t.num_rows * dim; i += kLanes) store(s.open.sum + i, kept<false>(load(s.open.sum + i)));
  });
}

void attend(const AttentionTile& t) {
  if (!t.in_bf16 || t.num_rows <= kTileRows) return avx512_kernels()->attend(t);
  const Flushing flushing;
  switch (t.type) {
    case KvType::bf16: return attend_by_tiles<KvType::bf16>(t);
    case KvType::int8: return attend_by_tiles<KvType::int8>(t);
    case KvType::fp8: return attend_by_tiles<KvType::fp8>(t);
  }
}

}  // namespace
}  // namespace headrace::amx
