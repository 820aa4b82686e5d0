// The online softmax of attention: states of rows, weights of a window, merging of segments. Included once for each
// instruction set, after kernels_products.inl.

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
template <int Rows>
struct SoftmaxRows {
  static constexpr int kRows = Rows + kLanes;
  alignas(64) float max[kRows];
  alignas(64) float mass[kRows];
  alignas(64) float sum[Rows * kMaxHeadDim];
};

struct AttentionScratch {
  SoftmaxRows<kAttentionRows> open, closed;  // of the running segment, and of those before it
  alignas(64) float q[kAttentionRows * kMaxHeadDim];
  alignas(64) float wide[kSoftmaxTokens * kMaxHeadDim];  // keys of a window, then its values
  alignas(64) float scores[kScores];                     // then their exponentials
  alignas(64) float max[kAttentionRows + kLanes];
  alignas(64) float decay[kAttentionRows + kLanes];  // by which the sums shrink before a window is added
};

// Attention in bf16 has scores in powers of two, of which e^x is kLog2E times as many, and rounds what they weigh: 2^x of what
// is not positive to 3e-6, a polynomial in the part beyond the nearest whole number times 2 to that. 2^0 is exactly 1; NaN
// stays NaN. The exact one has e^x.
constexpr float kLog2E = 1.44269504088896341f;
struct PowerOfTwo {
  F fraction, exponent;  // fraction times 2^exponent
  I shifted;             // the exponent in the low bits of a float
};
HR_INLINE PowerOfTwo power_of_two(F x) {
  constexpr float kRound = 12582912.0f;
  const F y = max(set1(-126.0f), x);
  const F shifted = add(y, set1(kRound));
  const F exponent = sub(shifted, set1(kRound));
  const F r = sub(y, exponent);
  F p = fma(set1(9.58283618e-3f), r, set1(5.59064150e-2f));
  p = fma(p, r, set1(2.40240991e-1f));
  p = fma(p, r, set1(6.93124175e-1f));
  return {fma(p, r, set1(1.0f)), exponent, as_int(shifted)};
}
template <bool Exact>
HR_INLINE F weight_of(F difference) {
  if constexpr (Exact) return exp(difference);
  const PowerOfTwo y = power_of_two(difference);
  return mul(y.fraction, as_float(add_i32(shift_left<23>(y.shifted), 0x3f800000)));
}
// By what queries are multiplied.
template <bool Exact>
HR_INLINE F query_scale(const AttentionTile& t) {
  return set1(Exact ? t.scale : t.scale * kLog2E);
}

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

// The scores of rows, all of which see some of the window, become weights, those of score - max, times the scale of the token's
// value where it has one; in bf16 they are rounded then, but their sum is not. How far sums have to decay to the new maximum
// is left in `decay`.
template <KvType T, bool Exact, bool Whole, class Parts>
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
  for (int r = begin; r < end; r += kLanes) store(s.decay + r, weight_of<Exact>(sub(load(s.open.max + r), load(s.max + r))));
  for (int r = begin; r < end; ++r) {
    float* row = scores + r * stride;
    const int seen = Whole ? kSoftmaxTokens : seen_by(t, r, w);
    F mass = zero();
    for (int i = 0; i < seen; i += kLanes) {
      F weights = seen_or(weight_of<Exact>(sub(load(row + i), set1(s.max[r]))), seen - i, 0.0f);
      mass = add(mass, weights);
      if constexpr (T == KvType::int8)
        weights = mul(weights, scales_of(parts.values(w.block + i / kBlockTokens), t.head_dim));
      if constexpr (!Exact) weights = rounded_to_bf16(weights);
      store(row + i, weights);
    }
    s.open.mass[r] = s.open.mass[r] * s.decay[r] + sum_lanes(mass);
    s.open.max[r] = s.max[r];
  }
}
template <KvType T, bool Exact, class Parts>
void weigh(const AttentionTile& t, const Parts& parts, const Window& w, int begin, int end, float* scores, int stride,
           AttentionScratch& s) {
  if (seen_by(t, begin, w) == kSoftmaxTokens)
    weigh_rows<T, Exact, true>(t, parts, w, begin, end, scores, stride, s);
  else
    weigh_rows<T, Exact, false>(t, parts, w, begin, end, scores, stride, s);
}

// Add a closed segment to the total of one row.
template <bool Exact>
void merge_row(float* total, float* total_max, float* total_mass, const float* sum, float max, float mass, int dim) {
  const float top = max > *total_max ? max : *total_max;
  const F old_factor = weight_of<Exact>(set1(*total_max - top));
  const F new_factor = weight_of<Exact>(set1(max - top));
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

template <class Rows>
void begin_segment(Rows& open, int num_rows, int dim) {
  for (int r = 0; r < Rows::kRows; r += kLanes) {
    store(open.max + r, set1(kMinusInf));
    store(open.mass + r, zero());
  }
  for (int i = 0; i < num_rows * dim; i += kLanes) store(open.sum + i, zero());
}

// All segments of a tile, each of which `run` leaves in `open`.
template <bool Exact, class Rows, class Run>
HR_INLINE void attend_segments(const AttentionTile& t, Rows& open, Rows& closed, Run run) {
  const int dim = padded(t.head_dim);
  for (int segment = t.first_segment; segment < t.end_segment; ++segment) {
    run(segment);
    for (int r = first_seeing(t, segment * kSegmentTokens); r < t.num_rows; ++r) {
      const float* sum = open.sum + r * dim;
      if (t.partials) {
        float* partial = partial_of(t, r, segment);
        copy_sums(sum, dim, partial);
        partial[dim] = open.max[r];
        partial[dim + 1] = open.mass[r];
      } else if (segment > 0) {
        merge_row<Exact>(closed.sum + r * dim, closed.max + r, closed.mass + r, sum, open.max[r], open.mass[r], dim);
      } else {
        copy_sums(sum, dim, closed.sum + r * dim);
        closed.max[r] = open.max[r];
        closed.mass[r] = open.mass[r];
      }
    }
  }
  if (t.partials) return;
  for (int r = 0; r < t.num_rows; ++r) write_row(t, r, closed.sum + r * dim, closed.mass[r]);
}

}  // namespace
}  // namespace headrace::HEADRACE_ISA
