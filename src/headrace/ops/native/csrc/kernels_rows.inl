// Operations on single rows. Included once for each instruction set, after its simd header.

namespace headrace::HEADRACE_ISA {
namespace {

// e^x to about 1e-7, after Cephes expf: x = n ln 2 + r, a polynomial in r, times 2^n. exp(0) is exactly 1; arguments
// are clamped to where 2^n is a normal number; NaN stays NaN.
HR_INLINE F exp(F x) {
  constexpr float kRound = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer, which stays in the low bits
  x = min(set1(88.3f), max(set1(-87.3f), x));
  const F shifted = fma(x, set1(1.44269504088896341f), set1(kRound));
  const F n = sub(shifted, set1(kRound));
  F r = fma(n, set1(-0.693359375f), x);
  r = fma(n, set1(2.12194440e-4f), r);
  F y = set1(1.9875691500e-4f);
  y = fma(y, r, set1(1.3981999507e-3f));
  y = fma(y, r, set1(8.3334519073e-3f));
  y = fma(y, r, set1(4.1665795894e-2f));
  y = fma(y, r, set1(1.6666665459e-1f));
  y = fma(y, r, set1(5.0000001201e-1f));
  y = add(fma(y, mul(r, r), r), set1(1.0f));
  const F power = as_float(add_i32(shift_left<23>(as_int(shifted)), 0x3f800000));
  return mul(y, power);
}

HR_INLINE F load_first(const float* p, int n) {
  alignas(64) float lanes[kLanes] = {};
  for (int i = 0; i < n; ++i) lanes[i] = p[i];
  return load(lanes);
}
HR_INLINE void store_first(float* p, int n, F x) {
  alignas(64) float lanes[kLanes];
  store(lanes, x);
  for (int i = 0; i < n; ++i) p[i] = lanes[i];
}
// out[i] = f(inputs at i) for i < n, sixteen at a time; `f` gets a loader that is safe at the end of the row.
template <class Compute>
HR_INLINE void map_row(int n, float* out, Compute compute) {
  int i = 0;
  for (; i + kLanes <= n; i += kLanes) store(out + i, compute([i](const float* p) { return load(p + i); }));
  if (i < n) store_first(out + i, n - i, compute([i, n](const float* p) { return load_first(p + i, n - i); }));
}

void add_row(const float* x, const float* y, int n, float* out) {
  map_row(n, out, [=](auto get) { return add(get(x), get(y)); });
}

void rms_norm(const float* x, const float* y, float* sum, const float* weight, float eps, int n, float* out) {
  if (y) {
    add_row(x, y, n, sum);
    x = sum;
  }
  F squares = zero();
  int i = 0;
  for (; i + kLanes <= n; i += kLanes) {
    const F v = load(x + i);
    squares = fma(v, v, squares);
  }
  if (i < n) {
    const F v = load_first(x + i, n - i);
    squares = fma(v, v, squares);
  }
  const float mean = sum_lanes(squares) / static_cast<float>(n);
  const F scale = set1(1.0f / __builtin_sqrtf(mean + eps));
  map_row(n, out, [=](auto get) { return mul(mul(get(x), scale), get(weight)); });
}

void silu_mul(const float* gate_up, int n, float* out) {
  const float* up = gate_up + n;
  map_row(n, out, [=](auto get) {
    const F gate = get(gate_up);
    const F sigmoid_inverse = add(set1(1.0f), exp(sub(zero(), gate)));
    return mul(div(gate, sigmoid_inverse), get(up));
  });
}

// Round to nearest even; NaN stays NaN.
HR_INLINE uint16_t bf16_of(float x) {
  uint32_t bits;
  __builtin_memcpy(&bits, &x, sizeof bits);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return static_cast<uint16_t>((bits >> 16) | 0x40u);
  return static_cast<uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

void to_bf16(const float* x, int n, uint16_t* out) {
  for (int i = 0; i < n; ++i) out[i] = bf16_of(x[i]);
  if (n % 2 != 0) out[n] = 0;
}

HR_INLINE void rotate(const float* x, const float* cos, const float* sin, int head_dim, bool interleaved, float* out) {
  const int pairs = head_dim / 2;
  const int step = interleaved ? 2 : 1;
  const int apart = interleaved ? 1 : pairs;
  for (int i = 0; i < pairs; ++i) {
    const float a = x[i * step];
    const float b = x[i * step + apart];
    out[i * step] = a * cos[i] - b * sin[i];
    out[i * step + apart] = b * cos[i] + a * sin[i];
  }
}

void rope_row(const RopeRow& s) {
  const int d = s.head_dim;
  for (int h = 0; h < s.num_heads; ++h)
    rotate(s.qkv + h * d, s.cos, s.sin, d, s.interleaved, s.q_out + h * d);
  const float* k = s.qkv + s.num_heads * d;
  const float* v = k + s.num_kv_heads * d;
  alignas(64) float rotated[kMaxHeadDim];
  for (int h = 0; h < s.num_kv_heads; ++h) {
    auto* keys = reinterpret_cast<uint16_t*>(s.block) + static_cast<size_t>(h) * 2 * d * kBlockTokens;
    uint16_t* values = keys + d * kBlockTokens;
    rotate(k + h * d, s.cos, s.sin, d, s.interleaved, rotated);
    for (int i = 0; i < d; ++i) keys[i * kBlockTokens + s.slot] = bf16_of(rotated[i]);
    for (int i = 0; i < d; ++i) values[s.slot * d + i] = bf16_of(v[h * d + i]);
  }
}

float max_row(const float* x, int n) {
  F top = set1(-__builtin_inff());
  F bad = zero();  // x * 0 is NaN for NaN and infinities; minus infinity is let through as the least float
  const auto take = [&](F v) {
    top = max(top, v);
    bad = add(bad, mul(max(set1(-3.402823466e38f), v), zero()));
  };
  int i = 0;
  for (; i + kLanes <= n; i += kLanes) take(load(x + i));
  for (; i < n; ++i) take(set1(x[i]));
  const float check = sum_lanes(bad);
  return check == 0.0f ? max_lanes(top) : check;
}

// A plain loop that compilers vectorise. Products and sums are rounded apart, so every instruction set gives the same
// bits: x = n ln 2 + r, the Taylor series of e^r to r^13 (below 2^-57 of it for |r| <= ln 2 / 2), times 2^n.
void exp_row(const double* __restrict x, double shift, int n, double* __restrict out) {
  constexpr double kRound = 6755399441055744.0;  // 1.5 * 2^52, see exp above
  for (int i = 0; i < n; ++i) {
    const double difference = x[i] - shift;
    const double y = difference > -700.0 ? difference : -700.0;
    const double shifted = y * 1.4426950408889634 + kRound;
    const double whole = shifted - kRound;
    const double r = (y - whole * 6.93147180369123816490e-01) - whole * 1.90821492927058770002e-10;
    double sum = 1.0 / 6227020800.0;
    sum = sum * r + 1.0 / 479001600.0;
    sum = sum * r + 1.0 / 39916800.0;
    sum = sum * r + 1.0 / 3628800.0;
    sum = sum * r + 1.0 / 362880.0;
    sum = sum * r + 1.0 / 40320.0;
    sum = sum * r + 1.0 / 5040.0;
    sum = sum * r + 1.0 / 720.0;
    sum = sum * r + 1.0 / 120.0;
    sum = sum * r + 1.0 / 24.0;
    sum = sum * r + 1.0 / 6.0;
    sum = sum * r + 0.5;
    sum = sum * r + 1.0;
    sum = sum * r + 1.0;
    const uint64_t bits = (__builtin_bit_cast(uint64_t, shifted) << 52) + (uint64_t{1023} << 52);
    const double power = __builtin_bit_cast(double, bits);
    out[i] = difference > -700.0 ? sum * power : 0.0;
  }
}

}  // namespace
}  // namespace headrace::HEADRACE_ISA
