// Causal attention over the paged KV cache. Included once for each instruction set, after the other kernels.
//
// Each row keeps an online softmax (Milakov and Gimelshein, "Online normalizer calculation for softmax", 2018) that
// takes kSoftmaxTokens at a time. Every kSegmentTokens the running state is closed and merged into the row's total,
// first segment first. Rows in order see more and more tokens, so those that see a token are always the last ones.

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

HR_INLINE int row_position(const AttentionTile& t, int row) {
  return t.position + (t.first_row + row) / t.heads_per_group;
}
HR_INLINE float* row_pointer(const AttentionTile& t, int row) {
  const int r = t.first_row + row;
  return t.q_out + static_cast<size_t>(r / t.heads_per_group) * t.stride +
         static_cast<size_t>(r % t.heads_per_group) * t.head_dim;
}
// The first row that sees the token.
HR_INLINE int first_seeing(const AttentionTile& t, int token) {
  const int row = (token - t.position) * t.heads_per_group - t.first_row;
  return row < 0 ? 0 : least(row, t.num_rows);
}
HR_INLINE const uint16_t* block_of(const AttentionTile& t, int token) {
  return reinterpret_cast<const uint16_t*>(t.kv + t.table[token / kBlockTokens] * t.block_stride);
}

void open_values(const uint16_t* values, int head_dim, int dim, float* out) {
  if (dim == head_dim) {
    for (int i = 0; i < kBlockTokens * dim; i += kLanes) store(out + i, from_bf16(values + i));
    return;
  }
  for (int token = 0; token < kBlockTokens; ++token)
    for (int d = 0; d < dim; ++d) {
      const uint32_t bits = d < head_dim ? static_cast<uint32_t>(values[token * head_dim + d]) << 16 : 0;
      __builtin_memcpy(out + token * dim + d, &bits, sizeof bits);
    }
}

// Fetch what is read soon: the hardware cannot guess where the next block lies.
HR_INLINE void prefetch(const uint16_t* data, int count) {
  for (int i = 0; i < count; i += 32) __builtin_prefetch(data + i);
}

// Scores of tokens [start, end) for the rows that see them.
void score(const AttentionTile& t, int start, int end, int dim, AttentionScratch& s) {
  for (int token = start; token < end; token += kBlockTokens) {
    const uint16_t* keys = block_of(t, token);
    const int size = t.head_dim * kBlockTokens;
    prefetch(keys + size, size);  // the values
    if (token + kBlockTokens <= row_position(t, t.num_rows - 1)) prefetch(block_of(t, token + kBlockTokens), size);
    for (int d = 0; d < t.head_dim; ++d) store(s.keys + d * kLanes, from_bf16(keys + d * kLanes));
    const int row = first_seeing(t, token);
    matmul(t.num_rows - row, s.keys, kLanes, s.q + row * dim, dim, s.scores + row * kSoftmaxTokens + token - start,
           kSoftmaxTokens, t.head_dim, false);
  }
}

