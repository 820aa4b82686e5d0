// Causal attention over the paged KV cache. Included once for each instruction set, after the other kernels.
//
// Each row keeps an online softmax (Milakov and Gimelshein, "Online normalizer calculation for softmax", 2018) that
// takes kSoftmaxTokens at a time. Every kSegmentTokens the running state is closed and merged into the row's total,
// first segment first. Nothing in this order depends on the other rows of a tile, so rows of several sequences may
// share a walk over blocks that all of them hold. Rows in order see more and more tokens: those that see a token are
// always the last ones.

namespace headrace::HEADRACE_ISA {
namespace {

constexpr int padded(int n) { return (n + kLanes - 1) / kLanes * kLanes; }
constexpr float kMinusInf = -__builtin_inff();
constexpr int kSegmentBlocks = kSegmentTokens / kBlockTokens;
// From one row's scores to the next one's. Not a power of two, or all rows would fall on the same few lines of a cache.
constexpr int kScoreStride = kSegmentTokens + kLanes;

// States of the rows: the greatest score so far, the sum of exp(score - max), and the same sum weighted with values.
struct SoftmaxRows {
  alignas(64) float max[kAttentionRows];
  alignas(64) float mass[kAttentionRows];
  alignas(64) float sum[kAttentionRows * kMaxHeadDim];
};

struct AttentionScratch {
  SoftmaxRows open, closed;  // of the running segment, and of those before it
  alignas(64) float q[kAttentionRows * kMaxHeadDim];
  alignas(64) float keys[kMaxHeadDim * kBlockTokens];
  alignas(64) float values[kSoftmaxTokens * kMaxHeadDim];
  alignas(64) float scores[kAttentionRows * kScoreStride];  // then their exponentials
  alignas(64) float max[kAttentionRows], decay[kAttentionRows];
};

HR_INLINE float* row_pointer(const AttentionTile& t, int row) {
  return t.q_out + static_cast<size_t>(t.rows[row].token) * t.stride +
         static_cast<size_t>(t.rows[row].head) * static_cast<size_t>(t.head_dim);
}
HR_INLINE float* partial_of(const AttentionTile& t, int row, int segment) {
  return t.partials + t.rows[row].partial + segment * partial_floats(t.head_dim);
}
HR_INLINE int last_position(const AttentionTile& t) { return t.rows[t.num_rows - 1].position; }
// The first row that sees the token.
HR_INLINE int first_seeing(const AttentionTile& t, int token) {
  int row = 0;
  while (row < t.num_rows && t.rows[row].position < token) ++row;
  return row;
}
// Of the tokens from `start` on, the next `count` at most, those that the row sees.
HR_INLINE int visible(const AttentionTile& t, int row, int start, int count) {
  return least(t.rows[row].position - start + 1, count);
}

// What a segment reads, in order: the keys of its blocks, their values, and, to fetch them ahead, the keys of the next
// segment. The hardware cannot guess where the next block lies, and memory takes as long as the products of some blocks.
struct Parts {
  static constexpr int kAhead = 4;
  int num_blocks;
  const std::byte* parts[2 * kSegmentBlocks + kAhead];

