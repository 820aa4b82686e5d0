// Causal attention over the paged KV cache. Included once for each instruction set, after the other kernels.
//
// Each row keeps an online softmax (Milakov and Gimelshein, "Online normalizer calculation for softmax", 2018) that
// takes a window of kSoftmaxTokens at a time. Every kSegmentTokens the running state is closed and merged into the row's
// total, first segment first. Nothing in this order depends on the other rows of a tile, so rows of several sequences may
// share a walk over blocks that all of them hold. Rows in order see more and more tokens: those that see a token are
// always the last ones.

namespace headrace::HEADRACE_ISA {
namespace {

constexpr int padded(int n) { return (n + kLanes - 1) / kLanes * kLanes; }
constexpr float kMinusInf = -__builtin_inff();
constexpr int kWindowBlocks = kSoftmaxTokens / kBlockTokens;
// From one row's scores to the next one's, where a walk keeps those of a segment, or of a window. Not a power of two, or all
// rows would fall on the same few lines of a cache.
constexpr int kSegmentStride = kSegmentTokens + kLanes;
constexpr int kWindowStride = kSoftmaxTokens + kLanes;
constexpr int kScores = kTileRows * kSegmentStride > kAttentionRows * kWindowStride ? kTileRows * kSegmentStride
                                                                                    : kAttentionRows * kWindowStride;

// States of the rows: the greatest score so far, the sum of exp(score - max), and the same sum weighted with values. There is
// room for sixteen rows from any one on.
struct SoftmaxRows {
  alignas(64) float max[kAttentionRows + kLanes];
  alignas(64) float mass[kAttentionRows + kLanes];
  alignas(64) float sum[kAttentionRows * kMaxHeadDim];
};

struct AttentionScratch {
  SoftmaxRows open, closed;  // of the running segment, and of those before it
  alignas(64) float q[kAttentionRows * kMaxHeadDim];
  alignas(64) float wide[kSoftmaxTokens * kMaxHeadDim];  // keys of a window, then its values
  alignas(64) float scores[kScores];                     // then their exponentials
  alignas(64) float max[kAttentionRows + kLanes];
  alignas(64) float decay[kAttentionRows + kLanes];  // by which the sums shrink before a window is added
};

struct Window {
  int first;   // token, of all
  int block;   // its block, of those of the segment
  int tokens;  // that the last row sees
};
HR_INLINE int seen_by(const AttentionTile& t, int row, const Window& w) {
  return visible(t, row, w.first, kSoftmaxTokens);
}

// `x` where it belongs to the `seen` tokens that are left, and `other` beyond.
HR_INLINE F seen_or(F x, int seen, float other) { return seen >= kLanes ? x : keep_first(x, seen, other); }

// The scores of rows, all of which see some of the window, become weights exp(score - max), times the scale of the token's
// value where it has one. How far sums have to decay to the new maximum is left in `decay`.
template <KvType T, bool Whole, class Parts>
HR_INLINE void weigh_rows(const AttentionTile& t, const Parts& parts, const Window& w, int begin, int end, float* scores,
                          int stride, AttentionScratch& s) {
  for (int r = begin; r < end; ++r) {
    const float* row = scores + r * stride;
    const int seen = Whole ? kSoftmaxTokens : seen_by(t, r, w);
    F top = set1(kMinusInf);
    for (int i = 0; i < seen; i += kLanes) top = max(top, seen_or(load(row + i), seen - i, kMinusInf));
    const float greatest = max_lanes(top);
    s.max[r] = greatest > s.open.max[r] ? greatest : s.open.max[r];
  }
  for (int r = begin; r < end; r += kLanes) store(s.decay + r, exp(sub(load(s.open.max + r), load(s.max + r))));
  for (int r = begin; r < end; ++r) {
    float* row = scores + r * stride;
    const int seen = Whole ? kSoftmaxTokens : seen_by(t, r, w);
    F mass = zero();
    for (int i = 0; i < seen; i += kLanes) {
      F weights = seen_or(exp(sub(load(row + i), set1(s.max[r]))), seen - i, 0.0f);
      mass = add(mass, weights);
      if constexpr (T == KvType::int8)
        weights = mul(weights, scales_of(parts.values(w.block + i / kBlockTokens), t.head_dim));
      store(row + i, weights);
    }
    s.open.mass[r] = s.open.mass[r] * s.decay[r] + sum_lanes(mass);
    s.open.max[r] = s.max[r];
  }
}
template <KvType T, class Parts>
void weigh(const AttentionTile& t, const Parts& parts, const Window& w, int begin, int end, float* scores, int stride,
           AttentionScratch& s) {
  if (seen_by(t, begin, w) == kSoftmaxTokens)
    weigh_rows<T, true>(t, parts, w, begin, end, scores, stride, s);
  else
    weigh_rows<T, false>(t, parts, w, begin, end, scores, stride, s);
}

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

// Scores of the tokens of C blocks, from `block` on.
template <KvType T, int R, int C>
void score_few(const FewParts& parts, int block, int head_dim, const float* q, int dim, float* scores) {
  constexpr int kRow = kBlockTokens * kv_element_bytes(T);
  constexpr int kStep = 128 / kRow;
  F acc[R][C];
  for (int r = 0; r < R; ++r)
    for (int c = 0; c < C; ++c) acc[r][c] = zero();
  const auto take = [&](int d) __attribute__((always_inline)) {
    for (int c = 0; c < C; ++c) {
      const F key = Stored<T>{parts.keys(block + c), kLanes}(d);
      for (int r = 0; r < R; ++r) acc[r][c] = fma(key, set1(q[r * dim + d]), acc[r][c]);
    }
  };
  int d = 0;
  for (; d + kStep <= head_dim; d += kStep) {
    for (int c = 0; c < C; ++c) parts.prefetch(parts.nth_keys(block + c), static_cast<size_t>(d * kRow), kStep * kRow);
#pragma GCC unroll 8
    for (int i = 0; i < kStep; ++i) take(d + i);
  }
  for (; d < head_dim; ++d) take(d);
  for (int c = 0; c < C; ++c)
    for (int r = 0; r < R; ++r) {
      if constexpr (T == KvType::int8) acc[r][c] = mul(acc[r][c], scales_of(parts.keys(block + c), head_dim));
      store(scores + r * kSegmentStride + (block + c) * kBlockTokens, acc[r][c]);
    }
}

// Add the weighted values of a window to C columns of sums, from element `d` on.
template <KvType T, int R, int C>
void gather_few(const FewParts& parts, const Window& w, int dim, int d, AttentionScratch& s) {
  constexpr size_t kBytes = C * kLanes * kv_element_bytes(T);
  const float* weights = s.scores + w.block * kBlockTokens;
  float* sum = s.open.sum + d;
  F acc[R][C];
  for (int r = 0; r < R; ++r)
    for (int c = 0; c < C; ++c) acc[r][c] = mul(load(sum + r * dim + c * kLanes), set1(s.decay[r]));
  const size_t stride = static_cast<size_t>(dim) * kv_element_bytes(T);
  const size_t column = static_cast<size_t>(d) * kv_element_bytes(T);
  int block = w.block;
  for (int tokens = w.tokens; tokens > 0; tokens -= kBlockTokens, ++block, weights += kBlockTokens) {
    const std::byte* values = parts.values(block);
    size_t offset = column;
    const int count = least(tokens, kBlockTokens);
#pragma GCC unroll 4
    for (int i = 0; i < count; ++i, offset += stride) {
      if (column % 64 == 0) parts.prefetch(parts.nth_values(block), offset, kBytes);
      for (int c = 0; c < C; ++c) {
        const F value = Stored<T>{values + offset, kLanes}(c);
        for (int r = 0; r < R; ++r) acc[r][c] = fma(value, set1(weights[r * kSegmentStride + i]), acc[r][c]);
      }
    }
  }
  for (int r = 0; r < R; ++r)
    for (int c = 0; c < C; ++c) store(sum + r * dim + c * kLanes, acc[r][c]);
}

template <KvType T>
void score_all_few(const AttentionTile& t, const FewParts& parts, int dim, AttentionScratch& s) {
  with_number(t.num_rows, [&](auto number) {
    constexpr int R = decltype(number)::value;
    constexpr int C = kColumns<R>;
    int i = 0;
    for (; i + C <= parts.num_blocks; i += C) score_few<T, R, C>(parts, i, t.head_dim, s.q, dim, s.scores);
    for (; i < parts.num_blocks; ++i) score_few<T, R, 1>(parts, i, t.head_dim, s.q, dim, s.scores);
  });
}

// Add the weighted values of a window that all rows see.
template <KvType T>
void gather_all_few(const AttentionTile& t, const FewParts& parts, const Window& w, AttentionScratch& s) {
  with_number(t.num_rows, [&](auto number) {
    constexpr int R = decltype(number)::value;
    constexpr int C = kColumns<R>;
    const int dim = t.head_dim;
    int d = 0;
    for (; d + C * kLanes <= dim; d += C * kLanes) gather_few<T, R, C>(parts, w, dim, d, s);
    for (; d < dim; d += kLanes) gather_few<T, R, 1>(parts, w, dim, d, s);
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
template <int R>
void score_tile(const float* keys, const float* q, int dim, int depth, float* scores) {
  F acc[R];
#pragma GCC unroll 32
  for (int r = 0; r < R; ++r) acc[r] = zero();
#pragma GCC unroll 4
  for (int d = 0; d < depth; ++d) {
    const F key = load(keys + d * kLanes);
#pragma GCC unroll 32
    for (int r = 0; r < R; ++r) acc[r] = fma(key, set1(q[r * dim + d]), acc[r]);
  }
#pragma GCC unroll 32
  for (int r = 0; r < R; ++r) store(scores + r * kWindowStride, acc[r]);
}

// Add the weighted values of `tokens` tokens to 16 sums of R rows, which decay before.
template <int R>
void gather_tile(const float* values, int dim, const float* weights, int stride, const float* decay, int tokens, float* sum) {
  F acc[R];
#pragma GCC unroll 32
  for (int r = 0; r < R; ++r) acc[r] = mul(load(sum + r * dim), set1(decay[r]));
#pragma GCC unroll 4
  for (int i = 0; i < tokens; ++i) {
    const F value = load(values + i * dim);
#pragma GCC unroll 32
    for (int r = 0; r < R; ++r) acc[r] = fma(value, set1(weights[r * stride + i]), acc[r]);
  }
#pragma GCC unroll 32
  for (int r = 0; r < R; ++r) store(sum + r * dim, acc[r]);
}

template <KvType T>
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
        score_tile<decltype(number)::value>(s.wide + i * t.head_dim, s.q + row * dim, dim, t.head_dim, scores + i);
      });
      if constexpr (T == KvType::int8)
        for (int r = 0; r < rows; ++r) {
          float* of_row = scores + r * kWindowStride + i;
          store(of_row, mul(load(of_row), scales_of(parts.keys(w.block + i / kBlockTokens), t.head_dim)));
        }
    }
    weigh<T>(t, parts, w, row, row + rows, s.scores, kWindowStride, s);
  });
}

