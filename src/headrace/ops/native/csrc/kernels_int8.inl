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

// Adds one block: acc[r] += the record's 16 outputs times block `x` of row r.
template <WeightType T, int R>
HR_INLINE void int8_block(const std::byte* record, const QuantBlock* x, size_t x_stride, F* acc) {
  const auto* half = reinterpret_cast<const uint16_t*>(record);
  I sum[R];
  for (int r = 0; r < R; ++r) sum[r] = zero_int();
  if constexpr (T == WeightType::q8_0) {
    const auto* quads = reinterpret_cast<const uint32_t*>(record + 32);
#pragma GCC unroll 8
    for (int quad = 0; quad < 8; ++quad) {
      const SignedBytes w = signed_bytes(load_u32(quads + quad * kLanes));
      for (int r = 0; r < R; ++r) sum[r] = byte_dot(sum[r], w, quad_of(x[r * x_stride], quad));
    }
    for (int r = 0; r < R; ++r) sum[r] = byte_total(sum[r], x[r * x_stride].total);
  } else {
    const auto* words = reinterpret_cast<const uint32_t*>(record + (T == WeightType::q4_1 ? 64 : 32));
#pragma GCC unroll 4
    for (int word = 0; word < 4; ++word) {
      const I both = load_u32(words + word * kLanes);
      const I even = bit_and(both, 0x0f0f0f0fu);
      for (int r = 0; r < R; ++r) sum[r] = nibble_dot(sum[r], even, quad_of(x[r * x_stride], word));
      const I odd = bit_and(shift_right<4>(both), 0x0f0f0f0fu);
      for (int r = 0; r < R; ++r) sum[r] = nibble_dot(sum[r], odd, quad_of(x[r * x_stride], word + 4));
    }
    for (int r = 0; r < R; ++r) sum[r] = nibble_total(sum[r]);
    if constexpr (T == WeightType::q4_0)  // q - 8
      for (int r = 0; r < R; ++r) sum[r] = add_i32(sum[r], -8 * x[r * x_stride].total);
  }
  const F scale = from_f16(half);
  for (int r = 0; r < R; ++r) acc[r] = fma(to_float(sum[r]), mul(scale, set1(x[r * x_stride].scale)), acc[r]);
  if constexpr (T == WeightType::q4_1) {
    const F min = from_f16(half + 16);
    for (int r = 0; r < R; ++r) acc[r] = fma(min, set1(x[r * x_stride].sum), acc[r]);
  }
}

template <WeightType T, int R>
void int8_tile(const LinearSpan& s, int panel, int row) {
  const std::byte* record = s.panels + panel * s.panel_bytes;
  const QuantBlock* x = s.x_int8 + row * s.x_stride;
  F acc[R];
  for (int r = 0; r < R; ++r) acc[r] = zero();
  for (int block = 0; block < s.num_inputs / 32; ++block, ++x, record += record_bytes(T)) {
    // A tile this low waits for memory: fetch the same place of the next panel.
    if constexpr (R < kInt8Rows)
      for (size_t line = 0; line < record_bytes(T); line += 64) __builtin_prefetch(record + s.panel_bytes + line);
    int8_block<T, R>(record, x, s.x_stride, acc);
  }
  alignas(64) float sums[R * kLanes];
  for (int r = 0; r < R; ++r) store(sums + r * kLanes, acc[r]);
  finish_panel(s, panel, R, sums, row);
}

template <WeightType T, int R = kInt8Rows>
HR_INLINE void int8_tile_of(const LinearSpan& s, int panel, int row, int height) {
  if constexpr (R > 0) {
    if (height == R) return int8_tile<T, R>(s, panel, row);
    int8_tile_of<T, R - 1>(s, panel, row, height);
  }
}

template <WeightType T>
void int8_panels(const LinearSpan& s) {
  const int num_tiles = (s.rows + kInt8Rows - 1) / kInt8Rows;
  for (int panel = 0; panel < s.num_panels; ++panel)
    for (int t = 0, row = 0; t < num_tiles; ++t) {
      const int height = (s.rows - row) / (num_tiles - t);
      int8_tile_of<T>(s, panel, row, height);
      row += height;
    }
}

void linear_int8(const LinearSpan& s) {
  switch (s.type) {
    case WeightType::q4_0: return int8_panels<WeightType::q4_0>(s);
    case WeightType::q4_1: return int8_panels<WeightType::q4_1>(s);
    case WeightType::q8_0: return int8_panels<WeightType::q8_0>(s);
    default: return linear(s);
  }
}

// Symmetric, to nearest even, one scale for each block. What is no number makes its whole block NaN.
void to_int8(const float* x, int n, QuantBlock* out) {
  constexpr float kRound = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer, which stays in the low bits
  for (int k = 0; k < n; k += 32, x += 32, ++out) {
    const F a = load(x);
    const F b = load(x + kLanes);
    const F magnitude = max(max(a, sub(zero(), a)), max(b, sub(zero(), b)));
    const float greatest = max_lanes(magnitude);
    const bool is_finite = sum_lanes(add(mul(a, zero()), mul(b, zero()))) == 0.0f;
    const bool is_zero = greatest < 1e-30f;  // 127 / greatest would overflow
    const F factor = set1(is_zero || !is_finite ? 0.0f : 127.0f / greatest);
    alignas(64) uint32_t q[32];
    const auto round = [&](F v, uint32_t* to) {
      const I bits = as_int(fma(is_finite ? v : zero(), factor, set1(kRound)));
      __builtin_memcpy(to, &bits, sizeof bits);
    };
    round(a, q);
    round(b, q + kLanes);
    int32_t total = 0;
    uint32_t quads[8];
    for (int quad = 0; quad < 8; ++quad) {
      quads[quad] = 0;
      for (int i = 0; i < 4; ++i) quads[quad] |= (q[quad_input(quad, i)] & 0xff) << (8 * i);
    }
    for (int i = 0; i < 32; ++i) total += static_cast<int8_t>(q[i]);
    __builtin_memcpy(out->q, quads, sizeof quads);
    out->scale = !is_finite ? __builtin_nanf("") : is_zero ? 0.0f : greatest / 127.0f;
    out->sum = out->scale * static_cast<float>(total);
    out->total = total;
    out->unused = 0;
  }
}

}  // namespace
}  // namespace headrace::HEADRACE_ISA