  Parts(const AttentionTile& t, int segment, size_t part_bytes) {
    const int begin = segment * kSegmentBlocks;
    const int end = least(last_position(t) / kBlockTokens + 1, t.end_segment * kSegmentBlocks);
    num_blocks = least(end - begin, kSegmentBlocks);
    const auto keys_of = [&](int block) { return t.kv + t.table[block] * t.block_stride; };
    for (int i = 0; i < num_blocks; ++i) {
      parts[i] = keys_of(begin + i);
      parts[num_blocks + i] = parts[i] + part_bytes;
    }
    for (int i = 2 * num_blocks, block = begin + num_blocks; i < 2 * num_blocks + kAhead; ++i, ++block)
      parts[i] = block < end ? keys_of(block) : t.kv;  // anything
  }
  const std::byte* keys(int block) const { return parts[block]; }
  const std::byte* values(int block) const { return parts[num_blocks + block]; }
  // Fetch ahead what lies where the given bytes of a part do.
  __attribute__((always_inline)) void prefetch(int part, size_t offset, size_t bytes) const {
    for (size_t line = offset; line < offset + bytes; line += 64) __builtin_prefetch(parts[part + kAhead] + line);
  }
};

// Keys or values as they lie in a block, element 0 and `stride` elements apart. They are widened in registers: for few
// rows a copy as floats would not pay. Those in int8 are still to be multiplied by their token's scale.
template <KvType T>
struct Stored {
  const std::byte* data;
  size_t stride;
  __attribute__((always_inline)) F operator()(int k) const {
    const std::byte* p = data + k * stride * kv_element_bytes(T);
    if constexpr (T == KvType::bf16)
      return from_bf16(reinterpret_cast<const uint16_t*>(p));
    else if constexpr (T == KvType::int8)
      return from_int8(reinterpret_cast<const int8_t*>(p));
    else
      return from_fp8(reinterpret_cast<const uint8_t*>(p));
  }
};
// The scales of a block's 16 keys, or values.
HR_INLINE F scales_of(const std::byte* part, int head_dim) {
  return load(reinterpret_cast<const float*>(part + head_dim * kBlockTokens));
}

template <KvType T>
void open_values(const std::byte* values, int head_dim, int dim, float* out) {
  const Stored<T> stored{values, kLanes};
  for (int i = 0; i < head_dim; ++i) store(out + i * kLanes, stored(i));
  if (dim == head_dim) return;
  // Then apart, from the last row on, so that none is overwritten before it has moved.
  for (int token = kBlockTokens - 1; token >= 0; --token) {
    __builtin_memmove(out + token * dim, out + token * head_dim, head_dim * sizeof(float));
    for (int d = head_dim; d < dim; ++d) out[token * dim + d] = 0.0f;
  }
}

// `x` where it belongs to the `seen` tokens that are left, and `other` beyond.
HR_INLINE F seen_or(F x, int seen, float other) { return seen >= kLanes ? x : keep_first(x, seen, other); }

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

// Columns of 16 that R rows take at a time: as many sums as there are registers for, so that none waits for itself.
template <int R>
constexpr int kColumns = kTileRows / R >= 4 ? 4 : kTileRows / R >= 2 ? 2 : 1;

// Scores of the tokens of C blocks, from `block` on.
template <KvType T, int R, int C>
void score_few(const Parts& parts, int block, int head_dim, const float* q, int dim, float* scores) {
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
    for (int c = 0; c < C; ++c) parts.prefetch(block + c, static_cast<size_t>(d * kRow), kStep * kRow);
#pragma GCC unroll 8
    for (int i = 0; i < kStep; ++i) take(d + i);
  }
  for (; d < head_dim; ++d) take(d);
  for (int c = 0; c < C; ++c)
    for (int r = 0; r < R; ++r) {
      if constexpr (T == KvType::int8) acc[r][c] = mul(acc[r][c], scales_of(parts.keys(block + c), head_dim));
      store(scores + r * kScoreStride + (block + c) * kBlockTokens, acc[r][c]);
    }
}

// Add the weighted values of `tokens` tokens, from `block` on, to C columns of sums, from element `d` on.
template <KvType T, int R, int C>
void gather_few(const Parts& parts, int block, int tokens, int dim, int d, const float* scores, float* sum) {
  constexpr size_t kBytes = C * kLanes * kv_element_bytes(T);
  const float* weights = scores + block * kBlockTokens;
  F acc[R][C];
  for (int r = 0; r < R; ++r)
    for (int c = 0; c < C; ++c) acc[r][c] = load(sum + r * dim + d + c * kLanes);
  const size_t stride = static_cast<size_t>(dim) * kv_element_bytes(T);
  const size_t column = static_cast<size_t>(d) * kv_element_bytes(T);
  for (; tokens > 0; tokens -= kBlockTokens, ++block, weights += kBlockTokens) {
    const std::byte* values = parts.values(block);
    size_t offset = column;
    const int count = least(tokens, kBlockTokens);
#pragma GCC unroll 4
    for (int i = 0; i < count; ++i, offset += stride) {
      if (column % 64 == 0) parts.prefetch(parts.num_blocks + block, offset, kBytes);
      for (int c = 0; c < C; ++c) {
        const F value = Stored<T>{values + offset, kLanes}(c);
        for (int r = 0; r < R; ++r) acc[r][c] = fma(value, set1(weights[r * kScoreStride + i]), acc[r][c]);
      }
    }
  }
  for (int r = 0; r < R; ++r)
    for (int c = 0; c < C; ++c) store(sum + r * dim + d + c * kLanes, acc[r][c]);
}

template <KvType T>
void score_all_few(const AttentionTile& t, const Parts& parts, int dim, AttentionScratch& s) {
  with_number(t.num_rows, [&](auto number) {
    constexpr int R = decltype(number)::value;
    constexpr int C = kColumns<R>;
    int i = 0;
    for (; i + C <= parts.num_blocks; i += C) score_few<T, R, C>(parts, i, t.head_dim, s.q, dim, s.scores);
    for (; i < parts.num_blocks; ++i) score_few<T, R, 1>(parts, i, t.head_dim, s.q, dim, s.scores);
  });
}

// Add the weighted values of tokens [begin, end) of the segment, which all rows see.
template <KvType T>
void gather_all_few(const AttentionTile& t, const Parts& parts, int begin, int end, AttentionScratch& s) {
  with_number(t.num_rows, [&](auto number) {
    constexpr int R = decltype(number)::value;
    constexpr int C = kColumns<R>;
    const int dim = t.head_dim;
    const int block = begin / kBlockTokens;
    const int tokens = end - begin;
    int d = 0;
    for (; d + C * kLanes <= dim; d += C * kLanes) gather_few<T, R, C>(parts, block, tokens, dim, d, s.scores, s.open.sum);
    for (; d < dim; d += kLanes) gather_few<T, R, 1>(parts, block, tokens, dim, d, s.scores, s.open.sum);
  });
}

// ---- Many rows: keys and values are widened in the first-level cache ----

// Scores of the segment that begins at `start`.
template <KvType T>
void score(const AttentionTile& t, const Parts& parts, int start, int dim, AttentionScratch& s) {
  for (int i = 0; i < parts.num_blocks; ++i) {
    parts.prefetch(i, 0, kv_part_bytes(T, t.head_dim));
    const int row = first_seeing(t, start + i * kBlockTokens);
    const int rows = t.num_rows - row;
    float* scores = s.scores + row * kScoreStride + i * kBlockTokens;
    for (int d = 0; d < t.head_dim; ++d) store(s.keys + d * kLanes, Stored<T>{parts.keys(i), kLanes}(d));
    matmul(rows, Floats{s.keys, kLanes}, s.q + row * dim, dim, scores, kScoreStride, t.head_dim, false);
    if constexpr (T == KvType::int8)
      for (int r = 0; r < rows; ++r, scores += kScoreStride)
        store(scores, mul(load(scores), scales_of(parts.keys(i), t.head_dim)));
  }
}

// Add the weighted values of tokens [begin, end) of the segment that begins at `start`. A row takes exactly the tokens that
// it sees, in order: first those that its whole group sees, then, with the rows of its own position, the rest.
template <KvType T>
void gather(const AttentionTile& t, const Parts& parts, int start, int begin, int end, int dim, AttentionScratch& s) {
  for (int token = begin; token < end; token += kBlockTokens) {
    const int block = token / kBlockTokens;
    parts.prefetch(parts.num_blocks + block, 0, kv_part_bytes(T, t.head_dim));
    open_values<T>(parts.values(block), t.head_dim, dim, s.values + (token - begin) * dim);
  }
  const auto take = [&](int row, int rows, int from, int to, int d) {
    matmul(rows, Floats{s.values + from * dim + d, static_cast<size_t>(dim)}, s.scores + row * kScoreStride + begin + from,
           kScoreStride, s.open.sum + row * dim + d, dim, to - from, true);
  };
  const auto seen_by = [&](int row) { return visible(t, row, start + begin, kSoftmaxTokens); };
  const int first = first_seeing(t, start + begin);
  const int full = first_seeing(t, start + begin + kSoftmaxTokens - 1);
  for (int d = 0; d < dim; d += kLanes) {
    for (int row = first; row < full; row += kTileRows) {
      const int rows = least(full - row, kTileRows);
      const int common = seen_by(row);
      take(row, rows, 0, common, d);
      for (int r = row, next; r < row + rows; r = next) {
        const int seen = seen_by(r);
        for (next = r + 1; next < row + rows && seen_by(next) == seen;) ++next;
        if (seen > common) take(r, next - r, common, seen, d);
      }
    }
    if (full < t.num_rows) take(full, t.num_rows - full, 0, kSoftmaxTokens, d);
  }
}

// Scores of the kSoftmaxTokens from `begin` on, of the segment that begins at `start`, become weights exp(score - max), times
// the scale of the token's value where it has one; the running sums decay to the new maximum.
template <KvType T>
void weigh(const AttentionTile& t, const Parts& parts, int start, int begin, int dim, AttentionScratch& s) {
  const int first = first_seeing(t, start + begin);
  for (int r = first; r < t.num_rows; ++r) {
    const float* scores = s.scores + r * kScoreStride + begin;
    const int seen = visible(t, r, start + begin, kSoftmaxTokens);
    F top = set1(kMinusInf);
    for (int i = 0; i < seen; i += kLanes) top = max(top, seen_or(load(scores + i), seen - i, kMinusInf));
    const float greatest = max_lanes(top);
    s.max[r] = greatest > s.open.max[r] ? greatest : s.open.max[r];
  }
  for (int r = 0; r < t.num_rows; r += kLanes) store(s.decay + r, exp(sub(load(s.open.max + r), load(s.max + r))));
  for (int r = first; r < t.num_rows; ++r) {
    float* scores = s.scores + r * kScoreStride + begin;
    const int seen = visible(t, r, start + begin, kSoftmaxTokens);
    F mass = zero();
    for (int i = 0; i < seen; i += kLanes) {
      const F weights = seen_or(exp(sub(load(scores + i), set1(s.max[r]))), seen - i, 0.0f);
      mass = add(mass, weights);
      if constexpr (T == KvType::int8)
        store(scores + i, mul(weights, scales_of(parts.values((begin + i) / kBlockTokens), t.head_dim)));
      else
        store(scores + i, weights);
    }
    s.open.mass[r] = s.open.mass[r] * s.decay[r] + sum_lanes(mass);
    s.open.max[r] = s.max[r];
    if (s.decay[r] == 1.0f) continue;
    float* sum = s.open.sum + r * dim;
    for (int d = 0; d < dim; d += kLanes) store(sum + d, mul(load(sum + d), set1(s.decay[r])));
  }
}

template <KvType T>
void run_segment(const AttentionTile& t, int segment, int dim, AttentionScratch& s) {
  for (int r = 0; r < padded(t.num_rows); ++r) {
    s.open.max[r] = s.max[r] = kMinusInf;
    s.open.mass[r] = 0.0f;
  }
  for (int i = 0; i < t.num_rows * dim; i += kLanes) store(s.open.sum + i, zero());
  const int start = segment * kSegmentTokens;
  const int tokens = least(last_position(t) + 1 - start, kSegmentTokens);
  const Parts parts(t, segment, kv_part_bytes(T, t.head_dim));
  const bool few = t.num_rows <= kTileRows;
  if (few)
    score_all_few<T>(t, parts, dim, s);
  else
    score<T>(t, parts, start, dim, s);
  for (int begin = 0; begin < tokens; begin += kSoftmaxTokens) {
    const int end = least(begin + kSoftmaxTokens, tokens);
    weigh<T>(t, parts, start, begin, dim, s);
    if (few && dim == t.head_dim && visible(t, 0, start, end) == end)
      gather_all_few<T>(t, parts, begin, end, s);
    else
      gather<T>(t, parts, start, begin, end, dim, s);
  }
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
