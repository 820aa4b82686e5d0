// Which instruction set to compute with.
#pragma once

#include <string>
#include <vector>

#include "kernels.h"

namespace headrace {

// The kernels compiled in that this CPU can run, slowest first.
std::vector<const Kernels*> usable_kernels();

std::vector<std::string> usable_names();

// Why this process may not use the tiles of AMX that the CPU has; empty where it may, or the CPU has none.
std::string amx_refusal();

// By name, or the fastest usable ones for "auto".
const Kernels& find_kernels(const std::string& name);

}  // namespace headrace
