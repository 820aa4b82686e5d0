// Linear layers. Included once for each instruction set, after kernels_blocks.inl.

namespace headrace::HEADRACE_ISA {
namespace {

// ---- Decoders: the weights of 16 outputs at inputs 0, 1, 2, ... of one step, in order ----

struct DecodeF32 {
  static constexpr WeightType kType = WeightType::f32;
  const float* data;
  HR_INLINE DecodeF32 open(const std::byte* panel, int step) {
    return {reinterpret_cast<const float*>(panel + step * record_bytes(kType))};
  }
  template <int K>
  __attribute__((always_inline)) F weight() {
    return load(data + K * kLanes);
  }
};

struct DecodeF16 {
  static constexpr WeightType kType = WeightType::f16;
  const uint16_t* data;
  HR_INLINE DecodeF16 open(const std::byte* panel, int step) {
    return {reinterpret_cast<const uint16_t*>(panel + step * record_bytes(kType))};
  }
  template <int K>
  __attribute__((always_inline)) F weight() {
    return from_f16(data + K * kLanes);
  }
};

struct DecodeBF16 {
  static constexpr WeightType kType = WeightType::bf16;
  const uint32_t* data;
  HR_INLINE DecodeBF16 open(const std::byte* panel, int step) {
    return {reinterpret_cast<const uint32_t*>(panel + step * record_bytes(kType))};
  }
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
  HR_INLINE DecodeQ8 open(const std::byte* panel, int step) {
    return {scale_of<kType>(panel, step), words_of<kType>(panel, step)};
  }
  template <int K>
  __attribute__((always_inline)) F weight() {
    constexpr int quad = K % 8;
    constexpr int byte = K / 8;
    static_assert(quad_input(quad, byte) == K);
    return mul(to_float(shift_right_signed<24>(shift_left<24 - 8 * byte>(load_u32(quads + quad * kLanes)))), scale);
  }
};

// A nibble is masked where it lies, and the bits above it are moved there, so it reads q * 16^j; the scale is divided
// by 16 from nibble to nibble to match. Powers of two change no rounding: the weight is exactly fma(q, scale, min). The
// top nibble is shifted down instead, because its mask would touch the sign.
template <WeightType T>
struct DecodeQuads {
  static constexpr WeightType kType = T;
  static constexpr int kBits = weight_bits(T);
  Affine block;
  F scale;
  F second;  // q6_k: the scale of inputs 16 to 31
  const uint32_t* words;

