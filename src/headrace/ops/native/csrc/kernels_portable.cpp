#define HEADRACE_ISA portable
#include "kernels.h"
#include "simd_portable.h"
#include "kernels_linear.inl"
#include "kernels_rows.inl"
#include "kernels_attention.inl"

namespace headrace {

const Kernels* portable_kernels() {
  using namespace portable;
  static constexpr Kernels kernels{"portable", linear, nullptr, to_bf16, weight_row, add_row, rms_norm,
                                   silu_mul, rope_row, attend, merge_segments, max_row, exp_row};
  return &kernels;
}

}  // namespace headrace
