#include "pool.h"

#include <algorithm>
#include <chrono>

#include "memory.h"

#if defined(__x86_64__) || defined(_M_X64)
#include <immintrin.h>
#endif

namespace headrace {
namespace {

constexpr uint64_t kMaxChunks = 0xffff;
// Long enough to bridge the serial operations inside a step, short enough that an idle pool costs nothing.
constexpr std::chrono::microseconds kSpin{30};

inline void relax() {
#if defined(__x86_64__) || defined(_M_X64)
  _mm_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// Spins until `ready()` or until kSpin has passed; says which.
template <class Ready>
bool spin_until(Ready ready) {
  const auto end = std::chrono::steady_clock::now() + kSpin;
  do {
    for (int i = 0; i < 32; ++i) {
      if (ready()) return true;
      relax();
    }
  } while (std::chrono::steady_clock::now() < end);
  return ready();
}

uint32_t chunks_of(uint64_t ticket) { return static_cast<uint32_t>(ticket >> 16 & kMaxChunks); }
uint32_t next_of(uint64_t ticket) { return static_cast<uint32_t>(ticket & kMaxChunks); }

}  // namespace

ThreadPool::ThreadPool(int threads) {
  if (threads < 1 || threads > 1024) fail("threads must be in 1..1024, got ", threads);
  for (int i = 1; i < threads; ++i) workers_.emplace_back([this] { serve(); });
}

ThreadPool::~ThreadPool() {
  stop_.store(true);
  wake_.fetch_add(1);
  wake_.notify_all();
  for (std::thread& worker : workers_) worker.join();
}

bool ThreadPool::has_work(uint64_t ticket) const { return next_of(ticket) < chunks_of(ticket); }

void ThreadPool::share(int chunks, Call call, const void* context) {
  if (static_cast<uint64_t>(chunks) > kMaxChunks) {  // in order, each as large as a ticket can say
    const int groups = static_cast<int>((static_cast<uint64_t>(chunks) + kMaxChunks - 1) / kMaxChunks);
    run(chunks / groups + 1, [&](int group) {
      for (int i = group * groups; i < std::min(chunks, (group + 1) * groups); ++i) call(context, i);
    });
    return;
  }
  const std::lock_guard lock(caller_);
  call_ = call;
  context_ = context;
  done_.store(0, std::memory_order_relaxed);
  const uint64_t epoch = (ticket_.load(std::memory_order_relaxed) >> 32) + 1;
  const uint64_t ticket = epoch << 32 | static_cast<uint64_t>(chunks) << 16;
  ticket_.store(ticket);
  wake_.fetch_add(1);
  wake_.notify_all();
  work_on(ticket);
  const auto all = static_cast<uint32_t>(chunks);
  if (spin_until([&] { return done_.load(std::memory_order_acquire) == all; })) return;
  for (uint32_t done; (done = done_.load(std::memory_order_acquire)) != all;) done_.wait(done);
}

void ThreadPool::work_on(uint64_t ticket) {
  while (has_work(ticket)) {
    if (!ticket_.compare_exchange_weak(ticket, ticket + 1, std::memory_order_acq_rel)) continue;
    call_(context_, static_cast<int>(next_of(ticket)));
    const uint32_t chunks = chunks_of(ticket);
    if (done_.fetch_add(1, std::memory_order_acq_rel) + 1 == chunks) done_.notify_one();
    ticket = ticket_.load(std::memory_order_acquire);
  }
}

void ThreadPool::serve() {
  while (!stop_.load(std::memory_order_acquire)) {
    const auto ready = [&] { return has_work(ticket_.load(std::memory_order_acquire)) || stop_.load(); };
    if (!spin_until(ready)) {
      const uint32_t wake = wake_.load();
      if (!ready()) wake_.wait(wake);
    }
    work_on(ticket_.load(std::memory_order_acquire));
  }
}

}  // namespace headrace
