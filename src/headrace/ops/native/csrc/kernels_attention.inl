// Causal attention over the paged KV cache. Included once for each instruction set, after kernels_linear.inl.
//
// Each row keeps an online softmax (Milakov and Gimelshein, 2018) that takes one block of 16 tokens at a time. Every
// kSegmentBlocks blocks the running state is closed and merged into the row's total, first segment first.

namespace headrace::HEADRACE_ISA {
namespace {

constexpr int padded(int n) { return (n + kLanes - 1) / kLanes * kLanes; }

struct AttentionScratch {
  alignas(64) float q[kAttentionRows * kMaxHeadDim];
  alignas(64) float sum[kAttentionRows * kMaxHeadDim];    // of the open segment: exp(score - max) * value
  alignas(64) float total[kAttentionRows * kMaxHeadDim];  // of the closed segments
  alignas(64) float keys[kMaxHeadDim * kBlockTokens];
  alignas(64) float values[kBlockTokens * kMaxHeadDim];
  alignas(64) float scores[kAttentionRows * kBlockTokens];
  alignas(64) float max[kAttentionRows], mass[kAttentionRows];              // of the open segment
  alignas(64) float total_max[kAttentionRows], total_mass[kAttentionRows];  // of the closed segments
  alignas(64) float block_max[kAttentionRows], decay[kAttentionRows];
};

constexpr float kMinusInf = -__builtin_inff();

HR_INLINE int row_position(const AttentionTile& t, int row) {
  return t.position + (t.first_row + row) / t.heads_per_group;
}
HR_INLINE float* row_pointer(const AttentionTile& t, int row) {
  const int r = t.first_row + row;
  return t.q_out + static_cast<size_t>(r / t.heads_per_group) * t.stride +
         static_cast<size_t>(r % t.heads_per_group) * t.head_dim;
}

HR_INLINE void open_block(const AttentionTile& t, int block, int dim, AttentionScratch& s) {
  const auto* keys = reinterpret_cast<const uint16_t*>(t.kv + t.table[block] * t.block_stride);
  const uint16_t* values = keys + t.head_dim * kBlockTokens;
  for (int d = 0; d < t.head_dim; ++d) store(s.keys + d * kLanes, from_bf16(keys + d * kLanes));
  if (dim == t.head_dim) {
    for (int i = 0; i < kBlockTokens * dim; i += kLanes) store(s.values + i, from_bf16(values + i));
    return;
  }
  for (int token = 0; token < kBlockTokens; ++token)
    for (int d = 0; d < dim; ++d) {
      const uint32_t bits = d < t.head_dim ? static_cast<uint32_t>(values[token * t.head_dim + d]) << 16 : 0;
      __builtin_memcpy(s.values + token * dim + d, &bits, sizeof bits);
    }
}

// exp(a - b) for all rows.
HR_INLINE void exp_difference(const float* a, const float* b, int rows, float* out) {
  for (int r = 0; r < rows; r += kLanes) store(out + r, exp(sub(load(a + r), load(b + r))));
}

HR_INLINE void scale_row(float* row, float factor, int dim) {
  if (factor == 1.0f) return;
  for (int d = 0; d < dim; d += kLanes) store(row + d, mul(load(row + d), set1(factor)));
}

// Rows in order see more and more tokens: [0, first) none of the block, [first, full) some, [full, rows) all.
void add_block(const AttentionTile& t, int block, int dim, AttentionScratch& s) {
  const int rows = t.num_rows;
  const int start = block * kBlockTokens;
  int first = 0;
  while (row_position(t, first) < start) ++first;
  int full = first;
  while (full < rows && row_position(t, full) < start + kBlockTokens - 1) ++full;
  const auto visible = [&](int row) { return row < full ? row_position(t, row) - start + 1 : kBlockTokens; };

  open_block(t, block, dim, s);
  matmul(rows - first, s.keys, kLanes, s.q + first * dim, dim, s.scores + first * kLanes, kLanes, t.head_dim, false);
  for (int r = first; r < rows; ++r) {
    const float block_max = max_lanes(keep_first(load(s.scores + r * kLanes), visible(r), kMinusInf));
    s.block_max[r] = block_max > s.max[r] ? block_max : s.max[r];
  }
  exp_difference(s.max, s.block_max, rows, s.decay);
  for (int r = first; r < rows; ++r) {
    const F raised = exp(sub(load(s.scores + r * kLanes), set1(s.block_max[r])));
    const F weights = keep_first(raised, visible(r), 0.0f);
    store(s.scores + r * kLanes, weights);
    s.mass[r] = s.mass[r] * s.decay[r] + sum_lanes(weights);
    s.max[r] = s.block_max[r];
    scale_row(s.sum + r * dim, s.decay[r], dim);
  }
  for (int d = 0; d < dim; d += kLanes) {
    for (int r = first; r < full; ++r)
      matmul(1, s.values + d, dim, s.scores + r * kLanes, kLanes, s.sum + r * dim + d, dim, visible(r), true);
    if (full < rows)
      matmul(rows - full, s.values + d, dim, s.scores + full * kLanes, kLanes, s.sum + full * dim + d, dim,
             kBlockTokens, true);
  }
}

// Add a closed segment to the total of one row.
HR_INLINE void merge_row(float* total, float* total_max, float* total_mass, const float* sum, float max, float mass,
                         int dim) {
  const float top = max > *total_max ? max : *total_max;
  alignas(64) float factor[kLanes];
  store(factor, exp(sub(set1(*total_max), set1(top))));
  const float old_factor = factor[0];
  store(factor, exp(sub(set1(max), set1(top))));
  const float new_factor = factor[0];
  *total_max = top;
  *total_mass = *total_mass * old_factor + mass * new_factor;
  for (int d = 0; d < dim; d += kLanes) {
    const F old = mul(load(total + d), set1(old_factor));
    store(total + d, fma(load(sum + d), set1(new_factor), old));
  }
}

HR_INLINE void write_row(const AttentionTile& t, int row, const float* total, float mass) {
  float* out = row_pointer(t, row);
  map_row(t.head_dim, out, [=](auto get) { return div(get(total), set1(mass)); });
}

void run_segment(const AttentionTile& t, int segment, int dim, AttentionScratch& s) {
  for (int r = 0; r < padded(t.num_rows); ++r) {
    s.max[r] = s.block_max[r] = kMinusInf;
    s.mass[r] = 0.0f;
  }
  for (int i = 0; i < t.num_rows * dim; i += kLanes) store(s.sum + i, zero());
  const int last = row_position(t, t.num_rows - 1) / kBlockTokens;
  const int end = (segment + 1) * kSegmentBlocks;
  for (int block = segment * kSegmentBlocks; block < end && block <= last; ++block) add_block(t, block, dim, s);
}

void attend(const AttentionTile& t) {
  AttentionScratch s;
  const int dim = padded(t.head_dim);
  for (int r = 0; r < t.num_rows; ++r) {
    const float* q = row_pointer(t, r);
    for (int d = 0; d < t.head_dim; ++d) s.q[r * dim + d] = q[d] * t.scale;
  }
  for (int segment = t.first_segment; segment < t.end_segment; ++segment) {
    run_segment(t, segment, dim, s);
    for (int r = 0; r < t.num_rows; ++r) {
      if (row_position(t, r) < segment * kSegmentBlocks * kBlockTokens) continue;  // sees nothing of it
      const float* sum = s.sum + r * dim;
      if (t.partial) {
        float* out = t.partial + r * (dim + kLanes);
        for (int d = 0; d < dim; d += kLanes) store(out + d, load(sum + d));
        out[dim] = s.max[r];
        out[dim + 1] = s.mass[r];
      } else if (segment == 0) {
        for (int d = 0; d < dim; d += kLanes) store(s.total + r * dim + d, load(sum + d));
        s.total_max[r] = s.max[r];
        s.total_mass[r] = s.mass[r];
      } else {
        merge_row(s.total + r * dim, s.total_max + r, s.total_mass + r, sum, s.max[r], s.mass[r], dim);
      }
    }
  }
  if (t.partial) return;
  for (int r = 0; r < t.num_rows; ++r) write_row(t, r, s.total + r * dim, s.total_mass[r]);
}

void merge_segments(const AttentionTile& t, const float* partials, size_t step, int num_segments) {
  const int dim = padded(t.head_dim);
  alignas(64) float total[kMaxHeadDim];
  for (int r = 0; r < t.num_rows; ++r) {
    const float* part = partials + r * (dim + kLanes);
    float total_max = part[dim];
    float total_mass = part[dim + 1];
    for (int d = 0; d < dim; d += kLanes) store(total + d, load(part + d));
    for (int i = 1; i < num_segments; ++i) {
      if (row_position(t, r) < i * kSegmentBlocks * kBlockTokens) break;
      const float* next = part + i * step;
      merge_row(total, &total_max, &total_mass, next, next[dim], next[dim + 1], dim);
    }
    write_row(t, r, total, total_mass);
  }
}

}  // namespace
}  // namespace headrace::HEADRACE_ISA
