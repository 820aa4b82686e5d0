// Matrices of integers in groups, as AWQ and GPTQ pack them, become rows of blocks.
#pragma once

#include "kernels.h"
#include "pool.h"

namespace headrace {

// The weight of output n and input k is scale * (q - zero), with a scale and a zero for each output and `group` inputs.
// Words of 32 bits hold integers from the lowest bits on:
//   AWQ   four bits of one input (or group) and of eight outputs, in the order 0 2 4 6 1 3 5 7
//   GPTQ  four or eight bits of one output and of inputs that follow each other; zeros of outputs that follow each other
struct GroupedMatrix {
  bool is_awq;
  int bits;
  int rows;         // outputs, a multiple of those in a word
  int cols;         // inputs, a multiple of 32
  int group;        // a multiple of 32, or all inputs; the last group may be shorter
  int zero_offset;  // zero = (stored + zero_offset) mod 2^bits
  const std::byte* weights;  // uint32: AWQ [cols][rows / 8], GPTQ [cols * bits / 32][rows]
  const std::byte* zeros;    // uint32 [groups][rows * bits / 32]
  const std::byte* scales;   // [groups][rows] of float16, or of bfloat16
  bool has_bf16_scales;
  const int32_t* order;  // null, or [cols]: GPTQ's inputs in the order of their groups

  size_t num_groups() const { return static_cast<size_t>((cols + group - 1) / group); }
  size_t weight_bytes() const { return packed_bytes(static_cast<size_t>(cols)); }
  size_t zero_bytes() const { return packed_bytes(num_groups()); }
  size_t scale_bytes() const { return num_groups() * static_cast<size_t>(rows) * 2; }

  size_t packed_bytes(size_t lines) const { return lines * static_cast<size_t>(rows) * static_cast<size_t>(bits) / 8; }
};

// The float16 of the same value, or kNoHalf where there is none.
inline constexpr uint16_t kNoHalf = 0xffff;
uint16_t half_of_bf16(uint16_t bits);

// Rows of q4_g32 or q4_g128, or, where all are of eight bits and zeros are 128, of q8_0. The inputs of a block are of
// one group. Scales have a float16.
void write_blocks(ThreadPool& pool, const GroupedMatrix& matrix, WeightType type, std::byte* rows);

}  // namespace headrace
