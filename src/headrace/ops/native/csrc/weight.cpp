#include "weight.h"

#include <algorithm>
#include <cstring>

namespace headrace {
namespace {

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

// q of the 32 inputs from 32 * nth on, of a block.
struct Values {
  uint8_t q[32];
};

// Byte i of each 16 holds values i (low nibble) and i + 16. A fifth bit is bit i of a word before them.
Values values_of_32(WeightType type, const std::byte* block, int nth) {
  const bool has_fifth = weight_bits(type) == 5;
  const std::byte* nibbles = block + header_bytes(type) / kLanes + 16 * nth;
  uint32_t fifth = 0;
  if (has_fifth) {
    std::memcpy(&fifth, nibbles, 4);
    nibbles += 4;
  }
  Values values;
  for (int i = 0; i < 16; ++i) {
    const auto byte = static_cast<uint32_t>(nibbles[i]);
    values.q[i] = static_cast<uint8_t>((byte & 15u) | (fifth >> i & 1u) << 4);
    values.q[i + 16] = static_cast<uint8_t>(byte >> 4 | (fifth >> (i + 16) & 1u) << 4);
  }
  return values;
}

// q4_k and q5_k: scale, minimum, 12 bytes of factors, (q5_k: 32 bytes with a bit for each of the eight 32s), then 32
// bytes of nibbles for each two 32s, the first in the low ones.
Values values_of_k(WeightType type, const std::byte* block, int nth) {
  const bool has_fifth = type == WeightType::q5_k;
  const std::byte* nibbles = block + (has_fifth ? 48 : 16) + nth / 2 * 32;
  Values values;
  for (int i = 0; i < 32; ++i) {
    const uint32_t low = static_cast<uint32_t>(nibbles[i]) >> (nth % 2 * 4) & 15u;
    const uint32_t fifth = has_fifth ? static_cast<uint32_t>(block[16 + i]) >> nth & 1u : 0;
    values.q[i] = static_cast<uint8_t>(low | fifth << 4);
  }
  return values;
}

// q6_k: 128 bytes of low nibbles, 64 of the two bits above, 16 int8 factors, scale. Each half of the values takes 64
// bytes of nibbles, whose low ones are of its first two 32s, and 32 of the bits above, in order of the 32s.
Values values_of_q6_k(const std::byte* block, int nth) {
  const int half = nth / 4, part = nth % 4;
  const std::byte* nibbles = block + 64 * half + 32 * (part % 2);
  const std::byte* high = block + 128 + 32 * half;
  Values values;
  for (int i = 0; i < 32; ++i)
    values.q[i] = static_cast<uint8_t>((static_cast<uint32_t>(nibbles[i]) >> (part / 2 * 4) & 15u) |
                                       (static_cast<uint32_t>(high[i]) >> (2 * part) & 3u) << 4);
  return values;
}

// The words of 32 inputs; see kernels.h.
void pack_values(const Values& values, int bits, int lane, std::byte* words) {
  uint32_t word[6] = {};
  for (int n = 0; n < 32; ++n) {
    const uint32_t q = values.q[n];
    word[n % 4] |= (q & 15u) << (n / 4 * 4);
    if (bits == 5) word[4] |= q >> 4 << n;
    if (bits == 6) word[4 + n % 8 / 4] |= q >> 4 << (n / 8 * 8 + n % 4 * 2);
  }
  for (int w = 0; w < bits; ++w) std::memcpy(words + (w * kLanes + lane) * 4, word + w, 4);
}

void pack_32(WeightType type, const std::byte* row, int lane, int cols, std::byte* panel) {
  const int depth = record_inputs(type);
  for (int b = 0; b < cols / depth; ++b, row += block_bytes(type), panel += record_bytes(type)) {
    std::memcpy(panel + 2 * lane, row, 2);
    if (header_bytes(type) == 64) std::memcpy(panel + 32 + 2 * lane, row + 2, 2);
    for (int nth = 0; nth < depth / 32; ++nth)
      pack_values(values_of_32(type, row, nth), weight_bits(type), lane,
                  panel + header_bytes(type) + nth * 4 * kLanes * weight_bits(type));
  }
}

// Eight factors of the scale and eight of the minimum, of six bits each. The low bits of the last four of both share
// bytes; their upper two bits lie above the first four.
void pack_factors(const std::byte* packed, int nth, std::byte* factors) {
  const auto at = [packed](int i) { return static_cast<uint32_t>(packed[i]); };
  const uint32_t scale = nth < 4 ? at(nth) & 63u : (at(nth + 4) & 15u) | at(nth - 4) >> 6 << 4;
  const uint32_t min = nth < 4 ? at(nth + 4) & 63u : at(nth + 4) >> 4 | at(nth) >> 6 << 4;
  factors[0] = static_cast<std::byte>(scale);
  factors[1] = static_cast<std::byte>(min);
}

void pack_k(WeightType type, const std::byte* row, int lane, int cols, std::byte* panel) {
  for (int b = 0; b < cols / 256; ++b, row += block_bytes(type), panel += record_bytes(type)) {
    std::memcpy(panel + 2 * lane, row, 2);
    panel[32 + 2 * lane] = row[2];
    panel[32 + 2 * lane + 1] = row[3] ^ std::byte{0x80};  // -min
    for (int nth = 0; nth < 8; ++nth) {
      pack_factors(row + 4, nth, panel + 64 + (nth * kLanes + lane) * 2);
      pack_values(values_of_k(type, row, nth), weight_bits(type), lane,
                  panel + header_bytes(type) + nth * 4 * kLanes * weight_bits(type));
    }
  }
}

void pack_q6_k(const std::byte* row, int lane, int cols, std::byte* panel) {
  constexpr WeightType type = WeightType::q6_k;
  for (int b = 0; b < cols / 256; ++b, row += block_bytes(type), panel += record_bytes(type)) {
    std::memcpy(panel + 2 * lane, row + 208, 2);
    for (int nth = 0; nth < 8; ++nth) {
      std::memcpy(panel + 64 + (nth * kLanes + lane) * 2, row + 192 + 2 * nth, 2);
      pack_values(values_of_q6_k(row, nth), 6, lane, panel + header_bytes(type) + nth * 4 * kLanes * 6);
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
    case WeightType::q4_0:
    case WeightType::q4_1:
    case WeightType::q5_0:
    case WeightType::q5_1:
    case WeightType::q4_g32:
    case WeightType::q4_g128: return pack_32(type, row, lane, cols, panel);
    case WeightType::q8_0: return pack_q8(row, lane, cols, panel);
    case WeightType::q4_k:
    case WeightType::q5_k: return pack_k(type, row, lane, cols, panel);
    case WeightType::q6_k: return pack_q6_k(row, lane, cols, panel);
  }
}

}  // namespace

WeightType weight_type(const std::string& name) {
  if (name == "f32") return WeightType::f32;
  if (name == "f16") return WeightType::f16;
  if (name == "bf16") return WeightType::bf16;
  if (name == "q4_0") return WeightType::q4_0;
  if (name == "q4_1") return WeightType::q4_1;
  if (name == "q5_0") return WeightType::q5_0;
  if (name == "q5_1") return WeightType::q5_1;
  if (name == "q8_0") return WeightType::q8_0;
  if (name == "q4_g32") return WeightType::q4_g32;
  if (name == "q4_g128") return WeightType::q4_g128;
  if (name == "q4_k") return WeightType::q4_k;
  if (name == "q5_k") return WeightType::q5_k;
  if (name == "q6_k") return WeightType::q6_k;
  fail("unknown weight type ", name);
}

size_t block_bytes(WeightType type) {
  switch (type) {
    case WeightType::f32: return 8 * 4;
    case WeightType::f16:
    case WeightType::bf16: return 8 * 2;
    case WeightType::q4_0: return 18;
    case WeightType::q4_1: return 20;
    case WeightType::q5_0: return 22;
    case WeightType::q5_1: return 24;
    case WeightType::q8_0: return 34;
    case WeightType::q4_g32: return 20;
    case WeightType::q4_g128: return 68;
    case WeightType::q4_k: return 144;
    case WeightType::q5_k: return 176;
    case WeightType::q6_k: return 210;
  }
  return 0;
}

void check_order(const std::vector<int32_t>& order, int count) {
  std::vector<bool> seen(static_cast<size_t>(count), false);
  if (order.size() != seen.size()) fail("an order of ", count, " inputs got ", order.size());
  for (int32_t input : order) {
    if (input < 0 || input >= count || seen[static_cast<size_t>(input)])
      fail("an order has each of 0..", count - 1, " once, got ", input, " out of range or twice");
    seen[static_cast<size_t>(input)] = true;
  }
}

Weight::Weight(ThreadPool& pool, WeightType type, int rows, int cols, const std::byte* data, size_t bytes,
               std::vector<int32_t> order)
    : type_(type), rows_(rows), cols_(cols), order_(std::move(order)) {
  if (rows < 1 || cols < 1) fail("a weight needs rows and columns, got ", rows, " x ", cols);
  if (!order_.empty()) check_order(order_, cols);
  const int depth = record_inputs(type);
  if (is_quantised(type) && cols % depth != 0)
    fail("a weight in blocks of ", depth, " needs a multiple of ", depth, " columns, got ", cols);
  const size_t stride = static_cast<size_t>(cols) * block_bytes(type) / static_cast<size_t>(depth);
  if (bytes != stride * static_cast<size_t>(rows))
    fail("a weight of ", rows, " x ", cols, " takes ", stride * static_cast<size_t>(rows), " bytes, got ", bytes);
  const int stretch = type == WeightType::bf16 ? kBf16Inputs : depth;  // with zeros behind the last input
  panel_bytes_ = static_cast<size_t>((cols + stretch - 1) / stretch * stretch / depth) * record_bytes(type);
  pages_ = Pages::beside_others(panel_bytes_ * static_cast<size_t>(num_panels()));
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
