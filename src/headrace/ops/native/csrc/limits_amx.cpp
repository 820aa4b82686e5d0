#include "machine_limits.h"
#include "tiles.h"

namespace headrace {
namespace amx {
namespace {

constexpr int kProducts = 16 * 16 * 16;  // words of all rows of one tile that meet words of another

// Four sums, each of a pair of two and two tiles: as many as hide the time that one product takes.
template <class Multiply>
void products(int64_t steps, Multiply multiply) {
  TileShapes shapes;
  for (int tile = 0; tile < 8; ++tile) shapes.with(tile, 16, 64);
  const Tiles tiles(shapes);
  alignas(64) static constexpr uint8_t kBytes[16 * 64] = {1, 2, 3, 4};
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  _tile_loadd(4, kBytes, 64);
  _tile_loadd(5, kBytes, 64);
  _tile_loadd(6, kBytes, 64);
  _tile_loadd(7, kBytes, 64);
  for (int64_t step = 0; step < steps; ++step) multiply();
}
void int8_products(int64_t steps) {
  products(steps, [] {
    _tile_dpbssd(0, 4, 6);
    _tile_dpbssd(1, 4, 7);
    _tile_dpbssd(2, 5, 6);
    _tile_dpbssd(3, 5, 7);
  });
}
void bf16_products(int64_t steps) {
  products(steps, [] {
    _tile_dpbf16ps(0, 4, 6);
    _tile_dpbf16ps(1, 4, 7);
    _tile_dpbf16ps(2, 5, 6);
    _tile_dpbf16ps(3, 5, 7);
  });
}
constexpr ProductLoop kInt8{int8_products, 4 * kProducts * 4 * 2};
constexpr ProductLoop kBf16{bf16_products, 4 * kProducts * 2 * 2};

}  // namespace
}  // namespace amx

// Four bits are widened to eight before tiles multiply them.
const LimitLoops* amx_limits() {
  static const LimitLoops loops{"amx", avx512_limits()->read, avx512_limits()->f32, amx::kInt8, amx::kInt8, amx::kBf16};
  return &loops;
}

}  // namespace headrace
