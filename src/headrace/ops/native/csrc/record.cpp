// Program: recording, fusing and laying out.

#include <algorithm>
#include <array>

#include "program.h"

namespace headrace {
namespace {

size_t padded(int n) { return static_cast<size_t>((n + kLanes - 1) / kLanes * kLanes); }

}  // namespace

KvType kv_type(const std::string& name) {
  if (name == "bf16") return KvType::bf16;
  if (name == "int8") return KvType::int8;
  if (name == "fp8") return KvType::fp8;
  fail("keys and values are stored as bf16, int8 or fp8, not as ", name);
}

Program::Program(ThreadPool& pool, const Kernels& kernels, Rounding rounding, KvShape kv, int max_tokens, KvFile file)
    : pool_(pool), kernels_(kernels), rounding_(rounding), kv_(kv), max_tokens_(max_tokens) {
  if (max_tokens < 1) fail("max_tokens must be at least 1, got ", max_tokens);
  if (kv.num_layers < 1 || kv.num_kv_heads < 1 || kv.num_blocks < 1)
    fail("the KV pool needs layers, heads and blocks, got ", kv.num_layers, ", ", kv.num_kv_heads, ", ", kv.num_blocks);
  if (kv.head_dim < 2 || kv.head_dim > kMaxHeadDim || kv.head_dim % 2 != 0)
    fail("head_dim must be even and at most ", kMaxHeadDim, ", got ", kv.head_dim);
  const size_t bytes = kv.block_bytes() * static_cast<size_t>(kv.num_blocks);
  blocks_ = file.fd < 0 ? Pages(bytes) : Pages(bytes, file.fd, file.offset);
}

int Program::new_register(int width, bool logit_rows) {
  registers_.push_back({width, logit_rows});
  return static_cast<int>(registers_.size()) - 1;
}

const Program::Register& Program::at(int reg) const {
  if (reg < 0 || static_cast<size_t>(reg) >= registers_.size()) fail("no such register: ", reg);
  return registers_[static_cast<size_t>(reg)];
}

int Program::embed(const Weight& table) {
  if (!table.order().empty()) fail("a table has its columns in their own order");
  Op op{.kind = Kind::embed};
  op.weight = &table;
  op.out = new_register(table.cols(), false);
  ops_.push_back(std::move(op));
  return ops_.back().out;
}

int Program::rms_norm(int x, const Weight& weight, float eps) {
  const Register in = at(x);
  if (weight.rows() != 1 || weight.cols() != in.width)
    fail("rms_norm of ", in.width, " columns got a weight of ", weight.rows(), " x ", weight.cols());
  Op op{.kind = Kind::rms_norm};
  op.x = x;
  op.row = weight.first_row(kernels_);
  op.eps = eps;
  op.out = new_register(in.width, in.logit_rows);
  ops_.push_back(std::move(op));
  return ops_.back().out;
}

// The columns of `x` in the order in which a weight has its inputs.
int Program::reorder(int x, const Weight& weight) {
  if (weight.order().empty()) return x;
  const Register in = at(x);
  Op op{.kind = Kind::reorder};
  op.x = x;
  op.weight = &weight;
  op.out = new_register(in.width, in.logit_rows);
  ops_.push_back(std::move(op));
  return ops_.back().out;
}

std::vector<float> Program::bounds_of(const Weight& weight) const {
  std::vector<float> bounds(static_cast<size_t>(weight.num_panels() * kLanes));
  pool_.run(weight.num_panels(), [&](int panel) {
    kernels_.weight_bounds(weight.type(), weight.panel(panel), weight.cols(), bounds.data() + panel * kLanes);
  });
  return bounds;
}

// Weights with the same order of inputs are one operation; several write to one register.
int Program::linear(int x, const std::vector<const Weight*>& weights, const std::vector<const Weight*>& biases) {
  const Register in = at(x);
  if (weights.empty()) fail("linear needs a weight");
  if (!biases.empty() && biases.size() != weights.size())
    fail("linear got ", weights.size(), " weights and ", biases.size(), " biases");
  std::vector<Op> linears;
  int width = 0;
  for (size_t i = 0; i < weights.size(); ++i) {
    const Weight& weight = *weights[i];
    if (weight.cols() != in.width) fail("linear of ", in.width, " columns got a weight of ", weight.cols(), " inputs");
    Part part{&weight, width, {}, {}};
    if (in_int12(part)) part.bounds = bounds_of(weight);
    if (const Weight* bias = biases.empty() ? nullptr : biases[i]) {
      if (bias->rows() != 1 || bias->cols() != weight.rows())
        fail("a weight of ", weight.rows(), " outputs got a bias of ", bias->rows(), " x ", bias->cols());
      part.bias = bias->first_row(kernels_);
    }
    width += weight.rows();
    const auto same = [&](const Op& op) { return op.parts[0].weight->order() == weight.order(); };
    auto op = std::find_if(linears.begin(), linears.end(), same);
    if (op == linears.end()) {
      linears.push_back({.kind = Kind::linear});
      op = linears.end() - 1;
      op->x = reorder(x, weight);
    }
    op->parts.push_back(std::move(part));
  }
  const int out = new_register(width, in.logit_rows);
  for (Op& op : linears) {
    op.out = out;
    ops_.push_back(std::move(op));
  }
  return out;
}

int Program::add(int x, int y) {
  const Register a = at(x);
  const Register b = at(y);
  if (a.width != b.width || a.logit_rows != b.logit_rows)
    fail("add needs equal shapes, got ", a.width, " and ", b.width, " columns");
  Op op{.kind = Kind::add};
  op.x = x;
  op.y = y;
  op.out = new_register(a.width, a.logit_rows);
  ops_.push_back(std::move(op));
  return ops_.back().out;
}

int Program::silu_mul(int gate_up) {
  const Register in = at(gate_up);
  if (in.width % 2 != 0) fail("silu_mul needs an even number of columns, got ", in.width);
  Op op{.kind = Kind::silu_mul};
  op.x = gate_up;
  op.out = new_register(in.width / 2, in.logit_rows);
  ops_.push_back(std::move(op));
  return ops_.back().out;
}

int Program::attention(int qkv, int layer, AttentionShape shape, const std::vector<double>& inv_freq,
                       bool interleaved) {
  const Register in = at(qkv);
  if (in.logit_rows) fail("attention after select_logit_rows");
  if (layer < 0 || layer >= kv_.num_layers) fail("layer must be in 0..", kv_.num_layers - 1, ", got ", layer);
  if (shape.num_kv_heads != kv_.num_kv_heads || shape.head_dim != kv_.head_dim)
    fail("attention over ", shape.num_kv_heads, " KV heads of ", shape.head_dim, " but the KV pool has ",
         kv_.num_kv_heads, " of ", kv_.head_dim);
  if (shape.num_heads < 1 || shape.num_heads % shape.num_kv_heads != 0)
    fail("heads must be a multiple of KV heads, got ", shape.num_heads, " and ", shape.num_kv_heads);
  if (in.width != (shape.num_heads + 2 * shape.num_kv_heads) * shape.head_dim)
    fail("attention got rows of ", in.width, " columns for ", shape.num_heads, " + 2 * ", shape.num_kv_heads,
         " heads of ", shape.head_dim);
  if (static_cast<int>(inv_freq.size()) * 2 != shape.head_dim)
    fail("rope of head_dim ", shape.head_dim, " got ", inv_freq.size(), " frequencies");
  Op op{.kind = Kind::attention};
  op.x = qkv;
  op.layer = layer;
  op.shape = shape;
  const auto same = [&](const RopeTable& r) { return r.inv_freq == inv_freq && r.interleaved == interleaved; };
  const auto found = std::find_if(ropes_.begin(), ropes_.end(), same);
  op.rope = static_cast<int>(found - ropes_.begin());
  if (found == ropes_.end()) {
    const size_t floats = static_cast<size_t>(max_tokens_) * static_cast<size_t>(shape.head_dim);
    ropes_.push_back({inv_freq, interleaved, Pages(floats * sizeof(float))});
  }
  op.out = new_register(shape.num_heads * shape.head_dim, false);
  ops_.push_back(std::move(op));
  return ops_.back().out;
}

int Program::select_logit_rows(int x) {
  const Register in = at(x);
  if (in.logit_rows) fail("select_logit_rows twice");
  Op op{.kind = Kind::select};
  op.x = x;
  op.out = new_register(in.width, true);
  ops_.push_back(std::move(op));
  return ops_.back().out;
}

void Program::seal(int logits) {
  if (!at(logits).logit_rows) fail("the logits must come from select_logit_rows");
  logits_ = logits;
  select_early();
  fuse();
  link_linears();
  place_registers();
}

// Moves the selection of logit rows up to the last attention, past operations that treat each row by itself: what
// follows is then computed for the rows that somebody asked for.
void Program::select_early() {
  const auto row_wise = [](const Op& op) {
    return op.kind == Kind::rms_norm || op.kind == Kind::reorder || op.kind == Kind::linear || op.kind == Kind::add ||
           op.kind == Kind::silu_mul;
  };
  std::vector<bool> every_row(registers_.size(), false);  // whether somebody reads all rows of a register
  for (size_t i = ops_.size(); i-- > 0;) {
    const Op& op = ops_[i];
    const bool all = op.kind == Kind::attention || (row_wise(op) && every_row[static_cast<size_t>(op.out)]);
    for (int reg : {op.x, op.y})
      if (reg >= 0 && all) every_row[static_cast<size_t>(reg)] = true;
  }

  std::vector<int> selected(registers_.size(), -1);  // a register's logit rows
  std::vector<Op> ops;
  const auto select = [&](int reg) {
    if (reg < 0 || at(reg).logit_rows) return reg;
    int& rows = selected[static_cast<size_t>(reg)];
    if (rows >= 0) return rows;
    Op op{.kind = Kind::select};
    op.x = reg;
    rows = op.out = new_register(at(reg).width, true);
    ops.push_back(std::move(op));
    return rows;
  };
  for (Op& op : ops_) {
    if (op.kind == Kind::select) {
      selected[static_cast<size_t>(op.out)] = select(op.x);
      continue;
    }
    for (int* reg : {&op.x, &op.y})
      if (*reg >= 0 && selected[static_cast<size_t>(*reg)] >= 0 && at(*reg).logit_rows)
        *reg = selected[static_cast<size_t>(*reg)];
    if (row_wise(op) && !every_row[static_cast<size_t>(op.out)]) {
      op.x = select(op.x);
      op.y = select(op.y);
      registers_[static_cast<size_t>(op.out)].logit_rows = true;
    }
    ops.push_back(std::move(op));
  }
  if (const int rows = selected[static_cast<size_t>(logits_)]; rows >= 0) logits_ = rows;
  ops_ = std::move(ops);
}

// How many operations read each register.
std::vector<int> Program::count_readers() const {
  std::vector<int> readers(registers_.size(), 0);
  for (const Op& op : ops_)
    for (int reg : {op.x, op.y})
      if (reg >= 0) ++readers[static_cast<size_t>(reg)];
  return readers;
}

// Whether a linear operation can multiply its halves while it has them: they are whole panels, and all that the other one
// reads.
bool Program::can_gate(const Op& linear, const Op& silu_mul) const {
  int outputs = 0;
  for (const Part& part : linear.parts) {
    if (part.weight->rows() % kLanes != 0) return false;
    outputs += part.weight->rows();
  }
  return outputs == at(silu_mul.x).width && at(silu_mul.out).width % kLanes == 0;
}

// add followed by the norm of its sum becomes one walk over the row, and so does a linear operation for silu_mul alone.
void Program::fuse() {
  const std::vector<int> readers = count_readers();
  for (size_t i = 1; i < ops_.size(); ++i) {
    Op& op = ops_[i];
    Op& before = ops_[i - 1];
    if (before.out != op.x) continue;
    if (op.kind == Kind::rms_norm && before.kind == Kind::add) {
      op.kind = Kind::add_rms_norm;
      op.sum = before.out;
      op.x = before.x;
      op.y = before.y;
      before.dead = true;
    } else if (op.kind == Kind::silu_mul && before.kind == Kind::linear && can_gate(before, op) &&
               readers[static_cast<size_t>(op.x)] == 1 && op.x != logits_) {
      before.out = op.out;
      before.is_gated = true;
      op.dead = true;
    }
  }
  std::erase_if(ops_, [](const Op& op) { return op.dead; });
}

// Tells each linear operation which one comes next, and the operation before it to round what it has just computed.
void Program::link_linears() {
  const std::vector<int> readers = count_readers();
  int next = -1;
  for (size_t i = ops_.size(); i-- > 0;) {
    Op& op = ops_[i];
    if (op.kind != Kind::linear) continue;
    op.next = next;
    next = static_cast<int>(i);
    if (i == 0 || ops_[i - 1].out != op.x) continue;
    Op& before = ops_[i - 1];
    const bool has_whole_rows = before.kind != Kind::linear && before.kind != Kind::attention;
    const bool is_by_rows = before.is_gated || has_whole_rows;
    const auto rounds = [&](const Part& p) { return in_int8(p); };
    before.to_int8 = op.from_int8 = is_by_rows && std::any_of(op.parts.begin(), op.parts.end(), rounds);
    before.to_int12 = op.from_int12 =
        has_whole_rows && std::any_of(op.parts.begin(), op.parts.end(), [&](const Part& p) { return in_int12(p); });
    before.only_int8 = before.to_int8 && readers[static_cast<size_t>(op.x)] == 1 && op.x != logits_ &&
                       std::all_of(op.parts.begin(), op.parts.end(), rounds);
  }
  for (size_t i = 1; i < ops_.size(); ++i)
    if (ops_[i - 1].is_gated && ops_[i - 1].to_int8) ops_[i].quantised = 1 - ops_[i - 1].quantised;
}

// Buffers pass to the next register once their register has been read for the last time.
void Program::place_registers() {
  std::vector<size_t> last_use(registers_.size(), 0);
  for (size_t i = 0; i < ops_.size(); ++i) {
    for (int reg : {ops_[i].x, ops_[i].y, ops_[i].out, ops_[i].sum})
      if (reg >= 0) last_use[static_cast<size_t>(reg)] = i;
    if (ops_[i].kind == Kind::linear) widest_input_ = std::max(widest_input_, padded(at(ops_[i].x).width));
  }
  last_use[static_cast<size_t>(logits_)] = ops_.size();

  const auto rows = static_cast<size_t>(max_tokens_);
  std::vector<size_t> sizes;  // bytes
  std::vector<int> free;
  const auto take = [&](Register& reg) {
    const size_t bytes = rows * padded(reg.width) * sizeof(float);
    const auto smallest = std::find_if(free.begin(), free.end(), [&](int b) { return sizes[b] == bytes; });
    if (smallest != free.end()) {
      reg.buffer = *smallest;
      free.erase(smallest);
      return;
    }
    reg.buffer = static_cast<int>(sizes.size());
    sizes.push_back(bytes);
  };
  for (size_t i = 0; i < ops_.size(); ++i) {
    for (int reg : {ops_[i].out, ops_[i].sum})
      if (reg >= 0 && at(reg).buffer < 0) take(registers_[static_cast<size_t>(reg)]);
    std::vector<int> used{ops_[i].x, ops_[i].y, ops_[i].out, ops_[i].sum};
    std::sort(used.begin(), used.end());
    used.erase(std::unique(used.begin(), used.end()), used.end());
    for (int reg : used)
      if (reg >= 0 && last_use[static_cast<size_t>(reg)] == i) free.push_back(at(reg).buffer);
  }
  for (size_t bytes : sizes) buffers_.emplace_back(bytes);
  if (rounding_.bf16)
    rounded_ = Pages(rows * bf16_stride(static_cast<int>(widest_input_)) * static_cast<size_t>(kernels_.bf16_bytes));
  if (rounding_.int12) {
    const int width = static_cast<int>(widest_input_);
    whole_ = Pages(padded(max_tokens_) * std::max(int12_row_bytes(width, false), int12_row_bytes(width, true)));
    scales_ = Pages(padded(max_tokens_) * sizeof(float));
  }
  if (rounding_.int8)
    for (Pages& pages : quantised_) pages = Pages(padded(max_tokens_) * (widest_input_ / 32) * sizeof(QuantBlock));
}

size_t Program::activation_bytes() const {
  size_t bytes = rounded_.bytes() + whole_.bytes() + scales_.bytes();
  for (const Pages& pages : quantised_) bytes += pages.bytes();
  for (const Pages& pages : buffers_) bytes += pages.bytes();
  for (const RopeTable& rope : ropes_) bytes += rope.angles.bytes();
  return bytes;
}

}  // namespace headrace
