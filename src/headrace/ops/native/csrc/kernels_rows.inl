// Operations on single rows. Included once for each instruction set, after its simd header.

namespace headrace::HEADRACE_ISA {
namespace {

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

HR_INLINE void rotate(const float* x, const float* cos, const float* sin, int head_dim, bool interleaved, float* out) {
  const int pairs = head_dim / 2;
  if (!interleaved) {
    const float* y = x + pairs;
    map_row(pairs, out, [=](auto get) { return sub(mul(get(x), get(cos)), mul(get(y), get(sin))); });
    map_row(pairs, out + pairs, [=](auto get) { return add(mul(get(y), get(cos)), mul(get(x), get(sin))); });
    return;
  }
  for (int i = 0; i < pairs; ++i) {
    const float a = x[2 * i];
    const float b = x[2 * i + 1];
    out[2 * i] = a * cos[i] - b * sin[i];
    out[2 * i + 1] = b * cos[i] + a * sin[i];
  }
}

HR_INLINE uint32_t magnitude_of(float x) { return __builtin_bit_cast(uint32_t, x) & 0x7fffffffu; }

// E4M3. Infinities become NaN, as they would not be seen in 448.
HR_INLINE uint8_t fp8_of(float x) {
  constexpr uint32_t kLeastNormal = 0x3c800000;  // 2^-6
  constexpr uint32_t kGreatest = 0x7e;           // 448
  const uint32_t sign = __builtin_bit_cast(uint32_t, x) >> 24 & 0x80u;
  const uint32_t bits = magnitude_of(x);
  if (bits >= 0x7f800000u) return static_cast<uint8_t>(sign | 0x7fu);
  if (bits < kLeastNormal) {  // adding 2^14 rounds to a multiple of 2^-9, which stays in the low bits
    const float sum = __builtin_bit_cast(float, bits) + 16384.0f;
    return static_cast<uint8_t>(sign | (__builtin_bit_cast(uint32_t, sum) & 0xffu));
  }
  const uint32_t rounded = ((bits + 0x7ffffu + (bits >> 20 & 1u)) >> 20) - (120u << 3);
  return static_cast<uint8_t>(sign | (rounded < kGreatest ? rounded : kGreatest));
}

// Rounds x to scale * q and writes q, `stride` apart. Returns the scale, NaN where one of x is no finite number.
HR_INLINE float round_int8(const float* x, int n, int8_t* out, size_t stride) {
  constexpr double kRound = 6755399441055744.0;  // 1.5 * 2^52: adding it rounds to an integer, in the low bits
  uint32_t bits = 0;
  for (int i = 0; i < n; ++i) bits = magnitude_of(x[i]) > bits ? magnitude_of(x[i]) : bits;
  const bool is_finite = bits < 0x7f800000u;
  const Int8Range range = int8_range(__builtin_bit_cast(float, bits), is_finite);
  const auto factor = static_cast<double>(range.factor);
  for (int i = 0; i < n; ++i) {
    const double sum = static_cast<double>(is_finite ? x[i] : 0.0f) * factor + kRound;
    out[static_cast<size_t>(i) * stride] = static_cast<int8_t>(__builtin_bit_cast(uint64_t, sum));
  }
  return range.scale;
}

// Writes token `slot` of a KV head's keys, and of its values.
void append(KvType type, const float* key, const float* value, int head_dim, int slot, std::byte* keys) {
  std::byte* values = keys + kv_part_bytes(type, head_dim);
  const int row = slot * head_dim;
  const auto plain = [&](auto of, auto* to_keys, auto* to_values) {
    decltype(of(*key)) rounded[kMaxHeadDim];
    for (int i = 0; i < head_dim; ++i) rounded[i] = of(key[i]);
    for (int i = 0; i < head_dim; ++i) to_keys[i * kBlockTokens + slot] = rounded[i];
    for (int i = 0; i < head_dim; ++i) to_values[row + i] = of(value[i]);
  };
  switch (type) {
    case KvType::bf16:
      return plain([](float x) { return bf16_of(x); }, reinterpret_cast<uint16_t*>(keys),
                   reinterpret_cast<uint16_t*>(values));
    case KvType::fp8:
      return plain([](float x) { return fp8_of(x); }, reinterpret_cast<uint8_t*>(keys),
                   reinterpret_cast<uint8_t*>(values));
    case KvType::int8: {
      const auto scales = [&](std::byte* part) { return reinterpret_cast<float*>(part + head_dim * kBlockTokens); };
      scales(keys)[slot] = round_int8(key, head_dim, reinterpret_cast<int8_t*>(keys) + slot, kBlockTokens);
      scales(values)[slot] = round_int8(value, head_dim, reinterpret_cast<int8_t*>(values) + row, 1);
    }
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
    rotate(k + h * d, s.cos, s.sin, d, s.interleaved, rotated);
    append(s.type, rotated, v + h * d, d, s.slot, s.block + static_cast<size_t>(h) * 2 * kv_part_bytes(s.type, d));
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

using Doubles = double __attribute__((vector_size(32)));
using Words = uint64_t __attribute__((vector_size(32)));

// Products and sums are rounded apart, so every instruction set gives the same bits: x = n ln 2 + r, the Taylor series of
// e^r to r^13 (below 2^-57 of it for |r| <= ln 2 / 2), times 2^n. Each term of a series waits for the one before, so
// kSide numbers are taken side by side.
constexpr int kSide = 32;
HR_INLINE void exp_side(const double* x, double shift, double* out) {
  constexpr double kRound = 6755399441055744.0;  // 1.5 * 2^52, see exp above
  static constexpr double kTerms[] = {1.0 / 479001600.0, 1.0 / 39916800.0, 1.0 / 3628800.0, 1.0 / 362880.0, 1.0 / 40320.0,
                                      1.0 / 5040.0,      1.0 / 720.0,      1.0 / 120.0,     1.0 / 24.0,     1.0 / 6.0,
                                      0.5,               1.0,              1.0};
  constexpr int kParts = kSide / 4;
  Doubles difference[kParts], r[kParts], sum[kParts];
  Words power[kParts];
#pragma GCC unroll 16
  for (int i = 0; i < kParts; ++i) {
    Doubles part;
    __builtin_memcpy(&part, x + 4 * i, sizeof part);
    difference[i] = part - shift;
    const Doubles y = difference[i] > -700.0 ? difference[i] : Doubles{} - 700.0;
    const Doubles shifted = y * 1.4426950408889634 + kRound;
    const Doubles whole = shifted - kRound;
    r[i] = (y - whole * 6.93147180369123816490e-01) - whole * 1.90821492927058770002e-10;
    power[i] = (reinterpret_cast<Words>(shifted) << 52) + (uint64_t{1023} << 52);
    sum[i] = Doubles{} + 1.0 / 6227020800.0;
  }
#pragma GCC unroll 1
  for (const double term : kTerms) {
#pragma GCC unroll 16
    for (int i = 0; i < kParts; ++i) sum[i] = sum[i] * r[i] + term;
  }
#pragma GCC unroll 16
  for (int i = 0; i < kParts; ++i) {
    const Doubles y = difference[i] > -700.0 ? sum[i] * reinterpret_cast<Doubles>(power[i]) : Doubles{};
    __builtin_memcpy(out + 4 * i, &y, sizeof y);
  }
}

// Calls use(exponentials, how many) for kSide numbers after kSide.
template <class Use>
HR_INLINE void for_exponentials(const double* x, double shift, int n, Use use) {
  double terms[kSide], rest[kSide];
  int i = 0;
  for (; i + kSide <= n; i += kSide) {
    exp_side(x + i, shift, terms);
    use(terms, kSide);
  }
  if (i == n) return;
  for (int j = 0; j < kSide; ++j) rest[j] = x[least(i + j, n - 1)];
  exp_side(rest, shift, terms);
  use(terms, n - i);
}

void exp_row(const double* x, double shift, int n, double* out) {
  for_exponentials(x, shift, n, [&out](const double* terms, int count) {
    __builtin_memcpy(out, terms, static_cast<size_t>(count) * sizeof(double));
    out += count;
  });
}

// Exponentials are under way while those before add up, each sum waiting for the last.
double sum_exp_row(const double* x, double shift, int n) {
  double sum = 0.0;
  for_exponentials(x, shift, n, [&sum](const double* terms, int count) {
    for (int j = 0; j < count; ++j) sum += terms[j];
  });
  return sum;
}

void divide_row(const float* x, double divisor, int n, double* out) {
  for (int i = 0; i < n; ++i) out[i] = static_cast<double>(x[i]) / divisor;
}

// Most stretches have none, and too many of the others to guess which.
int find_row(const double* x, double floor, double ceiling, int n, int* out) {
  constexpr int kStretch = 32;
  int count = 0;
  for (int i = 0; i < n; i += kStretch) {
    const int end = least(i + kStretch, n);
    uint64_t any = 0;
    for (int j = i; j < end; ++j) any |= static_cast<uint64_t>(x[j] >= floor);
    if (any == 0) continue;
    for (int j = i; j < end; ++j) {
      out[count] = j;
      count += static_cast<int>(x[j] >= floor) & static_cast<int>(x[j] < ceiling);
    }
  }
  return count;
}

}  // namespace
}  // namespace headrace::HEADRACE_ISA
