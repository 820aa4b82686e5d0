#include "memory.h"

#include <cstdlib>
#include <cstring>
#include <mutex>

#if defined(__unix__) || defined(__APPLE__)
#include <sys/mman.h>
#endif

namespace headrace {
namespace {

#if defined(__unix__) || defined(__APPLE__)

constexpr size_t kLargePage = size_t{1} << 21;
constexpr size_t kSharedBytes = size_t{64} << 20;  // of which what nobody touches costs nothing

std::shared_ptr<std::byte> map(size_t bytes) {
  void* data = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (data == MAP_FAILED) fail("cannot allocate ", bytes, " bytes");
#ifdef MADV_HUGEPAGE
  if (bytes >= kLargePage) madvise(data, bytes, MADV_HUGEPAGE);  // a refusal only costs speed
#endif
  return {static_cast<std::byte*>(data), [bytes](std::byte* pages) { munmap(pages, bytes); }};
}

#else

constexpr size_t kSharedBytes = 0;

std::shared_ptr<std::byte> map(size_t bytes) {
  auto* data = static_cast<std::byte*>(std::aligned_alloc(4096, (bytes + 4095) / 4096 * 4096));
  if (!data) fail("cannot allocate ", bytes, " bytes");
  std::memset(data, 0, bytes);
  return {data, [](std::byte* pages) { std::free(pages); }};
}

#endif

}  // namespace

Pages::Pages(size_t bytes) : bytes_(bytes) {
  if (bytes > 0) data_ = map(bytes);
}

#if defined(__unix__) || defined(__APPLE__)

Pages::Pages(size_t bytes, int fd, size_t offset) : bytes_(bytes) {
  void* data = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, static_cast<off_t>(offset));
  if (data == MAP_FAILED) fail("cannot map ", bytes, " bytes of shared memory");
  data_ = {static_cast<std::byte*>(data), [bytes](std::byte* pages) { munmap(pages, bytes); }};
}

#else

Pages::Pages(size_t, int, size_t) { fail("this system has no shared memory"); }

#endif

void Pages::touch([[maybe_unused]] size_t offset, [[maybe_unused]] size_t bytes) const {
#ifdef MADV_POPULATE_WRITE
  madvise(data() + offset, bytes, MADV_POPULATE_WRITE);  // a refusal only costs time later
#endif
}

Pages Pages::beside_others(size_t bytes) {
  static std::mutex mutex;
  static std::weak_ptr<std::byte> shared;  // those that were given out keep it
  static size_t used = 0;
  constexpr size_t kLine = 64;
  if (bytes == 0 || bytes > kSharedBytes / 4) return Pages(bytes);
  const std::lock_guard lock(mutex);
  std::shared_ptr<std::byte> all = shared.lock();
  if (!all || used + bytes > kSharedBytes) {
    shared = all = map(kSharedBytes);
    used = 0;
  }
  Pages pages;
  pages.data_ = {all, all.get() + used};
  pages.bytes_ = bytes;
  used += (bytes + kLine - 1) / kLine * kLine;
  return pages;
}

}  // namespace headrace
