// Program: running a step.

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <numeric>

#include "program.h"
#include "rows.h"

namespace headrace {

int Program::rows_of(int reg) const { return at(reg).logit_rows ? num_logit_rows() : step_.num_tokens(); }

Program::View Program::view(int reg) const {
  const Register& r = registers_[static_cast<size_t>(reg)];
  const auto stride = static_cast<size_t>((r.width + kLanes - 1) / kLanes * kLanes);
  return {reinterpret_cast<float*>(buffers_[static_cast<size_t>(r.buffer)].data()), stride};
}

LogitsRow Program::logits_row(int row) const {
  if (row < 0 || row >= num_logit_rows()) fail("logits row must be in 0..", num_logit_rows() - 1, ", got ", row);
  LogitsRow logits{view(logits_).row(row), vocab_size()};
  if (!tops_.empty()) {
    logits.tops = tops_.data() + row * ceil_div(logits.size, stretch_);
    logits.stretch = stretch_;
  }
  return logits;
}

void Program::check(const Step& s) const {
  if (logits_ < 0) fail("the program is not sealed");
  const int tokens = s.num_tokens();
  const int seqs = s.num_seqs();
  if (tokens < 1 || tokens > max_tokens_) fail("a step takes 1..", max_tokens_, " tokens, got ", tokens);
  if (static_cast<int>(s.token_starts.size()) != seqs + 1 || static_cast<int>(s.block_starts.size()) != seqs + 1)
    fail("a step of ", seqs, " sequences got ", s.token_starts.size(), " token starts and ", s.block_starts.size() - 1,
         " block tables");
  if (s.token_starts.front() != 0 || s.token_starts.back() != tokens)
    fail("token starts must run from 0 to ", tokens, ", got ", s.token_starts.front(), " to ", s.token_starts.back());
  for (int i = 0; i < seqs; ++i) {
    const int count = s.token_starts[i + 1] - s.token_starts[i];
    if (count < 1) fail("sequence ", i, " of the step has no tokens");
    if (s.positions[i] < 0 || s.positions[i] > (1 << 30)) fail("sequence ", i, " has position ", s.positions[i]);
    const int needed = ceil_div(s.positions[i] + count, kBlockTokens);
    const int given = s.block_starts[i + 1] - s.block_starts[i];
    if (given < needed) fail("sequence ", i, " needs ", needed, " blocks, its table has ", given);
  }
  for (int32_t block : s.blocks)
    if (block < 0 || block >= kv_.num_blocks) fail("block id must be in 0..", kv_.num_blocks - 1, ", got ", block);
  for (const Op& op : ops_) {
    if (op.kind != Kind::embed) continue;
    for (int token : s.tokens)
      if (token < 0 || token >= op.weight->rows())
        fail("token id must be in 0..", op.weight->rows() - 1, ", got ", token);
  }
  int previous = -1;
  for (int row : s.logit_rows) {
    if (row <= previous || row >= tokens) fail("logit rows must increase within 0..", tokens - 1, ", got ", row);
    previous = row;
  }
}

void Program::run(Step step) {
  check(step);
  step_ = std::move(step);
  step_.row_seq.clear();
  step_.row_position.clear();
  for (int i = 0; i < step_.num_seqs(); ++i)
    for (int row = step_.token_starts[i]; row < step_.token_starts[i + 1]; ++row) {
      step_.row_seq.push_back(i);
      step_.row_position.push_back(step_.positions[i] + row - step_.token_starts[i]);
    }
  for (const int32_t block : step_.blocks) used_blocks_ = std::max(used_blocks_, static_cast<size_t>(block) + 1);
  planned_.reset();
  tops_.clear();
  for (RopeTable& rope : ropes_) fill_angles(rope);
  for (const Op& op : ops_) run_op(op);
}

void Program::fill_angles(RopeTable& rope) {
  const size_t pairs = rope.inv_freq.size();
  auto* angles = reinterpret_cast<float*>(rope.angles.data());
  for_rows(step_.num_tokens(), static_cast<int64_t>(pairs) * 200, [&](int row) {
    float* cos = angles + static_cast<size_t>(row) * 2 * pairs;
    float* sin = cos + pairs;
    for (size_t i = 0; i < pairs; ++i) {
      const double angle = step_.row_position[row] * rope.inv_freq[i];
      cos[i] = static_cast<float>(std::cos(angle));
      sin[i] = static_cast<float>(std::sin(angle));
    }
  });
}

// `work` computes a row of the operation's result.
template <class Work>
void Program::for_rows_of(const Op& op, int64_t cost_per_row, Work work) {
  const View out = view(op.out);
  const int width = at(op.out).width;
  for_rows(rows_of(op.out), cost_per_row, [&](int r) {
    work(r);
    if (op.to_int12) round_to_int12(width, r, rows_of(op.out), out.row(r));
    if (op.to_int8) round_to_int8(0, width, r, rows_of(op.out), out.row(r), 0, width);
  });
}

void Program::run_op(const Op& op) {
  const View out = view(op.out);
  const View x = op.x >= 0 ? view(op.x) : out;
  const int width = at(op.out).width;
  switch (op.kind) {
    case Kind::embed:
      return for_rows_of(op, 16 * width, [&](int r) { op.weight->copy_row(kernels_, step_.tokens[r], out.row(r)); });
    case Kind::rms_norm:
      return for_rows_of(op, width, [&](int r) {
        kernels_.rms_norm(x.row(r), nullptr, nullptr, op.row.data(), op.eps, width, out.row(r));
      });
    case Kind::add_rms_norm: {
      const View y = view(op.y);
      const View sum = view(op.sum);
      return for_rows_of(op, width, [&](int r) {
        kernels_.rms_norm(x.row(r), y.row(r), sum.row(r), op.row.data(), op.eps, width, out.row(r));
      });
    }
    case Kind::add: {
      const View y = view(op.y);
      return for_rows_of(op, width, [&](int r) { kernels_.add(x.row(r), y.row(r), width, out.row(r)); });
    }
    case Kind::reorder:
      return for_rows_of(op, 2 * width, [&](int r) {
        const int32_t* order = op.weight->order().data();
        const float* from = x.row(r);
        float* to = out.row(r);
        for (int i = 0; i < width; ++i) to[i] = from[order[i]];
      });
    case Kind::silu_mul:
      return for_rows_of(op, 4 * width, [&](int r) { kernels_.silu_mul(x.row(r), width, out.row(r)); });
    case Kind::select:
      return for_rows_of(op, width, [&](int r) {
        std::memcpy(out.row(r), x.row(step_.logit_rows[r]), static_cast<size_t>(width) * sizeof(float));
      });
    case Kind::linear: return run_linear(op);
    case Kind::attention: return run_attention(op);
  }
}

// Cuts the step's attention into items: tiles of rows, in pieces of one segment where there are too few to go round.
void Program::plan_attention(const AttentionShape& shape) {
  const std::array<int, 3> key{shape.num_heads, shape.num_kv_heads, shape.head_dim};
  if (planned_ == key) return;
  planned_ = key;
  items_.clear();
  merges_.clear();
  attention_rows_.clear();
  const int heads = shape.num_heads / shape.num_kv_heads;
  const int most_rows = rounding_.attention ? kernels_.rows_in_bf16 : kAttentionRows;
  const int num_seqs = step_.num_seqs();
  const auto rows_of_seq = [&](int seq) { return (step_.token_starts[seq + 1] - step_.token_starts[seq]) * heads; };
  int tiles = 0;
  std::vector<int> few;  // sequences whose rows fill less than half a tile of the smaller kind
  for (int seq = 0; seq < num_seqs; ++seq) {
    tiles += ceil_div(rows_of_seq(seq), most_rows) * shape.num_kv_heads;
    if (2 * rows_of_seq(seq) <= kAttentionRows) few.push_back(seq);
  }
  const bool split = pool_.threads() > 1 && tiles < 4 * pool_.threads();
  std::vector<SharedSegment> shared;
  std::vector<int> num_shared(static_cast<size_t>(num_seqs), 0);
  find_shared(few, 0, shared, num_shared);

  const int64_t row_floats = partial_floats(shape.head_dim);
  std::vector<int> first_rows;  // of each sequence
  head_partials_ = 0;
  for (int seq = 0; seq < num_seqs; ++seq) {
    first_rows.push_back(static_cast<int>(attention_rows_.size()));
    const int rows = rows_of_seq(seq);
    const int begin = num_shared[static_cast<size_t>(seq)];
    for (int first = 0; first < rows; first += most_rows) {
      const int count = std::min(most_rows, rows - first);
      const int segments = (step_.positions[seq] + (first + count - 1) / heads) / kSegmentTokens + 1;
      const bool partial = begin > 0 || (split && segments > 1);
      const auto first_row = static_cast<int>(attention_rows_.size());
      for (int r = first; r < first + count; ++r) {
        attention_rows_.push_back({step_.token_starts[seq] + r / heads, r % heads, step_.positions[seq] + r / heads,
                                   partial ? head_partials_ : -1});
        if (partial) head_partials_ += segments * row_floats;
      }
      for (int h = 0; h < shape.num_kv_heads; ++h) {
        const Item tile{seq, h, first_row, count, begin, segments, partial};
        if (partial) merges_.push_back(tile);
        for (int s = begin, end; s < segments; s = end) {
          end = split ? s + 1 : segments;
          items_.push_back({seq, h, first_row, count, s, end, partial});
        }
      }
    }
  }
  for (const SharedSegment& one : shared) {
    const auto first_row = static_cast<int>(attention_rows_.size());
    for (int seq : one.seqs)
      for (int r = 0; r < rows_of_seq(seq); ++r)
        attention_rows_.push_back(attention_rows_[static_cast<size_t>(first_rows[static_cast<size_t>(seq)] + r)]);
    const int rows = static_cast<int>(attention_rows_.size()) - first_row;
    for (int first = 0; first < rows; first += most_rows)
      for (int h = 0; h < shape.num_kv_heads; ++h)
        items_.push_back({one.seqs[0], h, first_row + first, std::min(most_rows, rows - first), one.segment,
                          one.segment + 1, true});
  }
  const auto floats = static_cast<size_t>(head_partials_ * shape.num_kv_heads);
  if (partials_.size() < floats) partials_.resize(floats);
  // Long items first, so that no thread starts one when the others are finishing.
  const auto cost = [](const Item& item) { return (item.end_segment - item.first_segment) * item.num_rows; };
  std::stable_sort(items_.begin(), items_.end(), [&](const Item& a, const Item& b) { return cost(a) > cost(b); });
}

// Sequences that hold the same blocks, segment by segment as long as there are two of them: their rows read the segment
// once. `num_shared` counts the leading segments that a sequence has in common with others.
void Program::find_shared(std::vector<int> seqs, int segment, std::vector<SharedSegment>& shared,
                          std::vector<int>& num_shared) const {
  constexpr int kBlocks = kSegmentTokens / kBlockTokens;
  std::erase_if(seqs, [&](int seq) { return step_.positions[seq] + 1 < (segment + 1) * kSegmentTokens; });
  const auto table = [&](int seq) { return step_.blocks.begin() + step_.block_starts[seq] + segment * kBlocks; };
  std::stable_sort(seqs.begin(), seqs.end(), [&](int a, int b) {
    return std::lexicographical_compare(table(a), table(a) + kBlocks, table(b), table(b) + kBlocks);
  });
  for (auto first = seqs.begin(), end = first; first != seqs.end(); first = end) {
    end = std::find_if(first, seqs.end(), [&](int seq) { return !std::equal(table(seq), table(seq) + kBlocks, table(*first)); });
    if (end - first < 2) continue;
    for (auto seq = first; seq != end; ++seq) num_shared[static_cast<size_t>(*seq)] = segment + 1;
    shared.push_back({segment, {first, end}});
    find_shared({first, end}, segment + 1, shared, num_shared);
  }
}

AttentionTile Program::tile_of(const Op& op, const Item& item) {
  const AttentionShape& shape = op.shape;
  const View out = view(op.out);
  return {
      .type = kv_.type,
      .kv = blocks_.data() + static_cast<size_t>(op.layer) * kv_.layer_bytes() +
            static_cast<size_t>(item.kv_head) * kv_.head_bytes(),
      .block_stride = kv_.block_bytes(),
      .table = step_.blocks.data() + step_.block_starts[item.seq],
      .q_out = out.data + item.kv_head * (shape.num_heads / shape.num_kv_heads) * shape.head_dim,
      .stride = out.stride,
      .head_dim = shape.head_dim,
      .scale = shape.scale,
      .in_bf16 = rounding_.attention,
      .rows = attention_rows_.data() + item.first_row,
      .num_rows = item.num_rows,
      .first_segment = item.first_segment,
      .end_segment = item.end_segment,
      .partials = item.is_partial ? partials_.data() + item.kv_head * head_partials_ : nullptr,
  };
}

void Program::run_attention(const Op& op) {
  const AttentionShape& shape = op.shape;
  plan_attention(shape);
  const View qkv = view(op.x);
  const View out = view(op.out);
  const RopeTable& rope = ropes_[static_cast<size_t>(op.rope)];
  const auto* angles = reinterpret_cast<const float*>(rope.angles.data());
  const int pairs = shape.head_dim / 2;
  std::byte* layer = blocks_.data() + static_cast<size_t>(op.layer) * kv_.layer_bytes();
  for_rows(step_.num_tokens(), 4 * at(op.x).width, [&](int r) {
    const int seq = step_.row_seq[r];
    const int position = step_.row_position[r];
    const int32_t block = step_.blocks[step_.block_starts[seq] + position / kBlockTokens];
    const float* cos = angles + static_cast<size_t>(r) * shape.head_dim;
    kernels_.rope_row({qkv.row(r), cos, cos + pairs, rope.interleaved, shape.num_heads, shape.num_kv_heads,
                       shape.head_dim, out.row(r), kv_.type, layer + static_cast<size_t>(block) * kv_.block_bytes(),
                       position % kBlockTokens});
  });
  int64_t cost = 0;
  for (const Item& item : items_) {
    const int last = attention_rows_[static_cast<size_t>(item.first_row + item.num_rows - 1)].position;
    const int tokens = std::min(item.end_segment * kSegmentTokens, last + 1) - item.first_segment * kSegmentTokens;
    cost += static_cast<int64_t>(item.num_rows) * tokens * shape.head_dim;
  }
  const auto attend = [&](int i) { kernels_.attend(tile_of(op, items_[static_cast<size_t>(i)])); };
  const int count = static_cast<int>(items_.size());
  if (cost < kSerialCost) {
    for (int i = 0; i < count; ++i) attend(i);
  } else {
    pool_.run(count, attend);
  }
  for_rows(static_cast<int>(merges_.size()), kSerialCost / 8,
           [&](int i) { kernels_.merge_segments(tile_of(op, merges_[static_cast<size_t>(i)])); });
}

}  // namespace headrace
