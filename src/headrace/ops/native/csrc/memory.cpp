#include "memory.h"

#include <cstdlib>
#include <cstring>

#if defined(__unix__) || defined(__APPLE__)
#include <sys/mman.h>
#endif

namespace headrace {

#if defined(__unix__) || defined(__APPLE__)

Pages::Pages(size_t bytes) : bytes_(bytes) {
  if (bytes == 0) return;
  void* data = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (data == MAP_FAILED) fail("cannot allocate ", bytes, " bytes");
  data_ = static_cast<std::byte*>(data);
#ifdef MADV_HUGEPAGE
  if (bytes >= size_t{1} << 21) madvise(data, bytes, MADV_HUGEPAGE);  // a refusal only costs speed
#endif
}

Pages::Pages(size_t bytes, int fd, size_t offset) : bytes_(bytes) {
  void* data = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, static_cast<off_t>(offset));
  if (data == MAP_FAILED) fail("cannot map ", bytes, " bytes of shared memory");
  data_ = static_cast<std::byte*>(data);
}

Pages::~Pages() {
  if (data_) munmap(data_, bytes_);
}

#else

Pages::Pages(size_t bytes) : bytes_(bytes) {
  if (bytes == 0) return;
  data_ = static_cast<std::byte*>(std::aligned_alloc(4096, (bytes + 4095) / 4096 * 4096));
  if (!data_) fail("cannot allocate ", bytes, " bytes");
  std::memset(data_, 0, bytes);
}

Pages::Pages(size_t, int, size_t) { fail("this system has no shared memory"); }

Pages::~Pages() { std::free(data_); }

#endif

}  // namespace headrace
