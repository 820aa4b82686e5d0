// Program: copying KV blocks.

#include <algorithm>
#include <cstring>

#include "program.h"

namespace headrace {

// Blocks are used from the first one on, so what comes next is known.
bool Program::ready_blocks() {
  constexpr size_t kAheadBlocks = 256, kMostAhead = size_t{256} << 20, kPage = size_t{1} << 21;
  const size_t block = kv_.block_bytes(), used = used_blocks_ * block;
  const size_t end = std::min(used + std::min(kAheadBlocks * block, kMostAhead), blocks_.bytes());
  ready_bytes_ = std::max(ready_bytes_, used / kPage * kPage);
  if (ready_bytes_ >= end) return false;
  blocks_.touch(ready_bytes_, std::min(kPage, end - ready_bytes_));
  ready_bytes_ += kPage;
  return ready_bytes_ < end;
}

void Program::copy_blocks(const std::vector<std::array<int, 3>>& copies) {
  for (const auto& [src, dst, tokens] : copies) {
    for (int block : {src, dst})
      if (block < 0 || block >= kv_.num_blocks) fail("block id must be in 0..", kv_.num_blocks - 1, ", got ", block);
    if (tokens < 1 || tokens > kBlockTokens) fail("a block copy takes 1..", kBlockTokens, " tokens, got ", tokens);
  }
  const auto element = static_cast<size_t>(kv_element_bytes(kv_.type));
  const size_t row = element * static_cast<size_t>(kv_.head_dim);  // of one token
  const size_t part = kv_part_bytes(kv_.type, kv_.head_dim);
  const size_t scales = row * kBlockTokens;  // where they begin in a part
  for (const auto& [src, dst, tokens] : copies) {
    if (src == dst) continue;
    const auto count = static_cast<size_t>(tokens);
    const std::byte* from = blocks_.data() + static_cast<size_t>(src) * kv_.block_bytes();
    std::byte* to = blocks_.data() + static_cast<size_t>(dst) * kv_.block_bytes();
    for (int h = 0; h < kv_.num_layers * kv_.num_kv_heads; ++h, from += 2 * part, to += 2 * part) {
      for (size_t at = 0; at < scales; at += element * kBlockTokens)
        std::memcpy(to + at, from + at, element * count);
      std::memcpy(to + part, from + part, row * count);
      if (scales == part) continue;
      std::memcpy(to + scales, from + scales, sizeof(float) * count);
      std::memcpy(to + part + scales, from + part + scales, sizeof(float) * count);
    }
  }
}

}  // namespace headrace
