// A name is needed before the next one, so there is nothing to do beside it: 80 bytes take two blocks of SHA-256.

#include "names.h"

#include <cstring>

#if defined(__x86_64__)
#include <cpuid.h>
#include <immintrin.h>
#endif

namespace headrace {

#if defined(__x86_64__)
#define HEADRACE_SHA __attribute__((target("sse4.1,sha")))

namespace {

constexpr size_t kChunk = 64;  // bytes that SHA-256 takes at once

alignas(16) constexpr uint32_t kRounds[64] = {
    0x428a2f98, 0x71374491, 0xb5c0fbcf, 0xe9b5dba5, 0x3956c25b, 0x59f111f1, 0x923f82a4, 0xab1c5ed5,
    0xd807aa98, 0x12835b01, 0x243185be, 0x550c7dc3, 0x72be5d74, 0x80deb1fe, 0x9bdc06a7, 0xc19bf174,
    0xe49b69c1, 0xefbe4786, 0x0fc19dc6, 0x240ca1cc, 0x2de92c6f, 0x4a7484aa, 0x5cb0a9dc, 0x76f988da,
    0x983e5152, 0xa831c66d, 0xb00327c8, 0xbf597fc7, 0xc6e00bf3, 0xd5a79147, 0x06ca6351, 0x14292967,
    0x27b70a85, 0x2e1b2138, 0x4d2c6dfc, 0x53380d13, 0x650a7354, 0x766a0abb, 0x81c2c92e, 0x92722c85,
    0xa2bfe8a1, 0xa81a664b, 0xc24b8b70, 0xc76c51a3, 0xd192e819, 0xd6990624, 0xf40e3585, 0x106aa070,
    0x19a4c116, 0x1e376c08, 0x2748774c, 0x34b0bcb5, 0x391c0cb3, 0x4ed8aa4a, 0x5b9cca4f, 0x682e6ff3,
    0x748f82ee, 0x78a5636f, 0x84c87814, 0x8cc70208, 0x90befffa, 0xa4506ceb, 0xbef9a3f7, 0xc67178f2};

// The eight words of the state as the instructions have them, highest first: a b e f, and c d g h.
struct State {
  __m128i abef, cdgh;
};

HEADRACE_SHA inline __m128i turned_words(__m128i words) {
  return _mm_shuffle_epi8(words, _mm_set_epi8(12, 13, 14, 15, 8, 9, 10, 11, 4, 5, 6, 7, 0, 1, 2, 3));
}

HEADRACE_SHA inline State begin() {
  return {_mm_set_epi32(0x6a09e667, static_cast<int>(0xbb67ae85), 0x510e527f, static_cast<int>(0x9b05688c)),
          _mm_set_epi32(0x3c6ef372, static_cast<int>(0xa54ff53a), 0x1f83d9ab, 0x5be0cd19)};
}

HEADRACE_SHA inline void take_chunk(State& state, const std::byte* chunk) {
  const State before = state;
  __m128i words[4];
#pragma GCC unroll 16
  for (int turn = 0; turn < 16; ++turn) {  // of four rounds
    __m128i& now = words[turn % 4];
    if (turn < 4) {
      now = turned_words(_mm_loadu_si128(reinterpret_cast<const __m128i*>(chunk) + turn));
    } else {
      const __m128i last = words[(turn + 3) % 4];
      now = _mm_sha256msg1_epu32(now, words[(turn + 1) % 4]);
      now = _mm_add_epi32(now, _mm_alignr_epi8(last, words[(turn + 2) % 4], 4));
      now = _mm_sha256msg2_epu32(now, last);
    }
    const __m128i sums = _mm_add_epi32(now, _mm_load_si128(reinterpret_cast<const __m128i*>(kRounds) + turn));
    state.cdgh = _mm_sha256rnds2_epu32(state.cdgh, state.abef, sums);
    state.abef = _mm_sha256rnds2_epu32(state.abef, state.cdgh, _mm_shuffle_epi32(sums, 0x0E));
  }
  state.abef = _mm_add_epi32(state.abef, before.abef);
  state.cdgh = _mm_add_epi32(state.cdgh, before.cdgh);
}

// The first sixteen bytes of the digest.
HEADRACE_SHA inline BlockName name_of(const State& state) {
  const __m128i badc = _mm_unpackhi_epi64(state.abef, state.cdgh);
  BlockName name;
  _mm_storeu_si128(reinterpret_cast<__m128i*>(name.data()), turned_words(_mm_shuffle_epi32(badc, 0xB1)));
  return name;
}

}  // namespace

bool can_name_blocks() {
  unsigned eax, ebx, ecx, edx;
  constexpr unsigned kSha = 1U << 29;
  return __builtin_cpu_supports("sse4.1") && __get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx) && (ebx & kSha) != 0;
}

HEADRACE_SHA std::vector<BlockName> name_blocks(BlockName parent, std::span<const uint32_t> tokens, size_t block_size) {
  const size_t block_bytes = block_size * sizeof(uint32_t), num_bytes = sizeof(BlockName) + block_bytes;
  // The message, a bit, zeros, and the number of its bits as a big-endian word of eight bytes.
  std::vector<std::byte> message((num_bytes + 1 + sizeof(uint64_t) + kChunk - 1) / kChunk * kChunk);
  message[num_bytes] = std::byte{0x80};
  for (size_t index = 0; index < sizeof(uint64_t); ++index)
    message[message.size() - 1 - index] = static_cast<std::byte>((uint64_t{num_bytes} * 8) >> (8 * index));
  std::vector<BlockName> names;
  names.reserve(tokens.size() / block_size);
  for (; tokens.size() >= block_size; tokens = tokens.subspan(block_size)) {
    std::memcpy(message.data(), parent.data(), parent.size());
    std::memcpy(message.data() + parent.size(), tokens.data(), block_bytes);
    State state = begin();
    for (size_t at = 0; at < message.size(); at += kChunk) take_chunk(state, message.data() + at);
    names.push_back(parent = name_of(state));
  }
  return names;
}

#else

bool can_name_blocks() { return false; }

std::vector<BlockName> name_blocks(BlockName, std::span<const uint32_t>, size_t) { return {}; }

#endif

}  // namespace headrace
