// GHASH by carry-less products of two blocks at a time.
//
// GCM counts bits from the other end. A block whose bytes are turned around is such a polynomial with its highest
// coefficient last, and a product of two comes out one bit too low: the subkey is multiplied by x^-1 once, which makes
// up for it (Gueron and Kounavis, "Intel Carry-Less Multiplication Instruction and its Usage for Computing the GCM Mode").
// Sixteen blocks are multiplied by sixteen powers of the subkey, in three products each (Karatsuba), and reduced once.

#include "ghash.h"

#include "memory.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include <cstdint>
#include <cstring>

namespace headrace {

#if defined(__x86_64__)
#define HEADRACE_GHASH __attribute__((target("avx2,pclmul,vpclmulqdq")))

namespace {

constexpr size_t kBlock = sizeof(GhashBlock);
constexpr size_t kLine = 64;
constexpr size_t kStep = kGhashPairs * 32;
constexpr size_t kFar = size_t{1} << 16;  // between two places that are hashed at once
constexpr size_t kAhead = 2048;  // the processor itself does not look beyond a page

HEADRACE_GHASH inline __m128i polynomial() {
  return _mm_set_epi64x(static_cast<int64_t>(0xC200000000000000), 1);  // x^128 + x^7 + x^2 + x + 1, turned around
}

HEADRACE_GHASH inline __m128i load(const std::byte* block) {
  return _mm_loadu_si128(reinterpret_cast<const __m128i*>(block));
}

HEADRACE_GHASH inline void store(std::byte* block, __m128i value) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(block), value);
}

HEADRACE_GHASH inline __m128i turned_bytes() {
  return _mm_set_epi8(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
}

HEADRACE_GHASH inline __m128i turned(__m128i block) { return _mm_shuffle_epi8(block, turned_bytes()); }

HEADRACE_GHASH inline __m128i swapped(__m128i value) { return _mm_shuffle_epi32(value, 0x4E); }

// A product's 256 bits, of which `middle` lies across the other two, as an element of the field.
HEADRACE_GHASH inline __m128i reduced(__m128i low, __m128i middle, __m128i high) {
  const __m128i by = polynomial();
  middle = _mm_xor_si128(middle, _mm_xor_si128(swapped(low), _mm_clmulepi64_si128(by, low, 0x01)));
  return _mm_xor_si128(high, _mm_xor_si128(swapped(middle), _mm_clmulepi64_si128(by, middle, 0x01)));
}

HEADRACE_GHASH inline __m128i product(__m128i a, __m128i b) {
  const __m128i low = _mm_clmulepi64_si128(a, b, 0x00), high = _mm_clmulepi64_si128(a, b, 0x11);
  const __m128i middle = _mm_xor_si128(_mm_clmulepi64_si128(a, b, 0x01), _mm_clmulepi64_si128(a, b, 0x10));
  return reduced(low, middle, high);
}

HEADRACE_GHASH inline __m128i times_inverse_of_x(__m128i value) {
  const __m128i carries = _mm_srli_epi64(value, 63);
  const __m128i doubled = _mm_or_si128(_mm_add_epi64(value, value), _mm_slli_si128(carries, 8));
  // All ones where the highest bit was set; no branch, which would tell of the key.
  const __m128i is_over = _mm_sub_epi64(_mm_setzero_si128(), _mm_unpackhi_epi64(carries, carries));
  return _mm_xor_si128(doubled, _mm_and_si128(is_over, polynomial()));
}

HEADRACE_GHASH inline __m128i both_lanes(__m256i value) {
  return _mm_xor_si128(_mm256_castsi256_si128(value), _mm256_extracti128_si256(value, 1));
}

// Each lane's upper half added to its lower one, in both.
HEADRACE_GHASH inline __m256i folded(__m256i value) {
  return _mm256_xor_si256(value, _mm256_shuffle_epi32(value, 0x4E));
}

// The sum so far, and sixteen blocks behind it.
HEADRACE_GHASH inline __m128i behind(__m128i total, const std::byte* data, const __m256i* powers, const __m256i* halves) {
  const __m256i turn = _mm256_broadcastsi128_si256(turned_bytes());
  for (size_t line = 0; line < kStep; line += kLine)
    _mm_prefetch(reinterpret_cast<const char*>(data + kAhead + line), _MM_HINT_T0);
  __m256i low = _mm256_setzero_si256(), middle = low, high = low;
  __m256i before = _mm256_zextsi128_si256(total);  // goes into the first block
  for (int pair = 0; pair < kGhashPairs; ++pair) {
    const __m256i loaded = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(data + 32 * pair));
    const __m256i blocks = _mm256_xor_si256(_mm256_shuffle_epi8(loaded, turn), before);
    before = _mm256_setzero_si256();
    low = _mm256_xor_si256(low, _mm256_clmulepi64_epi128(blocks, powers[pair], 0x00));
    high = _mm256_xor_si256(high, _mm256_clmulepi64_epi128(blocks, powers[pair], 0x11));
    middle = _mm256_xor_si256(middle, _mm256_clmulepi64_epi128(folded(blocks), halves[pair], 0x00));
  }
  middle = _mm256_xor_si256(middle, _mm256_xor_si256(low, high));
  return reduced(both_lanes(low), both_lanes(middle), both_lanes(high));
}

}  // namespace

