#include "receive.h"

#include <algorithm>
#include <cerrno>
#include <chrono>

#if defined(__unix__) || defined(__APPLE__)
#include <poll.h>
#include <sys/socket.h>
#endif

namespace headrace {

#if defined(__unix__) || defined(__APPLE__)

namespace {

using Clock = std::chrono::steady_clock;

// What is received at a time and what the kernel had it in are both in a core's second cache. Whole blocks of GHASH.
constexpr size_t kPart = size_t{1} << 17;
// What wakes whoever sleeps: each wake-up costs both ends time, and while it sleeps the sender goes on.
constexpr size_t kWake = size_t{1} << 20;

// Whoever has too little is asleep until there is that much, or the end, or the kernel has no room for more.
void wake_at(int fd, size_t bytes) {
  const int least = static_cast<int>(bytes);
  setsockopt(fd, SOL_SOCKET, SO_RCVLOWAT, &least, sizeof least);  // a refusal only costs speed
}

// The next bytes of a message of which `wanted` are still to come.
Arrival fill(int fd, std::byte* into, size_t bytes, size_t wanted, Clock::time_point until) {
  while (bytes > 0) {
    const ssize_t count = recv(fd, into, bytes, MSG_DONTWAIT);
    if (count == 0) return Arrival::ended;
    if (count > 0) {
      into += count;
      bytes -= static_cast<size_t>(count);
      wanted -= static_cast<size_t>(count);
    } else if (errno == EAGAIN || errno == EWOULDBLOCK) {
      // Asked after each look, since fewer may have come than wake anybody.
      const auto left = std::chrono::ceil<std::chrono::milliseconds>(until - Clock::now()).count();
      if (left <= 0) return Arrival::late;
      wake_at(fd, std::min(wanted, kWake));
      pollfd waits{fd, POLLIN, 0};
      if (poll(&waits, 1, static_cast<int>(left)) < 0 && errno != EINTR) return Arrival::broken;
    } else if (errno != EINTR) {
      return Arrival::broken;
    }
  }
  return Arrival::whole;
}

}  // namespace

Arrival receive(int fd, std::byte* into, size_t bytes, int patience_ms, const Ghash& ghash, GhashBlock& sum) {
  sum = {};
  Arrival arrival = Arrival::whole;
  const auto until = Clock::now() + std::chrono::milliseconds(patience_ms);
  for (size_t at = 0; at < bytes && arrival == Arrival::whole; at += kPart) {
    const size_t part = std::min(kPart, bytes - at);
    arrival = fill(fd, into + at, part, bytes - at, until);
    if (arrival == Arrival::whole) ghash.add(sum, into + at, part);
  }
  const int error = errno;
  wake_at(fd, 1);
  errno = error;
  ghash.finish(sum, bytes);
  return arrival;
}

#else

Arrival receive(int, std::byte*, size_t, int, const Ghash&, GhashBlock&) {
  errno = ENOSYS;
  return Arrival::broken;
}

#endif

}  // namespace headrace
