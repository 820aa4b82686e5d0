// Which instruction set to compute with.
#pragma once

#include <string>
#include <vector>

#include "kernels.h"

namespace headrace {

// The kernels compiled in that this CPU can run, slowest first.
std::vector<const Kernels*> usable_kernels();

// By name, or the fastest usable ones for "auto".
const Kernels& find_kernels(const std::string& name);

}  // namespace headrace