// Add the weighted values of a window. A row takes exactly the tokens that it sees, in order: first those that its whole tile
// sees, then, with the rows of its own position, the rest. Scores are `stride` apart.
template <KvType T, class Parts>
void gather(const AttentionTile& t, const Parts& parts, const Window& w, int dim, const float* scores, int stride,
            AttentionScratch& s) {
  for (int i = 0; i < w.tokens; i += kBlockTokens) {
    const int part = parts.nth_values(w.block + i / kBlockTokens);
    parts.prefetch(part, 0, kv_part_bytes(T, t.head_dim));
    widen_values<T>(parts.parts[part], t.head_dim, dim, s.wide + i * dim);
  }
  for_tiles(first_seeing(t, w.first), t.num_rows, [&](int row, int rows) {
    const int common = seen_by(t, row, w);
    with_number(rows, [&](auto number) {
      for (int d = 0; d < dim; d += kLanes)
        gather_tile<decltype(number)::value>(s.wide + d, dim, scores + row * stride, stride, s.decay + row, common,
                                             s.open.sum + row * dim + d);
    });
    for (int r = row, next; r < row + rows; r = next) {
      const int seen = seen_by(t, r, w);
      for (next = r + 1; next < row + rows && seen_by(t, next, w) == seen;) ++next;
      for (int d = 0; seen > common && d < dim; d += kLanes)
        matmul(next - r, Floats{s.wide + common * dim + d, static_cast<size_t>(dim)}, scores + r * stride + common, stride,
               s.open.sum + r * dim + d, dim, seen - common, true);
    }
  });
}

