// Copies past the caches: for more than these hold, which nobody reads at once.
#pragma once

#include <cstddef>

namespace headrace {

// The ranges do not overlap.
void copy_streaming(void* to, const void* from, size_t bytes);

}  // namespace headrace
