// Names of KV blocks (core/kv/names.py): SHA-256 (FIPS 180-4), cut, of the name before and the tokens.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

namespace headrace {

using BlockName = std::array<std::byte, 16>;

// Whether this CPU has instructions for SHA-256.
bool can_name_blocks();

// Of whole blocks of tokens, one behind the other, behind the block that is called `parent`.
std::vector<BlockName> name_blocks(BlockName parent, std::span<const uint32_t> tokens, size_t block_size);

}  // namespace headrace
