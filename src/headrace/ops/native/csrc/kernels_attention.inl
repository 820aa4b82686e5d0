// Causal attention over the paged KV cache, exact or in bf16 (see kernels_products.inl). Included once for each instruction
// set, after the other kernels.
//
// Each row keeps an online softmax (Milakov and Gimelshein, "Online normalizer calculation for softmax", 2018) that
// takes a window of kSoftmaxTokens at a time. Every kSegmentTokens the running state is closed and merged into the row's
// total, first segment first. Nothing in this order depends on the other rows of a tile, so rows of several sequences may
// share a walk over blocks that all of them hold. Rows in order see more and more tokens: those that see a token are
// always the last ones.

namespace headrace::HEADRACE_ISA {
namespace {

template <int N>
struct Number {
  static constexpr int value = N;
};
template <int R = kTileRows, class Use>
HR_INLINE void with_number(int n, Use use) {
  if constexpr (R > 0) {
    if (n == R) return use(Number<R>{});
    with_number<R - 1>(n, use);
  }
}

// ---- Few rows: keys and values are widened in registers and used at once ----

using FewParts = Parts<kSegmentBlocks>;

// Columns of 16 that R rows take at a time: as many sums as there are registers for, so that none waits for itself.
template <int R>
constexpr int kColumns = kTileRows / R >= 4 ? 4 : kTileRows / R >= 2 ? 2 : 1;

// Keys of C blocks from `block` on, as the second factor of scores: steps are elements, columns are blocks.
template <KvType T, int C>
struct FewKeys {
  static constexpr int kRow = kBlockTokens * kv_element_bytes(T);
  static constexpr int kAtOnce = 128 / kRow;
  const FewParts& parts;
  int block;
  __attribute__((always_inline)) auto part(int k) const {
    const std::byte* first[C];
    for (int c = 0; c < C; ++c) first[c] = parts.keys(block + c) + k * kRow;
    return Columns{first};
  }
  __attribute__((always_inline)) void fetch(int k, int i) const {
    if (i % kAtOnce != 0) return;
    for (int c = 0; c < C; ++c)
      parts.prefetch(parts.nth_keys(block + c), static_cast<size_t>((k + i) * kRow), kAtOnce * kRow);
  }
  struct Columns {
    const std::byte* first[C];
    __attribute__((always_inline)) explicit Columns(const std::byte* const (&keys)[C]) {
      for (int c = 0; c < C; ++c) first[c] = keys[c];
    }
    __attribute__((always_inline)) F operator()(int i, int c) const { return Stored<T>{first[c], kLanes}(i); }
  };
};

// Scores of the tokens of C blocks, from `block` on.
template <KvType T, bool Exact, int R, int C>
void score_few(const FewParts& parts, int block, int head_dim, const float* q, int dim, float* scores) {
  F acc[R][C];
  clear(acc);
  add_products<Exact>(acc, FewKeys<T, C>{parts, block}, q, static_cast<size_t>(dim), head_dim);
  for (int c = 0; c < C; ++c)
    for (int r = 0; r < R; ++r) {
      if constexpr (T == KvType::int8) acc[r][c] = mul(acc[r][c], scales_of(parts.keys(block + c), head_dim));
      store(scores + r * kSegmentStride + (block + c) * kBlockTokens, acc[r][c]);
    }
}

// C columns of 16 elements of a window's values, the first one `column` bytes into a token's: steps are tokens.
template <KvType T, int C>
struct FewValues {
  static constexpr size_t kBytes = C * kLanes * kv_element_bytes(T);
  const FewParts& parts;
  int block;
  size_t stride, column;
  __attribute__((always_inline)) auto part(int k) const {
    const std::byte* first = parts.values(block + k / kBlockTokens) + column;
    return [first, stride = stride](int i, int c) __attribute__((always_inline)) {
      return Stored<T>{first + i * stride, kLanes}(c);
    };
  }
  __attribute__((always_inline)) void fetch(int k, int i) const {
    if (column % 64 == 0) parts.prefetch(parts.nth_values(block + k / kBlockTokens), column + i * stride, kBytes);
  }
};

// Add the weighted values of a window to C columns of sums, from element `d` on.
template <KvType T, bool Exact, int R, int C>
void gather_few(const FewParts& parts, const Window& w, int dim, int d, AttentionScratch& s) {
  float* sum = s.open.sum + d;
  F acc[R][C];
  for (int r = 0; r < R; ++r)
    for (int c = 0; c < C; ++c) acc[r][c] = mul(load(sum + r * dim + c * kLanes), set1(s.decay[r]));
  constexpr size_t kElement = kv_element_bytes(T);
  const FewValues<T, C> values{parts, w.block, static_cast<size_t>(dim) * kElement, static_cast<size_t>(d) * kElement};
  add_products<Exact>(acc, values, s.scores + w.block * kBlockTokens, kSegmentStride, w.tokens);
  for (int r = 0; r < R; ++r)
    for (int c = 0; c < C; ++c) store(sum + r * dim + c * kLanes, kept<Exact>(acc[r][c]));
}

template <KvType T, bool Exact>
void score_all_few(const AttentionTile& t, const FewParts& parts, int dim, AttentionScratch& s) {
  with_number(t.num_rows, [&](auto number) {
    constexpr int R = decltype(number)::value;
    constexpr int C = kColumns<R>;
    int i = 0;
    for (; i + C <= parts.num_blocks; i += C) score_few<T, Exact, R, C>(parts, i, t.head_dim, s.q, dim, s.scores);
    for (; i < parts.num_blocks; ++i) score_few<T, Exact, R, 1>(parts, i, t.head_dim, s.q, dim, s.scores);
  });
}

// Add the weighted values of a window that all rows see.
template <KvType T, bool Exact>
void gather_all_few(const AttentionTile& t, const FewParts& parts, const Window& w, AttentionScratch& s) {
  with_number(t.num_rows, [&](auto number) {
    constexpr int R = decltype(number)::value;
    constexpr int C = kColumns<R>;
    const int dim = t.head_dim;
    int d = 0;
    for (; d + C * kLanes <= dim; d += C * kLanes) gather_few<T, Exact, R, C>(parts, w, dim, d, s);
    for (; d < dim; d += kLanes) gather_few<T, Exact, R, 1>(parts, w, dim, d, s);
  });
}

// ---- Many rows: keys and values of a window are widened in the first-level cache ----

using ManyParts = Parts<kWindowBlocks>;

// Rows [begin, end) in tiles of nearly equal height.
template <class Use>
HR_INLINE void for_tiles(int begin, int end, Use use) {
  const int num_tiles = (end - begin + kTileRows - 1) / kTileRows;
  for (int i = 0, row = begin; i < num_tiles; ++i) {
    const int rows = (end - row) / (num_tiles - i);
    use(row, rows);
    row += rows;
  }
}

// Scores of 16 tokens, whose keys are [depth][16], of R rows.
template <bool Exact, int R>
void score_tile(const float* keys, const float* q, int dim, int depth, float* scores) {
  F acc[R][1];
  clear(acc);
  add_products<Exact>(acc, FloatSteps{keys, kLanes}, q, static_cast<size_t>(dim), depth);
#pragma GCC unroll 32
  for (int r = 0; r < R; ++r) store(scores + r * kWindowStride, acc[r][0]);
}

// Add the weighted values of `tokens` tokens to 16 sums of R rows, which decay before.
template <bool Exact, int R>
void gather_tile(const float* values, int dim, const float* weights, int stride, const float* decay, int tokens, float* sum) {
  F acc[R][1];
#pragma GCC unroll 32
  for (int r = 0; r < R; ++r) acc[r][0] = decay ? mul(load(sum + r * dim), set1(decay[r])) : load(sum + r * dim);
  add_products<Exact>(acc, FloatSteps{values, static_cast<size_t>(dim)}, weights, static_cast<size_t>(stride), tokens);
#pragma GCC unroll 32
  for (int r = 0; r < R; ++r) store(sum + r * dim, kept<Exact>(acc[r][0]));
}
template <bool Exact>
HR_INLINE void gather_rows(int rows, const float* values, int dim, const float* weights, int stride, const float* decay,
                           int tokens, float* sum) {
  with_number(rows, [&](auto number) {
    for (int d = 0; d < dim; d += kLanes)
      gather_tile<Exact, decltype(number)::value>(values + d, dim, weights, stride, decay, tokens, sum + d);
  });
}

template <KvType T, bool Exact>
void score_and_weigh(const AttentionTile& t, const ManyParts& parts, const Window& w, int dim, AttentionScratch& s) {
  for (int i = 0; i < w.tokens; i += kBlockTokens) {
    const int part = parts.nth_keys(w.block + i / kBlockTokens);
    parts.prefetch(part, 0, kv_part_bytes(T, t.head_dim));
    widen<T>(parts.parts[part], t.head_dim, s.wide + i * t.head_dim);
  }
  for_tiles(first_seeing(t, w.first), t.num_rows, [&](int row, int rows) {
    float* scores = s.scores + row * kWindowStride;
    const int seen = seen_by(t, row + rows - 1, w);
    for (int i = 0; i < seen; i += kBlockTokens) {
      with_number(rows, [&](auto number) {
        score_tile<Exact, decltype(number)::value>(s.wide + i * t.head_dim, s.q + row * dim, dim, t.head_dim, scores + i);
      });
      if constexpr (T == KvType::int8)
        for (int r = 0; r < rows; ++r) {
          float* of_row = scores + r * kWindowStride + i;
          store(of_row, mul(load(of_row), scales_of(parts.keys(w.block + i / kBlockTokens), t.head_dim)));
        }
    }
    weigh<T, Exact>(t, parts, w, row, row + rows, s.scores, kWindowStride, s);
  });
}

// Add the weighted values of a window. A row takes exactly the tokens that it sees, in order: first those that its whole tile
// sees, then, with the rows of its own position, the rest. Scores are `stride` apart.
template <KvType T, bool Exact, class Parts>
void gather(const AttentionTile& t, const Parts& parts, const Window& w, int dim, const float* scores, int stride,
            AttentionScratch& s) {
  for (int i = 0; i < w.tokens; i += kBlockTokens) {
    const int part = parts.nth_values(w.block + i / kBlockTokens);
    parts.prefetch(part, 0, kv_part_bytes(T, t.head_dim));
    widen_values<T>(parts.parts[part], t.head_dim, dim, s.wide + i * dim);
  }
  for_tiles(first_seeing(t, w.first), t.num_rows, [&](int row, int rows) {
    const int seen_first = seen_by(t, row, w);
    const bool alike = seen_by(t, row + rows - 1, w) == seen_first;
    const int common = Exact || alike ? seen_first : seen_first / kPairStretch * kPairStretch;
    const float* weights = scores + row * stride;
    gather_rows<Exact>(rows, s.wide, dim, weights, stride, s.decay + row, common, s.open.sum + row * dim);
    for (int r = row, next; r < row + rows; r = next) {
      const int seen = seen_by(t, r, w);
      for (next = r + 1; next < row + rows && seen_by(t, next, w) == seen;) ++next;
      if (seen == common) continue;
      gather_rows<Exact>(next - r, s.wide + common * dim, dim, scores + r * stride + common, stride, nullptr, seen - common,
                         s.open.sum + r * dim);
    }
  });
}

// ---- A tile ----

template <KvType T, bool Exact>
void run_segment(const AttentionTile& t, int segment, int dim, AttentionScratch& s) {
  begin_segment(s.open, t.num_rows, dim);
  for (int r = 0; r < kAttentionRows + kLanes; r += kLanes) store(s.max + r, set1(kMinusInf));
  const int start = segment * kSegmentTokens;
  const int tokens = least(last_position(t) + 1 - start, kSegmentTokens);
  const auto for_windows = [&](auto use) {
    for (int i = 0; i < tokens; i += kSoftmaxTokens)
      use(Window{start + i, i / kBlockTokens, least(tokens - i, kSoftmaxTokens)});
  };
  if (t.num_rows > kTileRows) {
    const ManyParts parts(t, segment, kv_part_bytes(T, t.head_dim));
    return for_windows([&](const Window& w) {
      score_and_weigh<T, Exact>(t, parts, w, dim, s);
      gather<T, Exact>(t, parts, w, dim, s.scores, kWindowStride, s);
    });
  }
  const FewParts parts(t, segment, kv_part_bytes(T, t.head_dim));
  score_all_few<T, Exact>(t, parts, dim, s);
  for_windows([&](const Window& w) {
    float* scores = s.scores + w.block * kBlockTokens;
    weigh<T, Exact>(t, parts, w, first_seeing(t, w.first), t.num_rows, scores, kSegmentStride, s);
    if (dim == t.head_dim && visible(t, 0, w.first, w.tokens) == w.tokens)
      gather_all_few<T, Exact>(t, parts, w, s);
    else
      gather<T, Exact>(t, parts, w, dim, scores, kSegmentStride, s);
  });
}

template <KvType T, bool Exact>
[[gnu::noinline]] void attend_stored(const AttentionTile& t) {
  AttentionScratch s;
  const int dim = padded(t.head_dim);
  for (int r = 0; r < t.num_rows; ++r) {
    const float* q = row_pointer(t, r);
    map_row(t.head_dim, s.q + r * dim, [&](auto get) {
      const F scaled = mul(get(q), query_scale<Exact>(t));
      return Exact ? scaled : rounded_to_bf16(scaled);
    });
  }
  attend_segments<Exact>(t, s.open, s.closed, [&](int segment) { run_segment<T, Exact>(t, segment, dim, s); });
}

template <bool Exact>
void attend_exactly_or_not(const AttentionTile& t) {
  switch (t.type) {
    case KvType::bf16: return attend_stored<KvType::bf16, Exact>(t);
    case KvType::int8: return attend_stored<KvType::int8, Exact>(t);
    case KvType::fp8: return attend_stored<KvType::fp8, Exact>(t);
  }
}

void attend(const AttentionTile& t) {
  if (!t.in_bf16) return attend_exactly_or_not<true>(t);
  const Flushing flushing;
  attend_exactly_or_not<false>(t);
}

template <bool Exact>
[[gnu::noinline]] void merge_rows(const AttentionTile& t) {
  const int dim = padded(t.head_dim);
  alignas(64) float total[kMaxHeadDim];
  for (int r = 0; r < t.num_rows; ++r) {
    const float* part = partial_of(t, r, 0);
    float total_max = part[dim];
    float total_mass = part[dim + 1];
    copy_sums(part, dim, total);
    for (int segment = 1; segment * kSegmentTokens <= t.rows[r].position; ++segment) {
      part = partial_of(t, r, segment);
      merge_row<Exact>(total, &total_max, &total_mass, part, part[dim], part[dim + 1], dim);
    }
    write_row(t, r, total, total_mass);
  }
}

void merge_segments(const AttentionTile& t) {
  if (!t.in_bf16) return merge_rows<true>(t);
  const Flushing flushing;
  merge_rows<false>(t);
}

}  // namespace
}  // namespace headrace::HEADRACE_ISA
