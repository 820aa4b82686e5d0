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
  alignas(64) float scores[kAttentionRows * kSoftmaxTokens];  // then their exponentials
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
// Tokens from `start` on, of the next kSoftmaxTokens, that the row sees.
HR_INLINE int visible(const AttentionTile& t, int row, int start) {
  return least(t.rows[row].position - start + 1, kSoftmaxTokens);
}
HR_INLINE const std::byte* keys_of(const AttentionTile& t, int token) {
  return t.kv + t.table[token / kBlockTokens] * t.block_stride;
}
template <KvType T>
HR_INLINE const std::byte* values_of(const AttentionTile& t, int token) {
  return keys_of(t, token) + kv_part_bytes(T, t.head_dim);
}

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

// Fetch what is read soon: the hardware cannot guess where the next block lies.
HR_INLINE void prefetch(const std::byte* data, size_t bytes) {
  for (size_t i = 0; i < bytes; i += 64) __builtin_prefetch(data + i);
}

// Scores of tokens [start, end) for the rows that see them.
template <KvType T>
void score(const AttentionTile& t, int start, int end, int dim, AttentionScratch& s) {
  for (int token = start; token < end; token += kBlockTokens) {
    const std::byte* keys = keys_of(t, token);
    const size_t size = kv_part_bytes(T, t.head_dim);
    prefetch(keys + size, size);  // the values
    if (token + kBlockTokens <= last_position(t)) prefetch(keys_of(t, token + kBlockTokens), size);
    const int row = first_seeing(t, token);
    const int rows = t.num_rows - row;
    float* scores = s.scores + row * kSoftmaxTokens + token - start;
    const float* q = s.q + row * dim;
    const Stored<T> stored{keys, kLanes};
    if (rows <= kTileRows) {
      matmul(rows, stored, q, dim, scores, kSoftmaxTokens, t.head_dim, false);
    } else {
      for (int d = 0; d < t.head_dim; ++d) store(s.keys + d * kLanes, stored(d));
      matmul(rows, Floats{s.keys, kLanes}, q, dim, scores, kSoftmaxTokens, t.head_dim, false);
    }
    if constexpr (T == KvType::int8)
      for (int r = 0; r < rows; ++r, scores += kSoftmaxTokens)
        store(scores, mul(load(scores), scales_of(keys, t.head_dim)));
  }
}

// `x` where it belongs to the `seen` tokens that are left, and `other` beyond.
HR_INLINE F seen_or(F x, int seen, float other) { return seen >= kLanes ? x : keep_first(x, seen, other); }

// Scores become weights exp(score - max), times the scale of the token's value where it has one; the running sums decay
// to the new maximum.
template <KvType T>
void weigh(const AttentionTile& t, int start, int dim, AttentionScratch& s) {
  const int first = first_seeing(t, start);
  for (int r = first; r < t.num_rows; ++r) {
    const float* scores = s.scores + r * kSoftmaxTokens;
    const int seen = visible(t, r, start);
    F top = set1(kMinusInf);
    for (int i = 0; i < seen; i += kLanes) top = max(top, seen_or(load(scores + i), seen - i, kMinusInf));
    const float greatest = max_lanes(top);
    s.max[r] = greatest > s.open.max[r] ? greatest : s.open.max[r];
  }
  for (int r = 0; r < t.num_rows; r += kLanes) store(s.decay + r, exp(sub(load(s.open.max + r), load(s.max + r))));
  for (int r = first; r < t.num_rows; ++r) {
    float* scores = s.scores + r * kSoftmaxTokens;
    const int seen = visible(t, r, start);
    F mass = zero();
    for (int i = 0; i < seen; i += kLanes) {
      const F weights = seen_or(exp(sub(load(scores + i), set1(s.max[r]))), seen - i, 0.0f);
      mass = add(mass, weights);
      if constexpr (T == KvType::int8)
        store(scores + i, mul(weights, scales_of(values_of<T>(t, start + i), t.head_dim)));
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

// Add the weighted values of tokens [start, end). A row takes exactly the tokens that it sees, in order: first those
// that its whole group sees, then, with the rows of its own position, the rest.
template <KvType T>
void gather(const AttentionTile& t, int start, int end, int dim, AttentionScratch& s) {
  const int first = first_seeing(t, start);
  const int full = first_seeing(t, start + kSoftmaxTokens - 1);
  if (first == full && t.num_rows - full <= kTileRows && dim == t.head_dim) {
    for (int token = 0; token < kSoftmaxTokens; token += kBlockTokens) {
      const std::byte* values = values_of<T>(t, start + token);
      for (int d = 0; d < dim; d += kLanes)
        matmul(t.num_rows - full, Stored<T>{values + d * kv_element_bytes(T), static_cast<size_t>(dim)},
               s.scores + full * kSoftmaxTokens + token, kSoftmaxTokens, s.open.sum + full * dim + d, dim,
               kBlockTokens, true);
    }
    return;
  }
  for (int token = start; token < end; token += kBlockTokens)
    open_values<T>(values_of<T>(t, token), t.head_dim, dim, s.values + (token - start) * dim);
  const auto take = [&](int row, int rows, int from, int to, int d) {
    matmul(rows, Floats{s.values + from * dim + d, static_cast<size_t>(dim)}, s.scores + row * kSoftmaxTokens + from,
           kSoftmaxTokens, s.open.sum + row * dim + d, dim, to - from, true);
  };
  for (int d = 0; d < dim; d += kLanes) {
    for (int row = first; row < full; row += kTileRows) {
      const int rows = least(full - row, kTileRows);
      const int common = visible(t, row, start);
      take(row, rows, 0, common, d);
      for (int r = row, next; r < row + rows; r = next) {
        const int seen = visible(t, r, start);
        for (next = r + 1; next < row + rows && visible(t, next, start) == seen;) ++next;
        if (seen > common) take(r, next - r, common, seen, d);
      }
    }
    if (full < t.num_rows) take(full, t.num_rows - full, 0, kSoftmaxTokens, d);
  }
}

template <KvType T>
void run_segment(const AttentionTile& t, int segment, int dim, AttentionScratch& s) {
  for (int r = 0; r < padded(t.num_rows); ++r) {
    s.open.max[r] = s.max[r] = kMinusInf;
    s.open.mass[r] = 0.0f;
  }
  for (int i = 0; i < t.num_rows * dim; i += kLanes) store(s.open.sum + i, zero());
  const int end = least((segment + 1) * kSegmentTokens, last_position(t) + 1);
  for (int start = segment * kSegmentTokens; start < end; start += kSoftmaxTokens) {
    const int stop = least(start + kSoftmaxTokens, end);
    score<T>(t, start, stop, dim, s);
    weigh<T>(t, start, dim, s);
    gather<T>(t, start, stop, dim, s);
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
