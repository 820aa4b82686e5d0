#include "arenas.h"

#include <Python.h>

#include <algorithm>
#include <cstddef>
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

}  // namespace

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
