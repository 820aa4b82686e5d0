#include "weight.h"

#include <algorithm>
#include <cstring>

namespace headrace {
namespace {

size_t row_bytes(WeightType type, int cols) {
  const auto n = static_cast<size_t>(cols);
  switch (type) {
    case WeightType::f32: return n * 4;
    case WeightType::f16:
    case WeightType::bf16: return n * 2;
    case WeightType::q4_0: return n / 32 * 18;
    case WeightType::q4_1: return n / 32 * 20;
    case WeightType::q8_0: return n / 32 * 34;
  }
  return 0;
}

template <class Word>
void pack_words(const Word* row, int lane, int cols, Word* panel) {
  for (int k = 0; k < cols; ++k) panel[k * kLanes + lane] = row[k];
}

void pack_bf16(const uint16_t* row, int lane, int cols, uint16_t* panel) {
  for (int k = 0; k < cols; ++k) panel[(k / 2 * kLanes + lane) * 2 + k % 2] = row[k];
}

void pack_q8(const std::byte* row, int lane, int cols, std::byte* panel) {
  for (int b = 0; b < cols / 32; ++b, row += 34, panel += record_bytes(WeightType::q8_0)) {
    std::memcpy(panel + 2 * lane, row, 2);
    for (int quad = 0; quad < 8; ++quad)
      for (int i = 0; i < 4; ++i) panel[32 + (quad * kLanes + lane) * 4 + i] = row[2 + quad_input(quad, i)];
  }
}

// A GGUF byte i holds inputs i (low nibble) and i + 16. Word w collects inputs w, w + 4, w + 8, ...: of the low nibbles
// bytes w, w + 4, w + 8, w + 12 as its nibbles 0 to 3, of the high ones the same as its nibbles 4 to 7.
void pack_q4(const std::byte* row, int lane, int cols, std::byte* panel, bool has_min) {
  const int header = has_min ? 4 : 2;
  const size_t record = record_bytes(has_min ? WeightType::q4_1 : WeightType::q4_0);
  for (int b = 0; b < cols / 32; ++b, row += header + 16, panel += record) {
    std::memcpy(panel + 2 * lane, row, 2);
    if (has_min) std::memcpy(panel + 32 + 2 * lane, row + 2, 2);
    for (int w = 0; w < 4; ++w) {
      uint32_t word = 0;
      for (int j = 0; j < 4; ++j) {
        const auto byte = static_cast<uint32_t>(row[header + 4 * j + w]);
        word |= (byte & 15u) << (4 * j) | (byte >> 4) << (4 * j + 16);
      }
      std::memcpy(panel + 16 * header + (w * kLanes + lane) * 4, &word, 4);
    }
  }
}

void pack_row(WeightType type, const std::byte* row, int lane, int cols, std::byte* panel) {
  switch (type) {
    case WeightType::f32:
      return pack_words(reinterpret_cast<const uint32_t*>(row), lane, cols, reinterpret_cast<uint32_t*>(panel));
    case WeightType::f16:
      return pack_words(reinterpret_cast<const uint16_t*>(row), lane, cols, reinterpret_cast<uint16_t*>(panel));
    case WeightType::bf16:
      return pack_bf16(reinterpret_cast<const uint16_t*>(row), lane, cols, reinterpret_cast<uint16_t*>(panel));
    case WeightType::q4_0: return pack_q4(row, lane, cols, panel, false);
    case WeightType::q4_1: return pack_q4(row, lane, cols, panel, true);
    case WeightType::q8_0: return pack_q8(row, lane, cols, panel);
  }
}

}  // namespace

WeightType weight_type(const std::string& name) {
  if (name == "f32") return WeightType::f32;
  if (name == "f16") return WeightType::f16;
  if (name == "bf16") return WeightType::bf16;
  if (name == "q4_0") return WeightType::q4_0;
  if (name == "q4_1") return WeightType::q4_1;
  if (name == "q8_0") return WeightType::q8_0;
  fail("unknown weight type ", name);
}

Weight::Weight(ThreadPool& pool, WeightType type, int rows, int cols, const std::byte* data, size_t bytes)
    : type_(type), rows_(rows), cols_(cols) {
  if (rows < 1 || cols < 1) fail("a weight needs rows and columns, got ", rows, " x ", cols);
  const int depth = record_inputs(type);
  if (depth == 32 && cols % 32 != 0) fail("columns of a quantised weight must be a multiple of 32, got ", cols);
  const size_t stride = row_bytes(type, cols);
  if (bytes != stride * static_cast<size_t>(rows))
    fail("a weight of ", rows, " x ", cols, " takes ", stride * static_cast<size_t>(rows), " bytes, got ", bytes);
  panel_bytes_ = static_cast<size_t>((cols + depth - 1) / depth) * record_bytes(type);
  pages_ = Pages(panel_bytes_ * static_cast<size_t>(num_panels()));
  // Panels of rows that do not exist stay zero: scale 0 gives weight 0.
  const int group = std::max(1, num_panels() / (8 * pool.threads()));
  pool.run((num_panels() + group - 1) / group, [&](int chunk) {
    const int end = std::min(rows, (chunk + 1) * group * kLanes);
    for (int row = chunk * group * kLanes; row < end; ++row)
      pack_row(type, data + static_cast<size_t>(row) * stride, row % kLanes, cols,
               pages_.data() + static_cast<size_t>(row / kLanes) * panel_bytes_);
  });
}

}  // namespace headrace
