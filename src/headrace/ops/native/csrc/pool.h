// Threads that share the chunks of one job at a time.
//
// The caller publishes a job of `chunks` independent pieces and works on it too. Pieces are claimed one by one, so a
// thread that lost its core delays a job by the piece it holds at most, and one that sleeps delays nothing.
#pragma once

#include <atomic>
#include <cstdint>
#include <mutex>
#include <thread>
#include <type_traits>
#include <vector>

namespace headrace {

class ThreadPool {
 public:
  explicit ThreadPool(int threads);  // including the caller
  ~ThreadPool();
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  int threads() const { return static_cast<int>(workers_.size()) + 1; }

  // Calls work(chunk) once for each chunk in [0, chunks) and returns when all are done. `work` must not throw.
  template <class Work>
  void run(int chunks, Work&& work) {
    if (chunks <= 1 || workers_.empty()) {
      for (int i = 0; i < chunks; ++i) work(i);
      return;
    }
    using Plain = std::remove_reference_t<Work>;
    share(chunks, [](const void* context, int chunk) { (*static_cast<Plain*>(const_cast<void*>(context)))(chunk); },
          &work);
  }

 private:
  using Call = void (*)(const void* context, int chunk);

  void share(int chunks, Call call, const void* context);
  void work_on(uint64_t ticket);
  bool has_work(uint64_t ticket) const;
  void serve();

  // epoch << 32 | chunks << 16 | next chunk, in one word: a thread that wakes late cannot claim from a job that is over.
  std::atomic<uint64_t> ticket_{0};
  std::atomic<uint32_t> wake_{0};
  std::atomic<uint32_t> done_{0};
  std::atomic<bool> stop_{false};
  Call call_ = nullptr;
  const void* context_ = nullptr;
  std::mutex caller_;
  std::vector<std::thread> workers_;
};

}  // namespace headrace
