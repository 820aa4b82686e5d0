// What Python sees of memory, beside what is computed in it.
#pragma once

#include <nanobind/nanobind.h>

#include <cstddef>

namespace headrace {

// A contiguous byte buffer, held for the length of a call.
class Bytes {
 public:
  explicit Bytes(nanobind::handle source, int flags = PyBUF_SIMPLE) {
    if (PyObject_GetBuffer(source.ptr(), &view_, flags) != 0) nanobind::raise_python_error();
  }
  ~Bytes() { PyBuffer_Release(&view_); }
  Bytes(const Bytes&) = delete;
  Bytes& operator=(const Bytes&) = delete;
  const std::byte* data() const { return static_cast<const std::byte*>(view_.buf); }
  std::byte* writable() const { return static_cast<std::byte*>(view_.buf); }  // with PyBUF_WRITABLE
  size_t size() const { return static_cast<size_t>(view_.len); }

 private:
  Py_buffer view_;
};

// Copies of blocks, their names and their authentication, and large pages.
void add_memory(nanobind::module_& m);

}  // namespace headrace
