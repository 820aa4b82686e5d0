// A model's forward pass, recorded once and run for any batch.
//
// Recording appends operations to a straight line and hands out registers. `seal` fuses what can be fused without
// changing a bit, finds how long each register lives, and lays the registers out in buffers that are used again.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "kernels.h"
#include "memory.h"
#include "pool.h"
#include "sampler.h"
#include "weight.h"

namespace headrace {

KvType kv_type(const std::string& name);  // throws Fault for a name that is none

struct KvShape {
  int num_layers, num_kv_heads, head_dim, num_blocks;
  KvType type;

  // A block holds keys and values layer by layer and KV head by KV head.
  size_t head_bytes() const { return 2 * kv_part_bytes(type, head_dim); }
  size_t layer_bytes() const { return head_bytes() * static_cast<size_t>(num_kv_heads); }
  size_t block_bytes() const { return layer_bytes() * static_cast<size_t>(num_layers); }
};

// Where the KV pool is, if not in memory of its own: in a file, from an offset on.
struct KvFile {
  int fd = -1;
  size_t offset = 0;
};

struct AttentionShape {
  int num_heads, num_kv_heads, head_dim;
  float scale;
};

struct RopeTable {
  std::vector<double> inv_freq;
  bool interleaved;
  Pages angles;  // [max_tokens][cos: head_dim / 2 | sin: head_dim / 2]
};

// One forward pass's batch; see StepBatch in ops/interface.py.
struct Step {
  std::vector<int> tokens;
  std::vector<int> token_starts;
  std::vector<int> positions;
  std::vector<int32_t> blocks;   // all block tables, one after another
  std::vector<int> block_starts;  // num_seqs + 1 offsets into blocks
  std::vector<int> logit_rows;

  // Filled by Program::run.
  std::vector<int> row_seq, row_position;

  int num_tokens() const { return static_cast<int>(tokens.size()); }
  int num_seqs() const { return static_cast<int>(positions.size()); }
};

// What inputs of products may be rounded to, where that is faster.
struct Rounding {
  bool bf16;  // for bf16 weights
  bool int8;  // for quantised weights
  bool int12;  // for those of four bits, instead of int8
  bool attention;  // queries, and weights of values, to bf16
};

class Program {
 public:
  Program(ThreadPool& pool, const Kernels& kernels, Rounding rounding, KvShape kv, int max_tokens, KvFile file = {});

  int embed(const Weight& table);
  int rms_norm(int x, const Weight& weight, float eps);
  int linear(int x, const std::vector<const Weight*>& weights, const std::vector<const Weight*>& biases);
  int add(int x, int y);
  int silu_mul(int gate_up);
  int attention(int qkv, int layer, AttentionShape shape, const std::vector<double>& inv_freq, bool interleaved);
  int select_logit_rows(int x);
  void seal(int logits);

  // Throws Fault, with nothing changed, where the batch breaks a rule.
  void run(Step step);
  void copy_blocks(const std::vector<std::array<int, 3>>& copies);

  // Readies memory of blocks that no step has used yet, a page that takes some milliseconds. Whether there is more to do.
  bool ready_blocks();

  int num_logit_rows() const { return static_cast<int>(step_.logit_rows.size()); }
  int vocab_size() const { return registers_[static_cast<size_t>(logits_)].width; }
  LogitsRow logits_row(int row) const;
  size_t activation_bytes() const;
  size_t kv_bytes() const { return blocks_.bytes(); }
  ThreadPool& pool() const { return pool_; }
  const Kernels& kernels() const { return kernels_; }

 private:
  enum class Kind { embed, rms_norm, add_rms_norm, reorder, linear, add, silu_mul, attention, select };

  struct Part {  // one weight of a linear operation
    const Weight* weight;
    int column;  // its first output column
    std::vector<float> bias;
    std::vector<float> bounds;  // of its outputs, for inputs in int12
  };

  struct Op {
    Kind kind;
    int x = -1, y = -1, out = -1, sum = -1;
    const Weight* weight = nullptr;  // reorder: whose order
    std::vector<float> row{};  // a norm's weight
    float eps = 0.0f;
    std::vector<Part> parts{};
    int next = -1;            // linear: the next one of the program
    bool to_int8 = false;     // a row operation: its rows are also rounded for the linear operation after it
    bool from_int8 = false;   // linear: the operation before it has done that
    bool to_int12 = false, from_int12 = false;  // the same for inputs in int12
    int quantised = 0;        // linear: which of two buffers has its rows in int8
    bool is_gated = false;    // linear: its result is silu of the first half of its outputs times the second half
    bool only_int8 = false;   // gated: nobody reads its result in float32
    int layer = 0;
    AttentionShape shape{};
    int rope = 0;
    bool dead = false;
  };

  struct Register {
    int width;
    bool logit_rows;  // one row for each logit row, instead of one for each token
    int buffer = -1;
  };

  struct Rows {
    int first, count;
  };

  struct View {
    float* data;
    size_t stride;
    float* row(int r) const { return data + static_cast<size_t>(r) * stride; }
  };