// Scores become weights exp(score - max); the running sums decay to the new maximum.
void weigh(const AttentionTile& t, int start, int dim, AttentionScratch& s) {
  const int first = first_seeing(t, start);
  const auto visible = [&](int row) { return least(row_position(t, row) - start + 1, kSoftmaxTokens); };
  for (int r = first; r < t.num_rows; ++r) {
    float* scores = s.scores + r * kSoftmaxTokens;
    const int seen = visible(r);
    F top = set1(kMinusInf);
    for (int i = 0; i < seen; i += kLanes) top = max(top, keep_first(load(scores + i), seen - i, kMinusInf));
    const float greatest = max_lanes(top);
    s.max[r] = greatest > s.open.max[r] ? greatest : s.open.max[r];
  }
  for (int r = 0; r < t.num_rows; r += kLanes) store(s.decay + r, exp(sub(load(s.open.max + r), load(s.max + r))));
  for (int r = first; r < t.num_rows; ++r) {
    float* scores = s.scores + r * kSoftmaxTokens;
    const int seen = visible(r);
    F mass = zero();
    for (int i = 0; i < seen; i += kLanes) {
      const F weights = keep_first(exp(sub(load(scores + i), set1(s.max[r]))), seen - i, 0.0f);
      store(scores + i, weights);
      mass = add(mass, weights);
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
void gather(const AttentionTile& t, int start, int end, int dim, AttentionScratch& s) {
  for (int token = start; token < end; token += kBlockTokens)
    open_values(block_of(t, token) + t.head_dim * kBlockTokens, t.head_dim, dim, s.values + (token - start) * dim);
  const auto visible = [&](int row) { return least(row_position(t, row) - start + 1, kSoftmaxTokens); };
  const auto take = [&](int row, int rows, int from, int to, int d) {
    matmul(rows, s.values + from * dim + d, dim, s.scores + row * kSoftmaxTokens + from, kSoftmaxTokens,
           s.open.sum + row * dim + d, dim, to - from, true);
  };
  const int first = first_seeing(t, start);
  const int full = first_seeing(t, start + kSoftmaxTokens - 1);
  for (int d = 0; d < dim; d += kLanes) {
    for (int row = first; row < full; row += kTileRows) {
      const int rows = least(full - row, kTileRows);
      const int common = visible(row);
      take(row, rows, 0, common, d);
      for (int r = row, next; r < row + rows; r = next) {
        for (next = r + 1; next < row + rows && visible(next) == visible(r);) ++next;
        if (visible(r) > common) take(r, next - r, common, visible(r), d);
      }
    }
    if (full < t.num_rows) take(full, t.num_rows - full, 0, kSoftmaxTokens, d);
  }
}

void run_segment(const AttentionTile& t, int segment, int dim, AttentionScratch& s) {
  for (int r = 0; r < padded(t.num_rows); ++r) {
    s.open.max[r] = s.max[r] = kMinusInf;
    s.open.mass[r] = 0.0f;
  }
  for (int i = 0; i < t.num_rows * dim; i += kLanes) store(s.open.sum + i, zero());
  const int end = least((segment + 1) * kSegmentTokens, row_position(t, t.num_rows - 1) + 1);
  for (int start = segment * kSegmentTokens; start < end; start += kSoftmaxTokens) {
    const int stop = least(start + kSoftmaxTokens, end);
    score(t, start, stop, dim, s);
    weigh(t, start, dim, s);
    gather(t, start, stop, dim, s);
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

// A closed segment of one row as it travels to the merge: dim sums, max, mass.
size_t partial_stride(int dim) { return static_cast<size_t>(dim + kLanes); }

void attend(const AttentionTile& t) {
  AttentionScratch s;
  const int dim = padded(t.head_dim);
  for (int r = 0; r < t.num_rows; ++r) {
    const float* q = row_pointer(t, r);
    for (int d = 0; d < t.head_dim; ++d) s.q[r * dim + d] = q[d] * t.scale;
  }
  for (int segment = t.first_segment; segment < t.end_segment; ++segment) {
    run_segment(t, segment, dim, s);
    for (int r = first_seeing(t, segment * kSegmentTokens); r < t.num_rows; ++r) {
      const float* sum = s.open.sum + r * dim;
      float* total = t.partial ? t.partial + r * partial_stride(dim) : s.closed.sum + r * dim;
      if (segment > t.first_segment) {
        merge_row(total, s.closed.max + r, s.closed.mass + r, sum, s.open.max[r], s.open.mass[r], dim);
        continue;
      }
      for (int d = 0; d < dim; d += kLanes) store(total + d, load(sum + d));
      (t.partial ? total[dim] : s.closed.max[r]) = s.open.max[r];
      (t.partial ? total[dim + 1] : s.closed.mass[r]) = s.open.mass[r];
    }
  }
  if (t.partial) return;
  for (int r = 0; r < t.num_rows; ++r) write_row(t, r, s.closed.sum + r * dim, s.closed.mass[r]);
}

void merge_segments(const AttentionTile& t, const float* partials, size_t step, int num_segments) {
  const int dim = padded(t.head_dim);
  alignas(64) float total[kMaxHeadDim];
  for (int r = 0; r < t.num_rows; ++r) {
    const float* part = partials + r * partial_stride(dim);
    float total_max = part[dim];
    float total_mass = part[dim + 1];
    for (int d = 0; d < dim; d += kLanes) store(total + d, load(part + d));
    for (int i = 1; i < num_segments && row_position(t, r) >= i * kSegmentTokens; ++i) {
      part += step;
      merge_row(total, &total_max, &total_mass, part, part[dim], part[dim + 1], dim);
    }
    write_row(t, r, total, total_mass);
  }
}

}  // namespace
}  // namespace headrace::HEADRACE_ISA
