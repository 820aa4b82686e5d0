// The loops behind machine_limits.h. Included once for each instruction set, after `hide(F&)`, `hide(I&)` and kIntChains.
//
// `hide` is an empty statement that may have changed its operand, as far as the compiler knows: without it, equal chains
// would become one, and products that do not change would be computed once.

namespace headrace::HEADRACE_ISA {
namespace {

void read_bytes(const std::byte* data, size_t bytes) {
  const auto* p = reinterpret_cast<const float*>(data);
  const float* end = p + bytes / sizeof(float);
  F sum[4] = {zero(), zero(), zero(), zero()};
  for (; p != end; p += kReadBytes / sizeof(float))
    for (int i = 0; i < 4; ++i) {
      __builtin_prefetch(p + i * kLanes + 1024);
      sum[i] = add(sum[i], load(p + i * kLanes));
    }
  for (F& s : sum) hide(s);
}

void f32_products(int64_t steps) {
  F a = set1(0.5f), b = set1(0.25f), sum[kTileRows];
  hide(a);
  hide(b);
  for (F& s : sum) {
    s = zero();
    hide(s);
  }
  for (int64_t step = 0; step < steps; ++step)
    for (F& s : sum) s = fma(a, b, s);
  for (F& s : sum) hide(s);
}

// At a loop's end some compilers move each sum from register to register, so there are several products to one end.
constexpr int kIntSteps = 8;

// Products of weights `w`, which are other ones in each step, with inputs that are others in each chain.
template <class Dot>
HR_INLINE void int_products(int64_t steps, Dot dot) {
  const uint32_t quads[kLanes] = {0x01020304u, 0x04030201u};
  I w = load_u32(quads), sum[kIntChains];
  int32_t x[kIntChains];
  for (int i = 0; i < kIntChains; ++i) {
    sum[i] = zero_int();
    hide(sum[i]);
    x[i] = 0x01010101 * (i + 1);
    asm volatile("" : "+r"(x[i]));
  }
  for (int64_t step = 0; step < steps; ++step)
#pragma GCC unroll 8
    for (int i = 0; i < kIntSteps; ++i) {
      hide(w);
      dot(sum, w, x);
    }
  for (I& s : sum) hide(s);
}

void int4_products(int64_t steps) {
  int_products(steps, [](I* sum, const I& w, const int32_t* x) __attribute__((always_inline)) {
    for (int i = 0; i < kIntChains; ++i) sum[i] = quad_dot(sum[i], w, x[i]);
  });
}

void int8_products(int64_t steps) {
  int_products(steps, [](I* sum, const I& w, const int32_t* x) __attribute__((always_inline)) {
    const SignedBytes bytes = signed_bytes(w);
    for (int i = 0; i < kIntChains; ++i) sum[i] = byte_dot(sum[i], bytes, x[i]);
  });
}

constexpr ProductLoop kF32{f32_products, kTileRows * kLanes * 2};
constexpr ProductLoop kInt4{int4_products, kIntSteps * kIntChains * kLanes * 4 * 2};
constexpr ProductLoop kInt8{int8_products, kIntSteps * kIntChains * kLanes * 4 * 2};
constexpr ProductLoop kNone{nullptr, 0};

}  // namespace
}  // namespace headrace::HEADRACE_ISA
