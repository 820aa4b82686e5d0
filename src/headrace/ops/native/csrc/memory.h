// Zeroed memory for weights, activations and KV blocks.
#pragma once

#include <cstddef>
#include <memory>
#include <stdexcept>
#include <string>
#include <utility>

namespace headrace {

// A fault that the caller must hear of; it becomes a DeviceError in Python.
class Fault : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

template <class... Parts>
[[noreturn]] void fail(const Parts&... parts) {
  std::string message;
  const auto append = [&message](const auto& part) {
    if constexpr (std::is_arithmetic_v<std::decay_t<decltype(part)>>)
      message += std::to_string(part);
    else
      message += part;
  };
  (append(parts), ...);
  throw Fault(message);
}

// Pages that cost nothing until they are touched, in large pages where the system has them.
class Pages {
 public:
  Pages() = default;
  explicit Pages(size_t bytes);
  Pages(size_t bytes, int fd, size_t offset);  // of a file, so that other processes see them too
  // One behind the other with what was asked for before, so that what is too small for a large page gets some, too. The
  // memory goes back when all that share it are gone.
  static Pages beside_others(size_t bytes);
  Pages(Pages&& other) noexcept : Pages() { *this = std::move(other); }
  Pages& operator=(Pages&& other) noexcept {
    std::swap(data_, other.data_);
    std::swap(bytes_, other.bytes_);
    return *this;
  }

  // Has the system give the pages of some bytes now, which it else does when each is first written to. Changes nothing.
  void touch(size_t offset, size_t bytes) const;

  std::byte* data() const { return data_.get(); }
  size_t bytes() const { return bytes_; }

 private:
  std::shared_ptr<std::byte> data_;
  size_t bytes_ = 0;
};

}  // namespace headrace
