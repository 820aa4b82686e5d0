// Linear layers of quantised weights and quantised inputs. Included once for each instruction set, after
// kernels_linear.inl.
//
// Dot products of a block are integers, exact in any order. What is left is one chain of fused multiply-adds over the
// blocks, so that this arithmetic, too, is the same on every instruction set.

namespace headrace::HEADRACE_ISA {
namespace {

HR_INLINE int32_t quad_of(const QuantBlock& x, int quad) {
  int32_t word;
  __builtin_memcpy(&word, x.q + 4 * quad, sizeof word);
  return word;
}

// The integer sums of one block of up to six bits to a weight: total[r] += the 16 outputs' q times row r's.
template <WeightType T, int R>
struct QuadStep {
  static constexpr int kBits = weight_bits(T);
  static constexpr int kGroup = kBits == 4 ? 4 : kBits == 5 ? 2 : 1;  // words whose products fit one sum
  const uint32_t* words;
  const QuantBlock* x;
  size_t x_stride;
  I factors;  // q6_k: those of both halves of the block
  I total[R], sum[R];

  HR_INLINE I dot(I sum, I w, int32_t x) {
    if constexpr (T == WeightType::q6_k) return pair_dot(sum, w, x);
    return quad_dot(sum, w, x);
  }
  // Word W: quads W and W + 4.
  template <int W>
  __attribute__((always_inline)) void at() {
    const auto [even, odd] = quads_at<T, W>(words);
    if constexpr (W % kGroup == 0)
      for (int r = 0; r < R; ++r) sum[r] = zero_int();
    for (int r = 0; r < R; ++r) sum[r] = dot(sum[r], even, quad_of(x[r * x_stride], W));
    for (int r = 0; r < R; ++r) sum[r] = dot(sum[r], odd, quad_of(x[r * x_stride], W + 4));
    if constexpr ((W + 1) % kGroup == 0)
      for (int r = 0; r < R; ++r)
        total[r] = T == WeightType::q6_k ? pair_total(total[r], sum[r], factors) : quad_total(total[r], sum[r]);
  }
};

// Adds one block: acc[r] += the panel's 16 outputs times block `x` of row r.
template <WeightType T, int R>
HR_INLINE void int8_block(const std::byte* panel, int block, const QuantBlock* x, size_t x_stride, F* acc) {
  const auto add_scaled = [&](F scale, const I* total) {
    for (int r = 0; r < R; ++r) acc[r] = fma(to_float(total[r]), mul(scale, set1(x[r * x_stride].scale)), acc[r]);
  };
  if constexpr (T == WeightType::q8_0) {
    const uint32_t* quads = words_of<T>(panel, block);
    I sum[R];
    for (int r = 0; r < R; ++r) sum[r] = zero_int();
#pragma GCC unroll 8
    for (int quad = 0; quad < 8; ++quad) {
      const SignedBytes w = signed_bytes(load_u32(quads + quad * kLanes));
      for (int r = 0; r < R; ++r) sum[r] = byte_dot(sum[r], w, quad_of(x[r * x_stride], quad));
    }
    for (int r = 0; r < R; ++r) sum[r] = byte_total(sum[r], x[r * x_stride].total);
    add_scaled(scale_of<T>(panel, block), sum);
  } else {
    QuadStep<T, R> step{words_of<T>(panel, block), x, x_stride, zero_int(), {}, {}};
    if constexpr (T == WeightType::q6_k) step.factors = block_factors<T>(panel, block);
    for (int r = 0; r < R; ++r) {
      step.total[r] = zero_int();
      if constexpr (T == WeightType::q6_k) {  // q - 32
        int32_t halves;
        __builtin_memcpy(&halves, x[r * x_stride].negated_halves, sizeof halves);
        step.total[r] = shift_left<5>(pair_total(step.total[r], add_i32(zero_int(), halves), step.factors));
      }
    }
    unrolled<4>(step);
    if constexpr (T == WeightType::q4_0 || T == WeightType::q5_0)  // q - 8, q - 16
      for (int r = 0; r < R; ++r)
        step.total[r] = add_i32(step.total[r], -(1 << (weight_bits(T) - 1)) * x[r * x_stride].total);
    if constexpr (T == WeightType::q6_k) {
      // At most 32 * 32 * 127 * 128 < 2^24: exact as a float, as are the totals of all other types.
      add_scaled(scale_of<T>(panel, block), step.total);
    } else if constexpr (has_offset(T)) {
      const F scale = scale_of<T>(panel, block), offset = second_of_header<T>(panel, block);
      for (int r = 0; r < R; ++r) {  // whole numbers below 2^24, so the inner sum is exact
        const QuantBlock& row = x[r * x_stride];
        const F dot = fma(offset, set1(static_cast<float>(row.total)), to_float(step.total[r]));
        acc[r] = fma(dot, mul(scale, set1(row.scale)), acc[r]);
      }
    } else {
      const Affine of = affine<T>(panel, block);
      add_scaled(of.scale, step.total);
      if constexpr (T != WeightType::q4_0 && T != WeightType::q5_0)
        for (int r = 0; r < R; ++r) acc[r] = fma(of.min, set1(x[r * x_stride].sum), acc[r]);
    }
  }
}

// A lone row waits for memory, which gives more to several streams at once: it walks this many panels side by side.
inline constexpr int kStreams = 4;

// take(panel, streams) for all panels, in groups of nearly equal size.
template <class Take>
HR_INLINE void walk_streams(int num_panels, Take take) {
  const int num_groups = (num_panels + kStreams - 1) / kStreams;
  for (int g = 0, panel = 0, streams; g < num_groups; ++g, panel += streams) {
    streams = (num_panels - panel) / (num_groups - g);
    take(panel, streams);
  }
}

// Lines of a block's memory that a tile fetches of each block that comes after its panels. All at once would be more than a
// core can have under way, so the tiles of a panel share them.
template <WeightType T>
struct Lines {
  static constexpr int kAll = (step_bytes(T) + 63) / 64;
  int first = 0, count = kAll;
  static Lines of_tile(int tile, int num_tiles) {
    const int parts = least(num_tiles, kAll);
    if (tile >= parts) return {0, 0};
    const int first = kAll * tile / parts;
    return {first, kAll * (tile + 1) / parts - first};
  }
};

// R rows times P panels, one after another in memory.
template <WeightType T, int R, int P>
void int8_tile(const LinearSpan& s, int panel, int row, Lines<T> lines) {
  const std::byte* weights = s.panels + panel * s.panel_bytes;
  const QuantBlock* x = s.x_int8 + row * s.x_stride;
  const Ahead ahead = lines.count > 0 ? Ahead::of(s, panel, P) : Ahead{nullptr, 0};
  F acc[P][R];
  for (int p = 0; p < P; ++p)
    for (int r = 0; r < R; ++r) acc[p][r] = zero();
  // Stores are done in order: one that waits for its line keeps those after it, of sums for which there is no register,
  // until nothing goes on.
  if constexpr (R > 1)
    for (int r = 0; r < R; ++r) __builtin_prefetch(s.out + (row + r) * s.out_stride + panel * kLanes, 1);
  for (int block = 0; block < s.num_inputs / 32; ++block, ++x)
    for (int p = 0; p < P; ++p) {
      if (lines.count == Lines<T>::kAll)
        ahead.fetch(p, block * step_bytes(T), step_bytes(T));
      else
        ahead.fetch(p, block * step_bytes(T) + lines.first * 64, lines.count * 64);
      int8_block<T, R>(weights + p * s.panel_bytes, block, x, s.x_stride, acc[p]);
    }
  for (int p = 0; p < P; ++p) finish_rows<R>(s, panel + p, acc[p], row);
}

template <WeightType T, int R = kInt8Rows>
HR_INLINE void int8_tile_of(const LinearSpan& s, int panel, int row, int height, Lines<T> lines) {
  if constexpr (R > 0) {
    if (height == R) return int8_tile<T, R, 1>(s, panel, row, lines);
    int8_tile_of<T, R - 1>(s, panel, row, height, lines);
  }
}

template <WeightType T, int P = kStreams>
HR_INLINE void int8_streams(const LinearSpan& s, int panel, int streams) {
  if constexpr (P > 0) {
    if (streams == P) return int8_tile<T, 1, P>(s, panel, 0, {});
    int8_streams<T, P - 1>(s, panel, streams);
  }
}

template <WeightType T>
void int8_panels(const LinearSpan& s) {
  if (s.rows == 1) return walk_streams(s.num_panels, [&](int panel, int n) { int8_streams<T>(s, panel, n); });
  const int num_tiles = (s.rows + kInt8Rows - 1) / kInt8Rows;
  for (int panel = 0; panel < s.num_panels; ++panel)
    for (int t = 0, row = 0; t < num_tiles; ++t) {
      const int height = (s.rows - row) / (num_tiles - t);
      int8_tile_of<T>(s, panel, row, height, Lines<T>::of_tile(t, num_tiles));
      row += height;
    }
}

void linear_int8(const LinearSpan& s) {
  switch (s.type) {
    case WeightType::q4_0: return int8_panels<WeightType::q4_0>(s);
    case WeightType::q4_1: return int8_panels<WeightType::q4_1>(s);
    case WeightType::q5_0: return int8_panels<WeightType::q5_0>(s);
    case WeightType::q5_1: return int8_panels<WeightType::q5_1>(s);
    case WeightType::q8_0: return int8_panels<WeightType::q8_0>(s);
    case WeightType::q4_g32: return int8_panels<WeightType::q4_g32>(s);
    case WeightType::q4_g128: return int8_panels<WeightType::q4_g128>(s);
    case WeightType::q4_k: return int8_panels<WeightType::q4_k>(s);
    case WeightType::q5_k: return int8_panels<WeightType::q5_k>(s);
    case WeightType::q6_k: return int8_panels<WeightType::q6_k>(s);
    default: return linear(s);
  }
}

// How values of at most `greatest` become -127..127: what they are multiplied by, and what undoes it. The scale is NaN
// where one of them is no number, so that this is not hidden.
struct Int8Range {
  float factor, scale;
};
HR_INLINE Int8Range int8_range(float greatest, bool is_finite) {
  if (!is_finite) return {0.0f, __builtin_nanf("")};
  if (greatest < 1e-30f) return {0.0f, 0.0f};  // 127 / greatest would overflow
  return {127.0f / greatest, greatest / 127.0f};
}

// Symmetric, to nearest even, one scale for each block. What is no number makes its whole block NaN.
void to_int8(const float* x, int n, QuantBlock* out, int step) {
  constexpr float kRound = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer, which stays in the low bits
  constexpr auto kRoundBits = __builtin_bit_cast(uint32_t, kRound);
  for (int k = 0; k < n; k += 32, x += 32, out += step) {
    const F a = load(x);
    const F b = load(x + kLanes);
    // The bits of magnitudes are in the order of these, and after them come those of what is no number.
    const auto magnitudes = [](F v) { return bit_and(as_int(v), 0x7fffffffu); };
    const uint32_t greatest = max_lanes(max_u32(magnitudes(a), magnitudes(b)));
    const bool is_finite = greatest < 0x7f800000u;
    const Int8Range range = int8_range(__builtin_bit_cast(float, greatest), is_finite);
    const auto rounded = [&](F v) { return fma(is_finite ? v : zero(), set1(range.factor), set1(kRound)); };
    const I first_half = as_int(rounded(a)), second_half = as_int(rounded(b));
    static_assert(quad_input(7, 1) == 15 && quad_input(0, 2) == 16);
    const I low = bit_and(first_half, 0xffu), high = bit_and(second_half, 0xffu);
    alignas(64) uint32_t pairs[kLanes];  // bytes 0 and 2 of the quads, then bytes 1 and 3
    store(reinterpret_cast<float*>(pairs), as_float(bit_or(low, shift_left<16>(high))));
    for (int quad = 0; quad < 8; ++quad) {
      const uint32_t word = pairs[quad] | pairs[quad + 8] << 8;
      __builtin_memcpy(out->q + 4 * quad, &word, sizeof word);
    }
    // Both totals at once, each in 16 bits: what sixteen of kRound add to them is known.
    const uint32_t totals = sum_lanes(add_u32(first_half, shift_left<16>(second_half))) - 16 * kRoundBits;
    const auto first = static_cast<int16_t>(totals);
    const auto second = static_cast<int16_t>((totals - static_cast<uint32_t>(first)) >> 16);
    const int32_t total = first + second;
    out->scale = range.scale;
    out->sum = out->scale * static_cast<float>(total);
    out->total = total;
    out->negated_halves[0] = static_cast<int16_t>(-first);
    out->negated_halves[1] = static_cast<int16_t>(-second);
  }
}

}  // namespace
}  // namespace headrace::HEADRACE_ISA
