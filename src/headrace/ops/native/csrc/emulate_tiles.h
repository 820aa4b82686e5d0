// AMX in plain code, for testing on CPUs without it.
#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "flushing.h"

namespace headrace::emulated {

struct Tile {
  int rows, row_bytes;
  uint8_t bytes[16][64];
};
inline thread_local Tile tiles[8];

inline void load_config(const void* from) {
  const auto* bytes = static_cast<const uint8_t*>(from);
  for (int i = 0; i < 8; ++i) {
    uint16_t row_bytes;
    std::memcpy(&row_bytes, bytes + 16 + 2 * i, sizeof row_bytes);
    tiles[i] = {bytes[48 + i], row_bytes, {}};
  }
}
inline void load(int tile, const void* from, size_t stride) {
  std::memset(tiles[tile].bytes, 0, sizeof tiles[tile].bytes);
  for (int r = 0; r < tiles[tile].rows; ++r)
    std::memcpy(tiles[tile].bytes[r], static_cast<const uint8_t*>(from) + static_cast<size_t>(r) * stride,
                static_cast<size_t>(tiles[tile].row_bytes));
}
inline void store(int tile, void* to, size_t stride) {
  for (int r = 0; r < tiles[tile].rows; ++r)
    std::memcpy(static_cast<uint8_t*>(to) + static_cast<size_t>(r) * stride, tiles[tile].bytes[r],
                static_cast<size_t>(tiles[tile].row_bytes));
}
inline void zero(int tile) { std::memset(tiles[tile].bytes, 0, sizeof tiles[tile].bytes); }

// Each 32-bit sum of `out` takes what `dot` makes of it and all pairs of words that meet in it.
template <class Sum, class Dot>
void multiply(int out, int a, int b, Dot dot) {
  Tile& c = tiles[out];
  for (int m = 0; m < c.rows; ++m)
    for (int n = 0; n < c.row_bytes / 4; ++n) {
      uint8_t pairs[16][2][4];
      for (int k = 0; k < tiles[a].row_bytes / 4; ++k) {
        std::memcpy(pairs[k][0], tiles[a].bytes[m] + 4 * k, 4);
        std::memcpy(pairs[k][1], tiles[b].bytes[k] + 4 * n, 4);
      }
      Sum sum;
      std::memcpy(&sum, c.bytes[m] + 4 * n, sizeof sum);
      sum = dot(sum, pairs, tiles[a].row_bytes / 4);
      std::memcpy(c.bytes[m] + 4 * n, &sum, sizeof sum);
    }
}
template <class A, class B>
void dot_bytes(int out, int a, int b) {
  multiply<uint32_t>(out, a, b, [](uint32_t sum, const uint8_t (*pairs)[2][4], int words) {
    for (int k = 0; k < words; ++k)
      for (int i = 0; i < 4; ++i)
        sum += static_cast<uint32_t>(static_cast<A>(pairs[k][0][i]) * static_cast<B>(pairs[k][1][i]));
    return sum;
  });
}
inline float from_bf16(const uint8_t* bytes) {
  const uint32_t bits = static_cast<uint32_t>(bytes[0]) << 16 | static_cast<uint32_t>(bytes[1]) << 24;
  float x;
  std::memcpy(&x, &bits, sizeof x);
  return x;
}
// Two chains of fused multiply-adds, of the even and of the odd inputs, whose sum is added.
[[gnu::noinline]] inline void dot_flushed(int out, int a, int b) {
  multiply<float>(out, a, b, [](float sum, const uint8_t (*pairs)[2][4], int words) {
    float chain[2] = {0.0f, 0.0f};
    for (int k = 0; k < words; ++k)
      for (int i = 0; i < 2; ++i)
        chain[i] = std::fma(from_bf16(pairs[k][0] + 2 * i), from_bf16(pairs[k][1] + 2 * i), chain[i]);
    return sum + (chain[0] + chain[1]);
  });
}
inline void dot_bf16(int out, int a, int b) {
  const Flushing flushing;
  dot_flushed(out, a, b);
}

}  // namespace headrace::emulated

// Compilers that know AMX have macros of these names.
#undef _tile_loadd
#undef _tile_stored
#undef _tile_zero
#undef _tile_dpbssd
#undef _tile_dpbsud
#undef _tile_dpbf16ps
#define _tile_loadconfig(from) ::headrace::emulated::load_config(from)
#define _tile_release() static_cast<void>(0)
#define _tile_loadd(tile, from, stride) ::headrace::emulated::load(tile, from, static_cast<size_t>(stride))
#define _tile_stored(tile, to, stride) ::headrace::emulated::store(tile, to, static_cast<size_t>(stride))
#define _tile_zero(tile) ::headrace::emulated::zero(tile)
#define _tile_dpbssd(out, a, b) (::headrace::emulated::dot_bytes<int8_t, int8_t>(out, a, b))
#define _tile_dpbsud(out, a, b) (::headrace::emulated::dot_bytes<int8_t, uint8_t>(out, a, b))
#define _tile_dpbf16ps(out, a, b) ::headrace::emulated::dot_bf16(out, a, b)
