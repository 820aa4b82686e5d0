// AVX-512's kernels, with tiles for products of many rows. What tiles compute has the same bits.
#define HEADRACE_ISA amx
#include <cstring>
#include <type_traits>
#include <utility>

#include "kernels.h"
#include "simd_avx512.h"
#include "tiles.h"
#include "kernels_maps.inl"
#include "kernels_ahead.inl"
#include "kernels_blocks.inl"
#include "kernels_amx_bf16.inl"
#include "kernels_amx_int8.inl"
#include "kernels_scales.inl"
#include "kernels_amx_int12.inl"
#include "kernels_kv.inl"
#include "kernels_products.inl"
#include "kernels_softmax.inl"
#include "kernels_amx_attention.inl"

namespace headrace {

const Kernels* amx_kernels() {
  static const Kernels kernels = [] {
    Kernels k = *avx512_kernels();
    k.name = "amx";
    k.linear_bf16 = amx::linear_bf16;
    k.bf16_products = "tiles";
    k.linear_int8 = amx::linear_int8;
    k.rows_in_tiles = amx::kFewRows + 1;
    k.linear_int12 = amx::linear_int12;
    k.rows_in_int12_tiles = amx::kFewInt12Rows + 1;
    k.attend = amx::attend;
    k.rows_in_bf16 = kTiledRows;
    return k;
  }();
  return &kernels;
}

}  // namespace headrace
