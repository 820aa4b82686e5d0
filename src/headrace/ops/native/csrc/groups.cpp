#include "groups.h"

#include <algorithm>
#include <bit>
#include <cstring>

#include "weight.h"

namespace headrace {
namespace {

constexpr int kTileRows = 128;  // AWQ keeps sixteen words of them side by side, a line of the cache
constexpr int kAwqPlaces[8] = {0, 4, 1, 5, 2, 6, 3, 7};  // of outputs within a word

uint32_t word_at(const std::byte* words, size_t index) {
  uint32_t word;
  std::memcpy(&word, words + 4 * index, sizeof word);
  return word;
}

// q of inputs k to k + 31 and outputs first to first + count - 1.
void read_awq(const GroupedMatrix& m, int k, int first, int count, uint8_t (*q)[32]) {
  for (int i = 0; i < 32; ++i) {
    const size_t line = static_cast<size_t>(k + i) * static_cast<size_t>(m.rows / 8);
    for (int r = 0; r < count; r += 8) {
      const uint32_t word = word_at(m.weights, line + static_cast<size_t>((first + r) / 8));
      for (int j = 0; j < 8; ++j) q[r + j][i] = word >> (4 * kAwqPlaces[j]) & 15u;
    }
  }
}

// q of inputs order[k] to order[k + 31].
template <int Bits>
void read_gptq_in_order(const GroupedMatrix& m, int k, int first, int count, uint8_t (*q)[32]) {
  constexpr int kPerWord = 32 / Bits;
  for (int i = 0; i < 32; ++i) {
    const int input = m.order[k + i];
    const size_t line = static_cast<size_t>(input / kPerWord) * static_cast<size_t>(m.rows);
    const int shift = input % kPerWord * Bits;
    for (int r = 0; r < count; ++r)
      q[r][i] = static_cast<uint8_t>(word_at(m.weights, line + static_cast<size_t>(first + r)) >> shift & ((1u << Bits) - 1));
  }
}

template <int Bits>
void read_gptq(const GroupedMatrix& m, int k, int first, int count, uint8_t (*q)[32]) {
  if (m.order) return read_gptq_in_order<Bits>(m, k, first, count, q);
  constexpr int kPerWord = 32 / Bits;
  for (int i = 0; i < 32; i += kPerWord) {
    const size_t line = static_cast<size_t>((k + i) / kPerWord) * static_cast<size_t>(m.rows);
    for (int r = 0; r < count; ++r) {
      const uint32_t word = word_at(m.weights, line + static_cast<size_t>(first + r));
      for (int j = 0; j < kPerWord; ++j) q[r][i + j] = static_cast<uint8_t>(word >> (Bits * j) & ((1u << Bits) - 1));
    }
  }
}

uint32_t zero_of(const GroupedMatrix& m, int group, int n) {  // of four bits
  const size_t line = static_cast<size_t>(group) * static_cast<size_t>(m.rows / 8);
  const int place = m.is_awq ? kAwqPlaces[n % 8] : n % 8;
  const uint32_t stored = word_at(m.zeros, line + static_cast<size_t>(n / 8)) >> (4 * place);
  return (stored + static_cast<uint32_t>(m.zero_offset)) & 15u;
}

// -n as a float16; n is below 2048.
uint16_t half_of_negated(uint32_t n) {
  if (n == 0) return 0;
  const auto exponent = static_cast<uint32_t>(std::bit_width(n)) - 1;
  return static_cast<uint16_t>(0x8000u | (exponent + 15) << 10 | (n << (10 - exponent) & 0x3ffu));
}

void write_header(const GroupedMatrix& m, WeightType type, int k, int n, std::byte* block) {
  const int group = k / m.group;
  uint16_t scale;
  std::memcpy(&scale, m.scales + 2 * (static_cast<size_t>(group) * static_cast<size_t>(m.rows) + static_cast<size_t>(n)), 2);
  if (m.has_bf16_scales) scale = half_of_bf16(scale);
  std::memcpy(block, &scale, 2);
  if (!has_offset(type)) return;
  const uint16_t offset = half_of_negated(zero_of(m, group, n));
  std::memcpy(block + 2, &offset, 2);
}

void write_values(WeightType type, const uint8_t* q, int nth, std::byte* block) {
  if (type == WeightType::q8_0) {
    for (int i = 0; i < 32; ++i) block[2 + i] = static_cast<std::byte>(q[i] ^ 0x80u);  // q - 128
  } else {
    for (int i = 0; i < 16; ++i) block[4 + 16 * nth + i] = static_cast<std::byte>(q[i] | q[i + 16] << 4);
  }
}

void write_tile(const GroupedMatrix& m, WeightType type, int first, int count, std::byte* rows) {
  const int depth = record_inputs(type);
  const size_t stride = static_cast<size_t>(m.cols / depth) * block_bytes(type);
  uint8_t q[kTileRows][32];
  for (int k = 0; k < m.cols; k += 32) {
    if (m.is_awq)
      read_awq(m, k, first, count, q);
    else if (m.bits == 4)
      read_gptq<4>(m, k, first, count, q);
    else
      read_gptq<8>(m, k, first, count, q);
    std::byte* block = rows + static_cast<size_t>(first) * stride + static_cast<size_t>(k / depth) * block_bytes(type);
    for (int r = 0; r < count; ++r, block += stride) {
      if (k % depth == 0) write_header(m, type, k, first + r, block);
      write_values(type, q[r], k % depth / 32, block);
    }
  }
}

}  // namespace

uint16_t half_of_bf16(uint16_t bits) {
  const uint32_t sign = bits & 0x8000u;
  const int exponent = (bits >> 7 & 0xff) - 127;
  const uint32_t significand = (bits & 0x7fu) | 0x80u;  // seven bits below the point
  if ((bits & 0x7fffu) == 0) return static_cast<uint16_t>(sign);
  if (exponent > 15) return kNoHalf;  // infinities and what is no number are among them
  if (exponent >= -14)
    return static_cast<uint16_t>(sign | static_cast<uint32_t>(exponent + 15) << 10 | (bits & 0x7fu) << 3);
  const int shift = exponent + 17;  // multiples of 2^-24, down to 1
  if (shift >= 0) return static_cast<uint16_t>(sign | significand << shift);
  if (shift < -7 || (significand & ((1u << -shift) - 1)) != 0) return kNoHalf;
  return static_cast<uint16_t>(sign | significand >> -shift);
}

void write_blocks(ThreadPool& pool, const GroupedMatrix& matrix, WeightType type, std::byte* rows) {
  pool.run((matrix.rows + kTileRows - 1) / kTileRows, [&](int tile) {
    const int first = tile * kTileRows;
    write_tile(matrix, type, first, std::min(kTileRows, matrix.rows - first), rows);
  });
}

}  // namespace headrace