  int new_register(int width, bool logit_rows);
  int reorder(int x, const Weight& weight);
  const Register& at(int reg) const;
  int rows_of(int reg) const;
  View view(int reg) const;
  // An odd number of cache lines or pairs of them: rows that a tile reads at once lie in different sets of a cache.
  static size_t bf16_stride(int width) { return static_cast<size_t>((bf16_stretches(width) | 1) * kBf16Inputs); }
  std::byte* bf16_row(int width, int row) const {
    return rounded_.data() + static_cast<size_t>(row) * bf16_stride(width) * static_cast<size_t>(kernels_.bf16_bytes);
  }
  // Where one of some rows begins in int8, and how far apart its blocks are.
  struct Int8Row {
    QuantBlock* first;
    int step;
  };
  Int8Row int8_row(int buffer, int width, int row, int num_rows) const {
    const int step = num_rows >= kernels_.rows_in_tiles ? kLanes : 1;
    auto* blocks = reinterpret_cast<QuantBlock*>(quantised_[static_cast<size_t>(buffer)].data());
    return {blocks + static_cast<size_t>(row / step * step) * (static_cast<size_t>(width) / 32) + row % step, step};
  }
  // Rounds elements of a row, from column `first` on.
  void round_to_int8(int buffer, int width, int row, int num_rows, const float* x, int first, int count) const {
    const Int8Row out = int8_row(buffer, width, row, num_rows);
    kernels_.to_int8(x, count, out.first + first / 32 * out.step, out.step);
  }

  bool in_int12_tiles(int num_rows) const { return num_rows >= kernels_.rows_in_int12_tiles; }
  std::byte* int12_row(int width, int row, int num_rows) const {
    const bool in_tile = in_int12_tiles(num_rows);
    const int nth = in_tile ? row % kLanes : 0;
    return whole_.data() + static_cast<size_t>(row - nth) * int12_row_bytes(width, in_tile) + nth * kInt12Inputs;
  }
  float* int12_scales() const { return reinterpret_cast<float*>(scales_.data()); }
  void round_to_int12(int width, int row, int num_rows, const float* x) const {
    kernels_.to_int12(x, width, in_int12_tiles(num_rows), int12_row(width, row, num_rows), int12_scales() + row);
  }

  void select_early();
  std::vector<int> count_readers() const;
  bool can_gate(const Op& linear, const Op& silu_mul) const;
  void fuse();
  void link_linears();
  void place_registers();
  void check(const Step& step) const;
  void plan_attention(const AttentionShape& shape);

  // How a linear operation is cut into pieces, each of some rows of some panels.
  struct Split {
    int panels, group, panel_groups, row_groups;
    // Which panels are the nth piece that is claimed of those of one row group.
    int first_panel(int nth, int threads) const;
  };
  struct Place {
    size_t part;
    int panel;  // of its weight
  };
  // Where the weights are that a thread reads after a piece.
  struct Ahead {
    const std::byte* panels = nullptr;
    size_t panel_bytes = 0;
  };
  Split split_of(const Op& op, int rows) const;
  static Place place_of(const Op& op, int panel);
  static int column_of(const Op& op, int panel);
  static Ahead panels_at(const Op& op, int panel);
  Ahead after_piece(const Op& op, const Split& split, int nth) const;
  bool in_bf16(const Part& part) const { return rounding_.bf16 && part.weight->type() == WeightType::bf16; }
  bool in_int12(const Part& part) const { return rounding_.int12 && has_four_bits(part.weight->type()) && part.weight->cols() <= kMostInt12Inputs; }
  bool in_int8(const Part& part) const {
    return rounding_.int8 && is_quantised(part.weight->type()) && !in_int12(part);
  }
  std::vector<float> bounds_of(const Weight& weight) const;

  template <class Work>
  void for_rows(int rows, int64_t cost_per_row, Work work);
  template <class Work>
  void for_rows_of(const Op& op, int64_t cost_per_row, Work work);
  void round_inputs(const Op& op, int rows);
  void multiply(const Op& op, const Rows& rows, int panel, int count, Ahead after, View out);
  void multiply_gated(const Op& op, const Split& split, const Rows& rows, int panel, int count, Ahead after);
  void run_op(const Op& op);
  void run_linear(const Op& op);
  void run_attention(const Op& op);
  void fill_angles(RopeTable& rope);

  ThreadPool& pool_;
  const Kernels& kernels_;
  Rounding rounding_;
  KvShape kv_;
  int max_tokens_;
  Pages blocks_;
  size_t used_blocks_ = 0, ready_bytes_ = 0;  // of blocks_, from its begin on
  std::vector<Op> ops_;
  std::vector<Register> registers_;
  std::vector<Pages> buffers_;
  std::vector<RopeTable> ropes_;
  Pages rounded_;  // a linear operation's input in bf16
  std::array<Pages, 2> quantised_;  // in blocks of int8; a gated operation reads one and writes the other
  Pages whole_, scales_;  // a linear operation's input in int12, and the scale of each row
  size_t widest_input_ = 0;
  int logits_ = -1;
  Step step_;
  std::vector<float> tops_;  // the greatest of each stretch of each logits row, where a linear operation has noted it
  int stretch_ = 0;

  // The attention work of the running step, for the shape it was planned for: items read keys, merges finish rows
  // whose segments are in several items.
  struct Item {
    int seq;  // whose block table is read
    int kv_head, first_row, num_rows, first_segment, end_segment;
    bool is_partial;
  };
  struct SharedSegment {
    int segment;
    std::vector<int> seqs;
  };
  void find_shared(std::vector<int> seqs, int segment, std::vector<SharedSegment>& shared,
                   std::vector<int>& num_shared) const;
  AttentionTile tile_of(const Op& op, const Item& item);
  std::optional<std::array<int, 3>> planned_;
  std::vector<AttentionRow> attention_rows_;
  std::vector<Item> items_, merges_;
  std::vector<float> partials_;
  int64_t head_partials_ = 0;  // floats of partial results of one KV head
};

}  // namespace headrace
