// GHASH (NIST SP 800-38D): the sum over bytes that an AES-GMAC tag hides behind one block of AES.
#pragma once

#include <array>
#include <cstddef>

namespace headrace {

using GhashBlock = std::array<std::byte, 16>;

constexpr int kGhashPairs = 8;  // of blocks, that are reduced together

// Bytes that are authenticated and not encrypted, under one subkey. Needs AVX2 and VPCLMULQDQ, and takes the same time
// whatever the bytes and the subkey are.
class Ghash {
 public:
  static bool can_run();

  explicit Ghash(const GhashBlock& subkey);

  // A sum begins with zeros and takes bytes in pieces; all but the last are of whole blocks.
  void add(GhashBlock& sum, const std::byte* data, size_t bytes) const;
  // What it comes to with the length of all bytes behind them.
  void finish(GhashBlock& sum, size_t num_bytes) const;

 private:
  void expand(const GhashBlock& subkey);

  alignas(32) std::byte powers_[kGhashPairs * 32];  // of the subkey, the highest first
  alignas(32) std::byte halves_[kGhashPairs * 32];  // of the same: upper and lower, added
  alignas(16) std::byte first_[16];
  alignas(16) std::byte far_[16];  // as far as two places are apart that are hashed at once
};

}  // namespace headrace