  HR_INLINE DecodeQuads open(const std::byte* panel, int step) {
    const uint32_t* words = words_of<T>(panel, step);
    if constexpr (T == WeightType::q6_k) {
      const F scale = scale_of<T>(panel, step);
      const I factors = block_factors<T>(panel, step);
      const F first = mul(scale, first_of(factors));
      return {{first, mul(first, set1(-32.0f))}, first, mul(scale, second_of(factors)), words};
    } else {
      const Affine block = affine<T>(panel, step);
      return {block, block.scale, zero(), words};
    }
  }
  template <int K>
  __attribute__((always_inline)) I stored() {
    constexpr int j = K / 4;
    const I word = load_u32(words + K % 4 * kLanes);
    const I low = j == 7 ? shift_right<28>(word) : bit_and(word, 0xfu << (4 * j));
    if constexpr (kBits == 4) {
      return low;
    } else {
      constexpr int from = kBits == 5 ? K : 8 * (j / 2) + 2 * (K % 4);
      constexpr int to = j == 7 ? 4 : 4 * j + 4;
      const I high = load_u32(words + (kBits == 5 ? 4 : 4 + j % 2) * kLanes);
      return bit_or(low, bit_and(shifted<to - from>(high), ((1u << (kBits - 4)) - 1) << to));
    }
  }
  template <int K>
  __attribute__((always_inline)) F weight() {
    constexpr int j = K / 4;
    if constexpr (T == WeightType::q6_k && K == 16) {
      block = {second, mul(second, set1(-32.0f))};
      scale = mul(second, set1(0x1p-16f));
    } else if constexpr (j > 0 && K % 4 == 0) {
      scale = j == 7 ? block.scale : mul(scale, set1(0.0625f));
    }
    return fma(to_float(stored<K>()), scale, block.min);
  }
};

template <class Use>
HR_INLINE void with_decoder(WeightType type, Use use) {
  switch (type) {
    case WeightType::f32: return use(DecodeF32{});
    case WeightType::f16: return use(DecodeF16{});
    case WeightType::bf16: return use(DecodeBF16{});
    case WeightType::q4_0: return use(DecodeQuads<WeightType::q4_0>{});
    case WeightType::q4_1: return use(DecodeQuads<WeightType::q4_1>{});
    case WeightType::q5_0: return use(DecodeQuads<WeightType::q5_0>{});
    case WeightType::q5_1: return use(DecodeQuads<WeightType::q5_1>{});
    case WeightType::q8_0: return use(DecodeQ8{});
    case WeightType::q4_g32: return use(DecodeQuads<WeightType::q4_g32>{});
    case WeightType::q4_g128: return use(DecodeQuads<WeightType::q4_g128>{});
    case WeightType::q4_k: return use(DecodeQuads<WeightType::q4_k>{});
    case WeightType::q5_k: return use(DecodeQuads<WeightType::q5_k>{});
    case WeightType::q6_k: return use(DecodeQuads<WeightType::q6_k>{});
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

// Weights of some steps of a panel as floats [inputs][16].
template <class D>
void decode(const std::byte* panel, int first_step, int num_steps, float* out) {
  constexpr int depth = step_inputs(D::kType);
  for (int i = 0; i < num_steps; ++i) {
    DecodeStep<D> step{D::open(panel, first_step + i), out + i * depth * kLanes};
    unrolled<depth>(step);
  }
}

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
void direct(const LinearSpan& s, int first_panel, float* sums) {
  const std::byte* panels = s.panels + first_panel * s.panel_bytes;
  const Ahead ahead = Ahead::of(s, first_panel, P);
  constexpr int depth = step_inputs(D::kType);
  const int full = s.num_inputs / depth;
  DirectStep<D, R, P> step;
  step.x = s.x;
  step.x_stride = s.x_stride;
  for (int p = 0; p < P; ++p)
    for (int r = 0; r < R; ++r) step.acc[p][r] = zero();
  for (int i = 0; i < full; ++i, step.x += depth) {
    for (int p = 0; p < P; ++p) {
      step.decoder[p] = D::open(panels + p * s.panel_bytes, i);
      ahead.fetch(p, i * step_bytes(D::kType), step_bytes(D::kType));
    }
    unrolled<depth / 4>(step);
  }
  const int rest = s.num_inputs - full * depth;
  for (int p = 0; p < P; ++p) {
    alignas(64) float tail[depth * kLanes];
    if (rest > 0) decode<D>(panels + p * s.panel_bytes, full, 1, tail);
    for (int r = 0; r < R; ++r) {
      for (int k = 0; k < rest; ++k)
        step.acc[p][r] = fma(load(tail + k * kLanes), set1(step.x[r * s.x_stride + k]), step.acc[p][r]);
      store(sums + (p * R + r) * kLanes, step.acc[p][r]);
    }
  }
}

// ---- Many rows: a stretch of a panel is decoded into the first-level cache and used by all rows ----

inline constexpr int kStretch = 256;  // most inputs decoded at a time: 16 KiB of the first-level cache
inline constexpr int kGroupRows = 192;  // rows that share a decoded stretch

template <class D, int R>
void direct_rows(const LinearSpan& s) {
  constexpr int P = R == 1 ? 2 : 1;
  alignas(64) float sums[P * R * kLanes];
  int panel = 0;
  for (; panel + P <= s.num_panels; panel += P) {
    direct<D, R, P>(s, panel, sums);
    for (int p = 0; p < P; ++p) finish_panel(s, panel + p, R, sums + p * R * kLanes, 0);
  }
  for (; panel < s.num_panels; ++panel) {
    direct<D, R, 1>(s, panel, sums);
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

// Rows from `row` on times one panel.
template <class D>
void decoded_panel(const LinearSpan& s, int panel, int row, int rows, float* stretch, float* sums) {
  constexpr int depth = step_inputs(D::kType);
  const int column = panel * kLanes;
  const bool is_full = s.num_outputs - column >= kLanes;
  const int stretches = (s.num_inputs + kStretch - 1) / kStretch;
  for (int i = 0, k = 0; i < stretches; ++i) {  // of nearly equal length, in whole steps
    const int even = (s.num_inputs - k + stretches - i - 1) / (stretches - i);
    const int inputs = least(s.num_inputs - k, (even + depth - 1) / depth * depth);
    const int first_step = k / depth, steps = (inputs + depth - 1) / depth;
    decode<D>(s.panels + panel * s.panel_bytes, first_step, steps, stretch);
    // While all rows use it, the weights after it come.
    const bool is_last = panel + 1 == s.num_panels && k + inputs == s.num_inputs;
    const std::byte* after = s.panels + panel * s.panel_bytes + (first_step + steps) * step_bytes(D::kType);
    Ahead{is_last ? s.next : after, 0}.fetch(0, 0, steps * step_bytes(D::kType));
    Sums of{k > 0 ? sums : nullptr, kLanes, sums, kLanes, nullptr};
    if (is_full && k + inputs == s.num_inputs) {  // what the last stretch gives are the outputs
      of.to = s.out + row * s.out_stride + column;
      of.to_stride = s.out_stride;
      of.bias = s.bias ? s.bias + column : nullptr;
    }
    matmul(rows, Floats{stretch, kLanes}, s.x + row * s.x_stride + k, s.x_stride, of, inputs);
    k += inputs;
  }
  if (!is_full) finish_panel(s, panel, rows, sums, row);
}

template <class D>
void decoded(const LinearSpan& s) {
  alignas(64) float stretch[kStretch * kLanes];
  alignas(64) float sums[kGroupRows * kLanes];
  for (int row = 0; row < s.rows; row += kGroupRows)
    for (int panel = 0; panel < s.num_panels; ++panel)
      decoded_panel<D>(s, panel, row, least(s.rows - row, kGroupRows), stretch, sums);
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
    constexpr int depth = step_inputs(D::kType);
    alignas(64) float weights[depth * kLanes];
    for (int k = 0; k < num_inputs; k += depth) {
      decode<D>(panel, k / depth, 1, weights);
      for (int i = 0; i < least(depth, num_inputs - k); ++i) out[k + i] = weights[i * kLanes + lane];
    }
  });
}

}  // namespace
}  // namespace headrace::HEADRACE_ISA
