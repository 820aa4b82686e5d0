// Linear layers. Included once for each instruction set, after its simd header.

namespace headrace::HEADRACE_ISA {
namespace {

HR_INLINE int least(int a, int b) { return a < b ? a : b; }

// ---- Decoders: the weights of 16 outputs at inputs 0, 1, 2, ... of one record, in order ----

struct DecodeF32 {
  static constexpr WeightType kType = WeightType::f32;
  const float* data;
  HR_INLINE DecodeF32 open(const std::byte* record) { return {reinterpret_cast<const float*>(record)}; }
  template <int K>
  __attribute__((always_inline)) F weight() {
    return load(data + K * kLanes);
  }
};

struct DecodeF16 {
  static constexpr WeightType kType = WeightType::f16;
  const uint16_t* data;
  HR_INLINE DecodeF16 open(const std::byte* record) { return {reinterpret_cast<const uint16_t*>(record)}; }
  template <int K>
  __attribute__((always_inline)) F weight() {
    return from_f16(data + K * kLanes);
  }
};

struct DecodeBF16 {
  static constexpr WeightType kType = WeightType::bf16;
  const uint32_t* data;
  HR_INLINE DecodeBF16 open(const std::byte* record) { return {reinterpret_cast<const uint32_t*>(record)}; }
  template <int K>
  __attribute__((always_inline)) F weight() {
    const I pair = load_u32(data + K / 2 * kLanes);
    return as_float(K % 2 == 0 ? shift_left<16>(pair) : bit_and(pair, 0xffff0000u));
  }
};

struct DecodeQ8 {
  static constexpr WeightType kType = WeightType::q8_0;
  F scale;
  const uint32_t* quads;
  HR_INLINE DecodeQ8 open(const std::byte* record) {
    return {from_f16(reinterpret_cast<const uint16_t*>(record)), reinterpret_cast<const uint32_t*>(record + 32)};
  }
  template <int K>
  __attribute__((always_inline)) F weight() {
    constexpr int quad = K % 8;
    constexpr int byte = K / 8;
    static_assert(quad_input(quad, byte) == K);
    return mul(to_float(shift_right_signed<24>(shift_left<24 - 8 * byte>(load_u32(quads + quad * kLanes)))), scale);
  }
};

// A nibble is masked where it lies, so it reads q * 16^j; the scale is divided by 16 from nibble to nibble to match.
// Powers of two change no rounding: the weight is exactly fma(q, scale, min). The top nibble is shifted down instead,
// because its mask would touch the sign.
struct DecodeQ4 {
  F scale0, scale, min;
  const uint32_t* words;
  template <int K>
  __attribute__((always_inline)) F weight() {
    constexpr int j = K / 4;
    if constexpr (j > 0 && K % 4 == 0) scale = j == 7 ? scale0 : mul(scale, set1(0.0625f));
    const I word = load_u32(words + K % 4 * kLanes);
    const F q = to_float(j == 7 ? shift_right<28>(word) : bit_and(word, 0xfu << (4 * j)));
    return fma(q, scale, min);
  }
};

struct DecodeQ4_1 : DecodeQ4 {
  static constexpr WeightType kType = WeightType::q4_1;
  HR_INLINE DecodeQ4_1 open(const std::byte* record) {
    const auto* half = reinterpret_cast<const uint16_t*>(record);
    const F scale = from_f16(half);
    return {{scale, scale, from_f16(half + 16), reinterpret_cast<const uint32_t*>(record + 64)}};
  }
};

struct DecodeQ4_0 : DecodeQ4 {  // (q - 8) * d = fma(q, d, -8 * d), both exact up to the one rounding
  static constexpr WeightType kType = WeightType::q4_0;
  HR_INLINE DecodeQ4_0 open(const std::byte* record) {
    const F scale = from_f16(reinterpret_cast<const uint16_t*>(record));
    return {{scale, scale, mul(scale, set1(-8.0f)), reinterpret_cast<const uint32_t*>(record + 32)}};
  }
};

template <class Use>
HR_INLINE void with_decoder(WeightType type, Use use) {
  switch (type) {
    case WeightType::f32: return use(DecodeF32{});
    case WeightType::f16: return use(DecodeF16{});
    case WeightType::bf16: return use(DecodeBF16{});
    case WeightType::q4_0: return use(DecodeQ4_0{});
    case WeightType::q4_1: return use(DecodeQ4_1{});
    case WeightType::q8_0: return use(DecodeQ8{});
  }
}

// Calls step<0>, step<1>, ... step<N - 1>.
template <int N, int K = 0, class Step>
HR_INLINE void unrolled(Step& step) {
  if constexpr (K < N) {
    step.template at<K>();
    unrolled<N, K + 1>(step);
  }
}

template <class D>
struct DecodeStep {
  D decoder;
  float* out;
  template <int K>
  __attribute__((always_inline)) void at() {
    store(out + K * kLanes, decoder.template weight<K>());
  }
};

// Weights of some records as floats [inputs][16].
template <class D>
void decode(const std::byte* records, int num_records, float* out) {
  constexpr int depth = record_inputs(D::kType);
  for (int i = 0; i < num_records; ++i) {
    DecodeStep<D> step{D::open(records + i * record_bytes(D::kType)), out + i * depth * kLanes};
    unrolled<depth>(step);
  }
}

// ---- The register tile: c[r][16] (+)= a[r][k] * b(k)[16], k in order ----

template <int R, class B>
HR_INLINE void tile(B b, const float* a, size_t a_stride, float* c, size_t c_stride, int depth, bool accumulate) {
  F acc[R];
  for (int r = 0; r < R; ++r) acc[r] = accumulate ? load(c + r * c_stride) : zero();
#pragma GCC unroll 4
  for (int k = 0; k < depth; ++k) {
    const F w = b(k);
    for (int r = 0; r < R; ++r) acc[r] = fma(w, set1(a[r * a_stride + k]), acc[r]);
  }
  for (int r = 0; r < R; ++r) store(c + r * c_stride, acc[r]);
}

template <int R = kTileRows, class B>
void tile_rows(int rows, B b, const float* a, size_t a_stride, float* c, size_t c_stride, int depth, bool accumulate) {
  if constexpr (R > 0) {
    if (rows == R) return tile<R>(b, a, a_stride, c, c_stride, depth, accumulate);
    tile_rows<R - 1>(rows, b, a, a_stride, c, c_stride, depth, accumulate);
  }
}

// All rows, in tiles of nearly equal height: a tile of one or two rows would wait for its own sums.
template <class B>
HR_INLINE void matmul(int rows, B b, const float* a, size_t a_stride, float* c, size_t c_stride, int depth,
                      bool accumulate) {
  const int num_tiles = (rows + kTileRows - 1) / kTileRows;
  for (int t = 0, row = 0; t < num_tiles; ++t) {
    const int height = (rows - row) / (num_tiles - t);
    tile_rows(height, b, a + row * a_stride, a_stride, c + row * c_stride, c_stride, depth, accumulate);
    row += height;
  }
}

struct Floats {
  const float* data;
  size_t stride;
  __attribute__((always_inline)) F operator()(int k) const { return load(data + k * stride); }
};

// ---- Few rows: weights are decoded in registers and used at once ----

// R rows times P panels. A sum can take one product in four cycles, so a lone row works on two panels at a time, four
// inputs of one and then of the other, which keeps their scales in registers.
template <class D, int R, int P>
struct DirectStep {
  D decoder[P];
  const float* x;
  size_t x_stride;
  F acc[P][R];

