// The Python face of the native backend. It checks what it is given and translates; the work is elsewhere.

#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cstring>
#include <memory>
#include <optional>
#include <sstream>

#include "groups.h"
#include "isa.h"
#include "machine_limits.h"
#include "module_memory.h"
#include "replicas.h"
#include "program.h"
#include "sampler.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace headrace {
namespace {

// Every int of a sequence, straight through the C API: a batch of long block tables has thousands.
template <class Int>
void append_ints(nb::handle sequence, std::vector<Int>& out) {
  const nb::object items = nb::steal(PySequence_Fast(sequence.ptr(), "expected a sequence of integers"));
  if (!items.is_valid()) nb::raise_python_error();
  const Py_ssize_t count = PySequence_Fast_GET_SIZE(items.ptr());
  PyObject** values = PySequence_Fast_ITEMS(items.ptr());
  out.reserve(out.size() + static_cast<size_t>(count));
  for (Py_ssize_t i = 0; i < count; ++i) {
    const long long value = PyLong_AsLongLong(values[i]);
    if (value == -1 && PyErr_Occurred()) nb::raise_python_error();
    if (value < INT32_MIN || value > INT32_MAX) fail("integer out of range: ", value);
    out.push_back(static_cast<Int>(value));
  }
}

std::vector<int> ints(nb::handle sequence) {
  std::vector<int> out;
  append_ints(sequence, out);
  return out;
}

Step make_step(nb::handle tokens, nb::handle token_starts, nb::handle positions, nb::handle block_tables,
               nb::handle logit_rows) {
  Step step;
  append_ints(tokens, step.tokens);
  append_ints(token_starts, step.token_starts);
  append_ints(positions, step.positions);
  append_ints(logit_rows, step.logit_rows);
  step.block_starts.push_back(0);
  for (nb::handle table : nb::borrow<nb::sequence>(block_tables)) {
    append_ints(table, step.blocks);
    step.block_starts.push_back(static_cast<int>(step.blocks.size()));
  }
  return step;
}

void check_ids(const std::vector<int>& ids, int vocab_size, const char* what) {
  for (int id : ids)
    if (id < 0 || id >= vocab_size) fail(what, " must be in 0..", vocab_size - 1, ", got ", id);
}

void check_bf16_scales(const GroupedMatrix& matrix) {
  for (size_t i = 0; i < matrix.scale_bytes(); i += 2) {
    uint16_t bits;
    std::memcpy(&bits, matrix.scales + i, sizeof bits);
    const float value = std::bit_cast<float>(static_cast<uint32_t>(bits) << 16);
    if (half_of_bf16(bits) == kNoHalf)
      fail("scale ", i / 2, " has no float16 of the same value: ", (std::ostringstream() << value).str(),
           " (those from 2^-17 to 65280 have one)");
  }
}

// Rows of blocks of `type`, as bytes, from the tensors of a matrix in groups.
nb::object grouped_blocks(ThreadPool& pool, const std::string& type, GroupedMatrix matrix, nb::handle weights,
                          nb::handle zeros, nb::handle scales, const std::vector<int32_t>& order) {
  const WeightType kind = weight_type(type);
  const int depth = record_inputs(kind);
  if (!(matrix.bits == 4 && has_offset(kind)) && !(matrix.bits == 8 && kind == WeightType::q8_0 && !matrix.is_awq))
    fail("no ", matrix.bits, " bits in blocks of ", type);
  if (matrix.rows < 1 || matrix.rows % (32 / matrix.bits) != 0 || matrix.cols < 1 || matrix.cols % depth != 0 ||
      matrix.group < 1 || (matrix.group < matrix.cols && matrix.group % depth != 0))
    fail("no blocks of ", depth, " in ", matrix.rows, " x ", matrix.cols, " in groups of ", matrix.group);
  const Bytes weight_bytes(weights), zero_bytes(zeros), scale_bytes(scales);
  if (weight_bytes.size() != matrix.weight_bytes() || zero_bytes.size() != matrix.zero_bytes() ||
      scale_bytes.size() != matrix.scale_bytes())
    fail("tensors of ", matrix.rows, " x ", matrix.cols, " in groups of ", matrix.group, " have other sizes");
  matrix.weights = weight_bytes.data();
  matrix.zeros = zero_bytes.data();
  matrix.scales = scale_bytes.data();
  if (matrix.has_bf16_scales) check_bf16_scales(matrix);
  if (!order.empty()) {
    if (matrix.is_awq) fail("AWQ has no order of inputs");
    check_order(order, matrix.cols);
    matrix.order = order.data();
  }
  const size_t num_blocks = static_cast<size_t>(matrix.rows) * static_cast<size_t>(matrix.cols / depth);
  nb::object rows = nb::steal(
      PyBytes_FromStringAndSize(nullptr, static_cast<Py_ssize_t>(num_blocks * block_bytes(kind))));
  if (!rows.is_valid()) nb::raise_python_error();
  auto* out = reinterpret_cast<std::byte*>(PyBytes_AS_STRING(rows.ptr()));
  const nb::gil_scoped_release release;
  write_blocks(pool, matrix, kind, out);
  return rows;
}

// The fields of SamplingParams and SampleSpec in the order backend.py lists them.
Choice make_choice(nb::tuple t, int vocab_size) {
  if (t.size() != 14) fail("a choice has 14 fields, got ", t.size());
  Choice c{
      .temperature = nb::cast<double>(t[0]),
      .top_p = nb::cast<double>(t[1]),
      .min_p = nb::cast<double>(t[3]),
      .top_k = nb::cast<int>(t[2]),
      .seed = nb::cast<uint64_t>(t[4]),
      .choice = nb::cast<uint32_t>(t[5]),
      .position = nb::cast<uint32_t>(t[6]),
      .presence = nb::cast<double>(t[7]),
      .frequency = nb::cast<double>(t[8]),
      .repetition = nb::cast<double>(t[9]),
      .logit_bias = {},
      .banned = ints(t[11]),
      .prompt = ints(t[12]),
      .output = ints(t[13]),
  };
  std::vector<int> biased;
  for (nb::handle pair : nb::borrow<nb::sequence>(t[10])) {
    c.logit_bias.emplace_back(nb::cast<int>(pair[0]), nb::cast<double>(pair[1]));
    biased.push_back(c.logit_bias.back().first);
  }
  check_ids(biased, vocab_size, "logit_bias id");
  check_ids(c.banned, vocab_size, "banned id");
  check_ids(c.prompt, vocab_size, "prompt token");
  check_ids(c.output, vocab_size, "output token");
  if (!(c.temperature >= 0.0)) fail("temperature must not be negative, got ", c.temperature);
  if (!(c.repetition > 0.0)) fail("repetition_penalty must be positive, got ", c.repetition);
  return c;
}

RowRequest make_request(nb::handle request, int vocab_size) {
  RowRequest row;
  try {
    if (!request[0].is_none()) row.choice = make_choice(nb::cast<nb::tuple>(request[0]), vocab_size);
    if (!request[1].is_none()) row.target = nb::cast<int>(request[1]);
    if (!request[2].is_none()) row.num_top = std::max(0, nb::cast<int>(request[2]));
  } catch (const nb::cast_error&) {
    fail("a row request has a value out of range: ", nb::repr(request).c_str());
  }
  if (!row.choice) check_ids({row.target}, vocab_size, "target");
  return row;
}

nb::list finish_rows(const Program& program, nb::sequence requests) {
  const int vocab_size = program.vocab_size();
  std::vector<RowRequest> rows;
  for (nb::handle request : requests) rows.push_back(make_request(request, vocab_size));
  const int count = static_cast<int>(rows.size());
  if (count != program.num_logit_rows()) fail("got ", count, " requests for ", program.num_logit_rows(), " logits rows");
  std::vector<RowResult> results(rows.size());
  {
    const nb::gil_scoped_release release;
    program.pool().run(count, [&](int i) {
      const auto index = static_cast<size_t>(i);
      results[index] = finish_row(program.kernels(), program.logits_row(i), rows[index]);
    });
  }
  nb::list out;
  for (int i = 0; i < count; ++i) {
    const RowResult& result = results[static_cast<size_t>(i)];
    if (!result.fault.empty()) {
      out.append(nb::str(result.fault.c_str()));
      continue;
    }
    nb::list top;
    for (const auto& [id, logprob] : result.top) top.append(nb::make_tuple(id, logprob));
    out.append(nb::make_tuple(result.token, result.logprob, result.rank, nb::tuple(top)));
  }
  return out;
}

nb::list logits(const Program& program) {
  nb::list rows;
  for (int r = 0; r < program.num_logit_rows(); ++r) {
    const float* values = program.logits_row(r).values;
    nb::list row;
    for (int i = 0; i < program.vocab_size(); ++i) row.append(static_cast<double>(values[i]));
    rows.append(std::move(row));
  }
  return rows;
}

void copy_blocks(Program& program, nb::sequence copies) {
  std::vector<std::array<int, 3>> triples;
  for (nb::handle copy : copies)
    triples.push_back({nb::cast<int>(copy[0]), nb::cast<int>(copy[1]), nb::cast<int>(copy[2])});
  const nb::gil_scoped_release release;
  program.copy_blocks(triples);
}

std::vector<const Weight*> weights_of(const nb::tuple& items) {
  std::vector<const Weight*> out;
  for (nb::handle item : items) out.push_back(item.is_none() ? nullptr : nb::cast<const Weight*>(item));
  return out;
}

std::vector<uint32_t> philox_words(const std::vector<uint32_t>& counter, const std::vector<uint32_t>& key) {
  if (counter.size() != 4 || key.size() != 2) fail("philox4x32 takes a counter of 4 words and a key of 2");
  std::vector<uint32_t> words(4);
  philox4x32(counter.data(), key.data(), words.data());
  return words;
}

}  // namespace
}  // namespace headrace

