#include "arenas.h"

#include <Python.h>

#include <sys/mman.h>
#include <unistd.h>

#ifdef __GLIBC__
#include <malloc.h>
#endif

#include <algorithm>
#include <climits>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <vector>

#include "memory.h"

namespace headrace {
namespace {

constexpr size_t kStretchBytes = size_t{64} << 20;

// Objects that many tables name lie all over the memory of a process: in pages of 4 KiB, most looks at one cost a walk
// through the page tables first. Every call is made under the interpreter's lock.
class Arenas {
 public:
  explicit Arenas(const PyObjectArenaAllocator& before) : before_(before) {}

  void* take(size_t bytes) {
    const auto same = std::ranges::find(free_, bytes, &Arena::bytes);
    if (same != free_.end()) {
      std::byte* data = same->data;
      free_.erase(same);
      return data;
    }
    if (left_ < bytes && !stretch(bytes)) return before_.alloc(before_.ctx, bytes);
    std::byte* data = stretches_.back().data() + kStretchBytes - left_;
    left_ -= bytes;
    return data;
  }

  // What is given back is kept for the next arena; what came from elsewhere goes back there.
  void give_back(void* arena, size_t bytes) {
    auto* data = static_cast<std::byte*>(arena);
    const auto holds = [data](const Pages& pages) { return data >= pages.data() && data < pages.data() + pages.bytes(); };
    if (std::ranges::any_of(stretches_, holds))
      free_.push_back({data, bytes});
    else
      before_.free(before_.ctx, arena, bytes);
  }

 private:
  struct Arena {
    std::byte* data;
    size_t bytes;
  };

  bool stretch(size_t bytes) {
    if (bytes > kStretchBytes) return false;
    try {
      stretches_.emplace_back(kStretchBytes);
    } catch (const std::exception&) {
      return false;  // Python says what no memory means
    }
    left_ = kStretchBytes;
    return true;
  }

  PyObjectArenaAllocator before_;
  std::vector<Pages> stretches_;
  size_t left_ = 0;  // of the last one
  std::vector<Arena> free_;
};

#ifdef __GLIBC__
constexpr size_t kHugePage = size_t{2} << 20;
constexpr int kLargestBlock = 32 << 20;  // that the C library takes from its heap, whatever it is told
constexpr size_t kPiece = (size_t{32} << 20) - (size_t{64} << 10);
constexpr int kNumPieces = 32;
#endif

}  // namespace

// Pages are advised of only where they exist, so the heap is let grow before it is needed. What nobody touches takes no
// memory.
bool large_heap() {
#ifdef __GLIBC__
  static bool is_done = false;
  if (is_done) return false;
  is_done = true;
  // Nor is it ever given back, or is anything that is not very large taken from elsewhere.
  if (mallopt(M_MMAP_THRESHOLD, kLargestBlock) != 1 || mallopt(M_TRIM_THRESHOLD, INT_MAX) != 1) return false;
  const auto begin = (reinterpret_cast<uintptr_t>(sbrk(0)) + kHugePage - 1) / kHugePage * kHugePage;
  std::vector<void*> pieces;
  pieces.reserve(kNumPieces);
  for (void* piece; pieces.size() < kNumPieces && (piece = std::malloc(kPiece)) != nullptr;) pieces.push_back(piece);
  const auto end = reinterpret_cast<uintptr_t>(sbrk(0)) / kHugePage * kHugePage;
  const bool is_new = begin < end && madvise(reinterpret_cast<void*>(begin), end - begin, MADV_HUGEPAGE) == 0;
  for (; !pieces.empty(); pieces.pop_back()) std::free(pieces.back());
  return is_new;
#else
  return false;
#endif
}

bool large_arenas() {
  static Arenas* arenas = nullptr;  // as long as Python lives, which frees objects until its end
  if (arenas != nullptr) return false;
  PyObjectArenaAllocator before;
  PyObject_GetArenaAllocator(&before);
  arenas = new Arenas(before);
  PyObjectArenaAllocator ours{arenas, [](void* self, size_t bytes) { return static_cast<Arenas*>(self)->take(bytes); },
                              [](void* self, void* arena, size_t bytes) {
                                static_cast<Arenas*>(self)->give_back(arena, bytes);
                              }};
  PyObject_SetArenaAllocator(&ours);
  return true;
}

}  // namespace headrace
