// How work on the rows of a step is shared among threads.
#pragma once

#include <algorithm>

#include "program.h"

namespace headrace {

// Work below this many multiply-adds (a few microseconds) is not worth waking anybody for.
inline constexpr int64_t kSerialCost = 30'000;
inline constexpr int kChunksPerThread = 6;

inline int ceil_div(int a, int b) { return (a + b - 1) / b; }

// `cost_per_row` in multiply-adds or what takes as long.
template <class Work>
void Program::for_rows(int rows, int64_t cost_per_row, Work work) {
  if (rows * cost_per_row < kSerialCost) {
    for (int row = 0; row < rows; ++row) work(row);
    return;
  }
  const int group = std::max(ceil_div(rows, kChunksPerThread * pool_.threads()), 1);
  pool_.run(ceil_div(rows, group), [&](int chunk) {
    for (int row = chunk * group; row < std::min(rows, (chunk + 1) * group); ++row) work(row);
  });
}

}  // namespace headrace