// ---- A tile ----

template <KvType T>
void run_segment(const AttentionTile& t, int segment, int dim, AttentionScratch& s) {
  for (int r = 0; r < kAttentionRows + kLanes; r += kLanes) {
    store(s.open.max + r, set1(kMinusInf));
    store(s.max + r, set1(kMinusInf));
    store(s.open.mass + r, zero());
  }
  for (int i = 0; i < t.num_rows * dim; i += kLanes) store(s.open.sum + i, zero());
  const int start = segment * kSegmentTokens;
  const int tokens = least(last_position(t) + 1 - start, kSegmentTokens);
  const auto for_windows = [&](auto use) {
    for (int i = 0; i < tokens; i += kSoftmaxTokens)
      use(Window{start + i, i / kBlockTokens, least(tokens - i, kSoftmaxTokens)});
  };
  if (t.num_rows > kTileRows) {
    const ManyParts parts(t, segment, kv_part_bytes(T, t.head_dim));
    return for_windows([&](const Window& w) {
      score_and_weigh<T>(t, parts, w, dim, s);
      gather<T>(t, parts, w, dim, s.scores, kWindowStride, s);
    });
  }
  const FewParts parts(t, segment, kv_part_bytes(T, t.head_dim));
  score_all_few<T>(t, parts, dim, s);
  for_windows([&](const Window& w) {
    float* scores = s.scores + w.block * kBlockTokens;
    weigh<T>(t, parts, w, first_seeing(t, w.first), t.num_rows, scores, kSegmentStride, s);
    if (dim == t.head_dim && visible(t, 0, w.first, w.tokens) == w.tokens)
      gather_all_few<T>(t, parts, w, s);
    else
      gather<T>(t, parts, w, dim, scores, kSegmentStride, s);
  });
}

