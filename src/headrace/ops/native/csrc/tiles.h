// The tile registers of AMX: up to sixteen rows of 64 bytes. Where AVX-512 is emulated, so are they.
#pragma once

#include <cstdint>

#ifdef HEADRACE_EMULATE_AVX512
#include "emulate_tiles.h"
#else
#include <immintrin.h>
#endif

namespace headrace::amx {
namespace {

// To be told before tiles are loaded from what has been written: GCC 12 does not know that they read memory.
inline void before_tile_loads() { asm volatile("" ::: "memory"); }

// Shapes of all eight registers, as LDTILECFG reads them.
struct alignas(64) TileShapes {
  uint8_t palette = 1, start_row = 0, unused[14] = {};
  uint16_t row_bytes[16] = {};
  uint8_t rows[16] = {};

  constexpr TileShapes& with(int tile, int num_rows, int num_bytes) {
    rows[tile] = static_cast<uint8_t>(num_rows);
    row_bytes[tile] = static_cast<uint16_t>(num_bytes);
    return *this;
  }
};

// The calling thread's tiles, until the end of a scope: while they are in use, a switch of threads saves 8 KiB more.
class Tiles {
 public:
  explicit Tiles(const TileShapes& shapes) {
    asm volatile("" : : "r"(&shapes) : "memory");
    _tile_loadconfig(&shapes);
  }
  ~Tiles() { _tile_release(); }
  Tiles(const Tiles&) = delete;
  Tiles& operator=(const Tiles&) = delete;
};

}  // namespace
}  // namespace headrace::amx