  template <int K>
  __attribute__((always_inline)) void input(int p) {
    const F w = decoder[p].template weight<K>();
    for (int r = 0; r < R; ++r) acc[p][r] = fma(w, set1(x[r * x_stride + K]), acc[p][r]);
  }
  template <int J>
  __attribute__((always_inline)) void at() {
    for (int p = 0; p < P; ++p) {
      input<4 * J>(p);
      input<4 * J + 1>(p);
      input<4 * J + 2>(p);
      input<4 * J + 3>(p);
    }
  }
};

// sums[p][r][16]
template <class D, int R, int P>
void direct(const LinearSpan& s, const std::byte* panels, float* sums) {
  constexpr int depth = record_inputs(D::kType);
  const int full = s.num_inputs / depth;
  DirectStep<D, R, P> step;
  step.x = s.x;
  step.x_stride = s.x_stride;
  for (int p = 0; p < P; ++p)
    for (int r = 0; r < R; ++r) step.acc[p][r] = zero();
  for (int i = 0; i < full; ++i, panels += record_bytes(D::kType), step.x += depth) {
    for (int p = 0; p < P; ++p) {
      const std::byte* record = panels + p * s.panel_bytes;
      step.decoder[p] = D::open(record);
      // The same place of the panels that come next: the hardware sees each panel's end as the end of a stream.
      for (size_t line = 0; line < record_bytes(D::kType); line += 64)
        __builtin_prefetch(record + P * s.panel_bytes + line);
    }
    unrolled<depth / 4>(step);
  }
  const int rest = s.num_inputs - full * depth;
  for (int p = 0; p < P; ++p) {
    alignas(64) float tail[depth * kLanes];
    if (rest > 0) decode<D>(panels + p * s.panel_bytes, 1, tail);
    for (int r = 0; r < R; ++r) {
      for (int k = 0; k < rest; ++k)
        step.acc[p][r] = fma(load(tail + k * kLanes), set1(step.x[r * s.x_stride + k]), step.acc[p][r]);
      store(sums + (p * R + r) * kLanes, step.acc[p][r]);
    }
  }
}

// ---- Many rows: a stretch of a panel is decoded into the first-level cache and used by all rows ----

inline constexpr int kStretch = 256;  // inputs decoded at a time: 16 KiB of the first-level cache
inline constexpr int kGroupRows = 96;  // rows that share a decoded stretch

// Add the bias and write the outputs that exist.
HR_INLINE void finish_panel(const LinearSpan& s, int panel, int rows, const float* sums, int first_row) {
  const int first = panel * kLanes;
  const int lanes = least(s.num_outputs - first, kLanes);
  for (int r = 0; r < rows; ++r, sums += kLanes) {
    float* out = s.out + (first_row + r) * s.out_stride + first;
    if (lanes == kLanes) {
      store(out, s.bias ? add(load(sums), load(s.bias + first)) : load(sums));
    } else {
      for (int i = 0; i < lanes; ++i) out[i] = s.bias ? sums[i] + s.bias[first + i] : sums[i];
    }
  }
}

template <class D, int R>
void direct_rows(const LinearSpan& s) {
  constexpr int P = R == 1 ? 2 : 1;
  alignas(64) float sums[P * R * kLanes];
  int panel = 0;
  for (; panel + P <= s.num_panels; panel += P) {
    direct<D, R, P>(s, s.panels + panel * s.panel_bytes, sums);
    for (int p = 0; p < P; ++p) finish_panel(s, panel + p, R, sums + p * R * kLanes, 0);
  }
  for (; panel < s.num_panels; ++panel) {
    direct<D, R, 1>(s, s.panels + panel * s.panel_bytes, sums);
    finish_panel(s, panel, R, sums, 0);
  }
}

template <class D, int R>
void direct_any(const LinearSpan& s) {
  if constexpr (R > 0) {
    if (s.rows == R) return direct_rows<D, R>(s);
    direct_any<D, R - 1>(s);
  }
}

template <class D>
void decoded(const LinearSpan& s) {
  constexpr int depth = record_inputs(D::kType);
  alignas(64) float stretch[kStretch * kLanes];
  alignas(64) float sums[kGroupRows * kLanes];
  for (int row = 0; row < s.rows; row += kGroupRows)
    for (int panel = 0; panel < s.num_panels; ++panel) {
      const int rows = least(s.rows - row, kGroupRows);
      const std::byte* records = s.panels + panel * s.panel_bytes;
      for (int k = 0; k < s.num_inputs; k += kStretch) {
        const int inputs = least(s.num_inputs - k, kStretch);
        decode<D>(records + k / depth * record_bytes(D::kType), (inputs + depth - 1) / depth, stretch);
        matmul(rows, Floats{stretch, kLanes}, s.x + row * s.x_stride + k, s.x_stride, sums, kLanes, inputs, k > 0);
      }
      finish_panel(s, panel, rows, sums, row);
    }
}

void linear(const LinearSpan& s) {
  with_decoder(s.type, [&](auto d) {
    using D = decltype(d);
    if (s.rows <= kDirectRows) return direct_any<D, kDirectRows>(s);
    decoded<D>(s);
  });
}

void weight_row(WeightType type, const std::byte* panel, int lane, int num_inputs, float* out) {
  with_decoder(type, [&](auto d) {
    using D = decltype(d);
    constexpr int depth = record_inputs(D::kType);
    alignas(64) float record[depth * kLanes];
    for (int k = 0; k < num_inputs; k += depth, panel += record_bytes(D::kType)) {
      decode<D>(panel, 1, record);
      for (int i = 0; i < least(depth, num_inputs - k); ++i) out[k + i] = record[i * kLanes + lane];
    }
  });
}

}  // namespace
}  // namespace headrace::HEADRACE_ISA
