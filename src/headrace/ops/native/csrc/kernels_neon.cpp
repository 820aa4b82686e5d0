#define HEADRACE_ISA neon
#include <type_traits>

#include "kernels.h"
#include "simd_neon.h"
#include "kernels_maps.inl"
#include "kernels_ahead.inl"
#include "kernels_tile.inl"
#include "kernels_blocks.inl"
#include "kernels_linear.inl"
#include "kernels_int8.inl"
#include "kernels_scales.inl"
#include "kernels_int12.inl"
#include "kernels_rows.inl"
#include "kernels_bf16.inl"
#include "kernels_kv.inl"
#include "kernels_products.inl"
#include "kernels_softmax.inl"
#include "kernels_attention.inl"

namespace headrace {

const Kernels* neon_kernels() {
  using namespace neon;
  static constexpr Kernels kernels{"neon",    linear,   linear_bf16, "fma", kBf16Bytes, linear_int8, linear_int12, weight_bounds, to_bf16, to_int8, to_int12, weight_row,     add_row,
                                   rms_norm, silu_mul, rope_row, attend,      merge_segments, max_row, exp_row,
                                   sum_exp_row, divide_row, find_row};
  return &kernels;
}

}  // namespace headrace
