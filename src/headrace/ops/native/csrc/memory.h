// Zeroed memory for weights, activations and KV blocks.
#pragma once

#include <cstddef>
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
  ~Pages();
  Pages(Pages&& other) noexcept : data_(std::exchange(other.data_, nullptr)), bytes_(std::exchange(other.bytes_, 0)) {}
  Pages& operator=(Pages&& other) noexcept {
    std::swap(data_, other.data_);
    std::swap(bytes_, other.bytes_);
    return *this;
  }

  std::byte* data() const { return data_; }
  size_t bytes() const { return bytes_; }

 private:
  std::byte* data_ = nullptr;
  size_t bytes_ = 0;
};

}  // namespace headrace
