#include "module_memory.h"

#include <cerrno>
#include <cstdint>
#include <cstring>
#include <stdexcept>
#include <vector>

#include "arenas.h"
#include "ghash.h"
#include "memory.h"
#include "names.h"
#include "receive.h"
#include "stream.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace headrace {
namespace {

void copy_range(nb::handle to, size_t to_offset, nb::handle from, size_t from_offset, size_t bytes) {
  const Bytes target(to, PyBUF_WRITABLE), source(from);
  const auto check = [bytes](const Bytes& buffer, size_t offset) {
    if (offset > buffer.size() || bytes > buffer.size() - offset)
      fail("a copy of ", bytes, " bytes at ", offset, " does not fit into ", buffer.size(), " bytes");
  };
  check(target, to_offset);
  check(source, from_offset);
  const nb::gil_scoped_release released;
  copy_streaming(target.writable() + to_offset, source.data() + from_offset, bytes);
}

nb::bytes bytes_of(const GhashBlock& block) { return nb::bytes(block.data(), block.size()); }

void make_ghash(Ghash* self, nb::handle subkey) {
  const Bytes bytes(subkey);
  GhashBlock block;
  if (bytes.size() != block.size()) fail("a subkey has ", block.size(), " bytes, got ", bytes.size());
  std::memcpy(block.data(), bytes.data(), block.size());
  new (self) Ghash(block);
}

nb::bytes ghash_of(const Ghash& ghash, nb::handle data) {
  const Bytes bytes(data);
  GhashBlock sum{};
  {
    const nb::gil_scoped_release released;
    ghash.add(sum, bytes.data(), bytes.size());
    ghash.finish(sum, bytes.size());
  }
  return bytes_of(sum);
}

nb::bytes receive_into(const Ghash& ghash, int fd, nb::handle into, int patience_ms) {
  const Bytes target(into, PyBUF_WRITABLE);
  GhashBlock sum;
  Arrival arrival;
  int error;
  {
    const nb::gil_scoped_release released;
    arrival = receive(fd, target.writable(), target.size(), patience_ms, ghash, sum);
    error = errno;
  }
  switch (arrival) {
    case Arrival::whole:
      return bytes_of(sum);
    case Arrival::ended:
      PyErr_SetNone(PyExc_EOFError);
      break;
    case Arrival::late:
      PyErr_SetString(PyExc_TimeoutError, "timed out");
      break;
    case Arrival::broken:
      errno = error;
      PyErr_SetFromErrno(PyExc_OSError);
  }
  nb::raise_python_error();
}

// Of the whole blocks of `tokens` from the given token on, and the words of these blocks.
nb::tuple block_names(nb::bytes parent, nb::handle tokens, size_t first, size_t block_size) {
  BlockName name;
  if (parent.size() != name.size()) fail("a block's name has ", name.size(), " bytes, got ", parent.size());
  if (block_size == 0) fail("a block has at least one token");
  std::memcpy(name.data(), parent.c_str(), name.size());
  const nb::object items = nb::steal(PySequence_Fast(tokens.ptr(), "tokens are a sequence"));
  if (!items.is_valid()) nb::raise_python_error();
  const auto num_items = static_cast<size_t>(PySequence_Fast_GET_SIZE(items.ptr()));
  std::vector<uint32_t> words(num_items > first ? (num_items - first) / block_size * block_size : 0);
  for (size_t index = 0; index < words.size(); ++index) {
    const long token = PyLong_AsLong(PySequence_Fast_GET_ITEM(items.ptr(), static_cast<Py_ssize_t>(first + index)));
    if (token == -1 && PyErr_Occurred()) nb::raise_python_error();
    if (token < 0 || token > UINT32_MAX) throw std::overflow_error("a token is a number of 32 bits");
    words[index] = static_cast<uint32_t>(token);
  }
  nb::list names;
  for (const BlockName& each : name_blocks(name, words, block_size)) names.append(nb::bytes(each.data(), each.size()));
  return nb::make_tuple(names, nb::bytes(words.data(), words.size() * sizeof(uint32_t)));
}

}  // namespace

void add_memory(nb::module_& m) {
  m.def("large_arenas", &large_arenas);
  m.def("large_heap", &large_heap);
  m.def("can_name_blocks", &can_name_blocks);
  m.def("block_names", &block_names, "parent"_a, "tokens"_a, "first"_a, "block_size"_a);
  m.def("copy_range", &copy_range, "to"_a, "to_offset"_a, "source"_a, "from_offset"_a, "num_bytes"_a);
  nb::class_<Ghash>(m, "Ghash")
      .def_static("can_run", &Ghash::can_run)
      .def("__init__", &make_ghash, "subkey"_a)
      .def("of", &ghash_of, "data"_a)
      .def("receive", &receive_into, "fd"_a, "into"_a, "patience_ms"_a);
}

}  // namespace headrace
