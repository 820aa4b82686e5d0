// What this machine does at most: loops that read memory, or multiply in registers, and do nothing else.
//
// They are written with the operations of the kernels, once for each instruction set, so that a limit is that of the
// instructions which the kernels use, not of others that the CPU may have.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "pool.h"

namespace headrace {

// A loop of independent chains of products. `steps` times `operations` are done; a multiply-add counts as two.
struct ProductLoop {
  void (*run)(int64_t steps);  // null where the instruction set has no such product
  int64_t operations;          // of one step
};

struct LimitLoops {
  const char* isa;
  void (*read)(const std::byte* data, size_t bytes);  // bytes is a multiple of kReadBytes
  ProductLoop f32;   // fused multiply-adds
  ProductLoop int4;  // products of 4-bit weights and 8-bit inputs
  ProductLoop int8;  // products of 8-bit weights and 8-bit inputs
  ProductLoop bf16;  // dot products of bf16 pairs
};

inline constexpr size_t kReadBytes = 256;

const LimitLoops* portable_limits();
const LimitLoops* avx2_limits();    // null where it is not compiled in
const LimitLoops* avx512_limits();  // the same
const LimitLoops* amx_limits();     // the same
const LimitLoops* neon_limits();    // the same

// Bytes per second at which all threads of `pool` together read `bytes` of memory, in the fastest pass of those that
// fit into `seconds`, and of at least three.
double read_limit(ThreadPool& pool, const std::string& isa, size_t bytes, double seconds);

// Operations per second of all threads together, in the fastest of the runs likewise. `kind` is f32, int4, int8 or
// bf16; 0 where the instruction set has no such product.
double product_limit(ThreadPool& pool, const std::string& isa, const std::string& kind, double seconds);

}  // namespace headrace
