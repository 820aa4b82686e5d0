// What kernels over rows are made of. Included once for each instruction set, after its simd header.

namespace headrace::HEADRACE_ISA {
namespace {

HR_INLINE int least(int a, int b) { return a < b ? a : b; }

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
  return mul(y, as_float(add_i32(shift_left<23>(as_int(shifted)), 0x3f800000)));
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

}  // namespace
}  // namespace headrace::HEADRACE_ISA