NB_MODULE(_native, m) {
  using namespace headrace;
  nb::exception<Fault>(m, "Fault");

  m.def("usable_isas", usable_names);
  m.def("amx_refusal", amx_refusal);  // why AMX is not among them, though the CPU has it
  m.def("fastest_isa", [] { return std::string(find_kernels("auto").name); });
  m.def("bf16_products", [](const std::string& isa) { return find_kernels(isa).bf16_products; }, "isa"_a);
  m.def("read_limit", &read_limit, nb::call_guard<nb::gil_scoped_release>(), "pool"_a, "isa"_a, "num_bytes"_a,
        "seconds"_a);
  m.def("product_limit", &product_limit, nb::call_guard<nb::gil_scoped_release>(), "pool"_a, "isa"_a, "kind"_a,
        "seconds"_a);
  add_memory(m);
  add_replicas(m);
  m.def("philox", &philox, "seed"_a, "choice"_a, "position"_a);
  m.def("philox4x32", &philox_words, "counter"_a, "key"_a);

  nb::class_<ThreadPool>(m, "Pool").def(nb::init<int>(), "threads"_a).def_prop_ro("threads", &ThreadPool::threads);

  m.def(
      "grouped_blocks",
      [](ThreadPool& pool, const std::string& type, bool is_awq, int bits, int rows, int cols, int group,
         int zero_offset, nb::handle weights, nb::handle zeros, nb::handle scales, bool bf16_scales,
         nb::handle order) {
        const GroupedMatrix matrix{is_awq, bits, rows, cols, group, zero_offset, nullptr, nullptr, nullptr, bf16_scales,
                                   nullptr};
        return grouped_blocks(pool, type, matrix, weights, zeros, scales, ints(order));
      },
      "pool"_a, "type"_a, "is_awq"_a, "bits"_a, "rows"_a, "cols"_a, "group"_a, "zero_offset"_a, "weights"_a, "zeros"_a,
      "scales"_a, "bf16_scales"_a, "order"_a);

  nb::class_<Weight>(m, "Weight")
      .def(
          "__init__",
          [](Weight* self, ThreadPool& pool, const std::string& type, int rows, int cols, nb::handle data,
             nb::handle order) {
            const WeightType kind = weight_type(type);
            const Bytes bytes(data);
            std::vector<int32_t> places = ints(order);
            const nb::gil_scoped_release release;
            new (self) Weight(pool, kind, rows, cols, bytes.data(), bytes.size(), std::move(places));
          },
          "pool"_a, "type"_a, "rows"_a, "cols"_a, "data"_a, "order"_a = nb::make_tuple())
      .def_prop_ro("rows", &Weight::rows).def_prop_ro("cols", &Weight::cols)
      .def_prop_ro("bytes", &Weight::bytes);

  // The program keeps its pool and its weights alive: keep_alive<1, n> ties argument n to it.
  nb::class_<Program>(m, "Program")
      .def(
          "__init__",
          [](Program* self, ThreadPool& pool, const std::string& isa, bool bf16, bool int8, bool int12, bool attention, int num_layers,
             int num_kv_heads, int head_dim, int num_blocks, const std::string& kv, int max_tokens, int kv_fd,
             size_t kv_offset) {
            const KvShape shape{num_layers, num_kv_heads, head_dim, num_blocks, kv_type(kv)};
            new (self) Program(pool, find_kernels(isa), {bf16, int8, int12, attention}, shape, max_tokens, {kv_fd, kv_offset});
          },
          nb::keep_alive<1, 2>(), "pool"_a, "isa"_a, "bf16"_a, "int8"_a, "int12"_a, "attention"_a, "num_layers"_a, "num_kv_heads"_a,
          "head_dim"_a, "num_blocks"_a, "kv"_a, "max_tokens"_a, "kv_fd"_a = -1, "kv_offset"_a = 0)
      .def("embed", &Program::embed, nb::keep_alive<1, 2>(), "table"_a)
      .def("rms_norm", &Program::rms_norm, "x"_a, "weight"_a, "eps"_a)
      .def(
          "linear",
          [](Program& self, int x, const nb::tuple& weights, const nb::tuple& biases) {
            return self.linear(x, weights_of(weights), weights_of(biases));
          },
          nb::keep_alive<1, 3>(), "x"_a, "weights"_a, "biases"_a)
      .def("add", &Program::add, "x"_a, "y"_a)
      .def("silu_mul", &Program::silu_mul, "gate_up"_a)
      .def(
          "attention",
          [](Program& self, int qkv, int layer, int num_heads, int num_kv_heads, int head_dim, float scale,
             const std::vector<double>& inv_freq, bool interleaved) {
            return self.attention(qkv, layer, {num_heads, num_kv_heads, head_dim, scale}, inv_freq, interleaved);
          },
          "qkv"_a, "layer"_a, "num_heads"_a, "num_kv_heads"_a, "head_dim"_a, "scale"_a, "inv_freq"_a, "interleaved"_a)
      .def("select_logit_rows", &Program::select_logit_rows, "x"_a)
      .def("seal", &Program::seal, "logits"_a)
      .def(
          "run",
          [](Program& self, nb::handle tokens, nb::handle token_starts, nb::handle positions, nb::handle block_tables,
             nb::handle logit_rows) {
            Step step = make_step(tokens, token_starts, positions, block_tables, logit_rows);
            const nb::gil_scoped_release release;
            self.run(std::move(step));
          },
          "tokens"_a, "token_starts"_a, "positions"_a, "block_tables"_a, "logit_rows"_a)
      .def("finish_rows", &finish_rows, "requests"_a)
      .def("logits", &logits)
      .def("copy_blocks", &copy_blocks, "copies"_a)
      .def("ready_blocks", &Program::ready_blocks, nb::call_guard<nb::gil_scoped_release>())
      .def_prop_ro("activation_bytes", &Program::activation_bytes)
      .def_prop_ro("kv_bytes", &Program::kv_bytes);
}