// Add a closed segment to the total of one row.
void merge_row(float* total, float* total_max, float* total_mass, const float* sum, float max, float mass, int dim) {
  const float top = max > *total_max ? max : *total_max;
  const F old_factor = exp(set1(*total_max - top));
  const F new_factor = exp(set1(max - top));
  alignas(64) float factor[2][kLanes];
  store(factor[0], old_factor);
  store(factor[1], new_factor);
  *total_max = top;
  *total_mass = *total_mass * factor[0][0] + mass * factor[1][0];
  for (int d = 0; d < dim; d += kLanes)
    store(total + d, fma(load(sum + d), new_factor, mul(load(total + d), old_factor)));
}

void write_row(const AttentionTile& t, int row, const float* total, float mass) {
  map_row(t.head_dim, row_pointer(t, row), [=](auto get) { return div(get(total), set1(mass)); });
}

void copy_sums(const float* from, int dim, float* to) {
  for (int d = 0; d < dim; d += kLanes) store(to + d, load(from + d));
}

template <KvType T>
void attend_stored(const AttentionTile& t) {
  AttentionScratch s;
  const int dim = padded(t.head_dim);
  for (int r = 0; r < t.num_rows; ++r) {
    const float* q = row_pointer(t, r);
    for (int d = 0; d < t.head_dim; ++d) s.q[r * dim + d] = q[d] * t.scale;
  }
  for (int segment = t.first_segment; segment < t.end_segment; ++segment) {
    run_segment<T>(t, segment, dim, s);
    for (int r = first_seeing(t, segment * kSegmentTokens); r < t.num_rows; ++r) {
      const float* sum = s.open.sum + r * dim;
      if (t.partials) {
        float* partial = partial_of(t, r, segment);
        copy_sums(sum, dim, partial);
        partial[dim] = s.open.max[r];
        partial[dim + 1] = s.open.mass[r];
      } else if (segment > 0) {
        merge_row(s.closed.sum + r * dim, s.closed.max + r, s.closed.mass + r, sum, s.open.max[r], s.open.mass[r], dim);
      } else {
        copy_sums(sum, dim, s.closed.sum + r * dim);
        s.closed.max[r] = s.open.max[r];
        s.closed.mass[r] = s.open.mass[r];
      }
    }
  }
  if (t.partials) return;
  for (int r = 0; r < t.num_rows; ++r) write_row(t, r, s.closed.sum + r * dim, s.closed.mass[r]);
}

void attend(const AttentionTile& t) {
  switch (t.type) {
    case KvType::bf16: return attend_stored<KvType::bf16>(t);
    case KvType::int8: return attend_stored<KvType::int8>(t);
    case KvType::fp8: return attend_stored<KvType::fp8>(t);
  }
}

void merge_segments(const AttentionTile& t) {
  const int dim = padded(t.head_dim);
  alignas(64) float total[kMaxHeadDim];
  for (int r = 0; r < t.num_rows; ++r) {
    const float* part = partial_of(t, r, 0);
    float total_max = part[dim];
    float total_mass = part[dim + 1];
    copy_sums(part, dim, total);
    for (int segment = 1; segment * kSegmentTokens <= t.rows[r].position; ++segment) {
      part = partial_of(t, r, segment);
      merge_row(total, &total_max, &total_mass, part, part[dim], part[dim + 1], dim);
    }
    write_row(t, r, total, total_mass);
  }
}

}  // namespace
}  // namespace headrace::HEADRACE_ISA
