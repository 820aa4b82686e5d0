// Bytes that come over a socket, and their GHASH while a core's cache still has them.
#pragma once

#include <cstddef>

#include "ghash.h"

namespace headrace {

enum class Arrival { whole, ended, late, broken };  // broken: errno says how

// As many bytes as there is room for; waits at most `patience_ms` for all of them.
Arrival receive(int fd, std::byte* into, size_t bytes, int patience_ms, const Ghash& ghash, GhashBlock& sum);

}  // namespace headrace