bool Ghash::can_run() {
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("pclmul") && __builtin_cpu_supports("vpclmulqdq");
}

Ghash::Ghash(const GhashBlock& subkey) {
  if (!can_run()) fail("this processor has no VPCLMULQDQ");
  expand(subkey);
}

HEADRACE_GHASH void Ghash::expand(const GhashBlock& subkey) {
  const __m128i first = times_inverse_of_x(turned(load(subkey.data())));
  store(first_, first);
  __m128i far = first;
  for (size_t blocks = 1; blocks < kFar / kBlock; blocks *= 2) far = product(far, far);
  store(far_, far);
  __m128i power = first;
  for (int pair = kGhashPairs - 1; pair >= 0; --pair) {  // the first block of a pair is one power above the second
    std::byte* const powers = powers_ + 32 * pair;
    store(powers + 16, power);
    power = product(power, first);
    store(powers, power);
    power = product(power, first);
    for (int lane = 0; lane < 32; lane += 16)
      store(halves_ + 32 * pair + lane, _mm_xor_si128(load(powers + lane), swapped(load(powers + lane))));
  }
}

HEADRACE_GHASH void Ghash::add(GhashBlock& sum, const std::byte* data, size_t bytes) const {
  const auto* powers = reinterpret_cast<const __m256i*>(powers_);
  const auto* halves = reinterpret_cast<const __m256i*>(halves_);
  __m128i total = turned(load(sum.data()));
  // Two places at once: one stream of loads leaves a third of what a core can have from memory unused.
  for (; bytes >= 2 * kFar; bytes -= 2 * kFar, data += 2 * kFar) {
    __m128i far = _mm_setzero_si128();
    for (size_t at = 0; at < kFar; at += kStep) {
      total = behind(total, data + at, powers, halves);
      far = behind(far, data + kFar + at, powers, halves);
    }
    total = _mm_xor_si128(product(total, load(far_)), far);
  }
  for (; bytes >= kStep; bytes -= kStep, data += kStep) total = behind(total, data, powers, halves);
  const __m128i first = load(first_);
  for (; bytes >= kBlock; bytes -= kBlock, data += kBlock)
    total = product(_mm_xor_si128(total, turned(load(data))), first);
  if (bytes > 0) {
    GhashBlock rest{};
    std::memcpy(rest.data(), data, bytes);
    total = product(_mm_xor_si128(total, turned(load(rest.data()))), first);
  }
  store(sum.data(), turned(total));
}

HEADRACE_GHASH void Ghash::finish(GhashBlock& sum, size_t num_bytes) const {
  const __m128i lengths = _mm_set_epi64x(static_cast<int64_t>(num_bytes * 8), 0);
  const __m128i total = _mm_xor_si128(turned(load(sum.data())), lengths);
  store(sum.data(), turned(product(total, load(first_))));
}

#undef HEADRACE_GHASH
#else

bool Ghash::can_run() { return false; }
Ghash::Ghash(const GhashBlock&) : powers_{}, halves_{}, first_{}, far_{} { fail("this processor has no VPCLMULQDQ"); }
void Ghash::add(GhashBlock&, const std::byte*, size_t) const {}
void Ghash::finish(GhashBlock&, size_t) const {}

#endif

}  // namespace headrace
