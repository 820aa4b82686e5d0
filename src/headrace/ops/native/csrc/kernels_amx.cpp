// AVX-512's kernels, with tiles for products of many rows. What tiles compute has the same bits.
#include "kernels.h"
#include "tiles.h"

namespace headrace {

const Kernels* amx_kernels() {
  static const Kernels kernels = [] {
    Kernels k = *avx512_kernels();
    k.name = "amx";
    return k;
  }();
  return &kernels;
}

}  // namespace headrace
