// Copies past the caches.

#include "stream.h"

#include <cstdint>
#include <cstring>

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

namespace headrace {

#if defined(__SSE2__)
namespace {

constexpr size_t kLine = 64;

}  // namespace

// A usual store reads the line that it writes to before it does, which is a third of all the traffic of a copy. SSE2 is
// what every x86-64 has, and as fast here as wider stores: memory is the limit.
void copy_streaming(void* to, const void* from, size_t bytes) {
  auto* target = static_cast<std::byte*>(to);
  const auto* source = static_cast<const std::byte*>(from);
  const size_t head = (kLine - reinterpret_cast<uintptr_t>(target) % kLine) % kLine;
  if (bytes < head + kLine) {
    std::memcpy(target, source, bytes);
    return;
  }
  std::memcpy(target, source, head);
  size_t at = head;
  for (; at + kLine <= bytes; at += kLine) {
    const auto* lanes = reinterpret_cast<const __m128i*>(source + at);
    auto* line = reinterpret_cast<__m128i*>(target + at);
    const __m128i a = _mm_loadu_si128(lanes), b = _mm_loadu_si128(lanes + 1);
    const __m128i c = _mm_loadu_si128(lanes + 2), d = _mm_loadu_si128(lanes + 3);
    _mm_stream_si128(line, a);
    _mm_stream_si128(line + 1, b);
    _mm_stream_si128(line + 2, c);
    _mm_stream_si128(line + 3, d);
  }
  std::memcpy(target + at, source + at, bytes - at);
  _mm_sfence();  // before anybody is told that the bytes are there
}
#else
void copy_streaming(void* to, const void* from, size_t bytes) { std::memcpy(to, from, bytes); }
#endif

}  // namespace headrace
