// Program: running linear operations.

#include <algorithm>

#include "program.h"
#include "rows.h"

namespace headrace {
namespace {

// Rows of a linear operation that one chunk takes: enough to pay for decoding the weights.
constexpr int kLinearRows = 192;
// Multiply-adds of a piece of a large operation, some tens of microseconds, and how many such pieces a thread gets at
// most: whoever is done first waits for half a piece on average.
constexpr int64_t kPieceProducts = 4'000'000;
constexpr int kMaxChunksPerThread = 4 * kChunksPerThread;

}  // namespace

Program::Split Program::split_of(const Op& op, int rows) const {
  int panels = 0;
  for (const Part& part : op.parts) panels += part.weight->num_panels();
  const int row_groups = ceil_div(rows, kLinearRows);
  const int64_t products = static_cast<int64_t>(panels) * kLanes * at(op.x).width * rows;
  const auto chunks = std::clamp<int64_t>(products / (kPieceProducts * pool_.threads()), kChunksPerThread,
                                          kMaxChunksPerThread);
  const int group = products < 8 * kSerialCost
                        ? panels
                        : ceil_div(panels * row_groups, static_cast<int>(chunks) * pool_.threads());
  return {panels, group, ceil_div(panels, group), row_groups};
}

// Each of some threads that take turns walks on from piece to piece: what it has fetched ahead is what it needs.
int Program::Split::first_panel(int nth, int threads) const {
  const int of_thread = panel_groups / threads;
  const bool in_turn = nth < of_thread * threads;
  return (in_turn ? nth % threads * of_thread + nth / threads : nth) * group;
}

// What the thread with the nth piece reads after it has come to `end_panel` of a part, if all take turns: more of this
// piece, the piece that follows, or, at the end of these, its first one of the next linear operation.
Program::Ahead Program::ahead_of(const Op& op, const Split& split, int nth, size_t part, int end_panel,
                                 bool is_end) const {
  const auto at_panel = [](const Op& of, size_t index, int panel) -> Ahead {
    for (; index < of.parts.size(); ++index) {
      const Weight& w = *of.parts[index].weight;
      if (panel < w.num_panels()) return {w.panel(panel), w.panel_bytes()};
      panel -= w.num_panels();
    }
    return {};
  };
  const int threads = pool_.threads();
  if (!is_end || nth + threads < split.panel_groups / threads * threads) return at_panel(op, part, end_panel);
  if (op.next < 0) return {};
  const Op& next = ops_[static_cast<size_t>(op.next)];
  const int rows = rows_of(next.out);
  return rows == 0 ? Ahead{} : at_panel(next, 0, split_of(next, rows).first_panel(nth % threads, threads));
}

void Program::run_linear(const Op& op) {
  const int rows = rows_of(op.out);
  if (rows == 0) return;
  const View x = view(op.x);
  const View out = view(op.out);
  const int inputs = at(op.x).width;
  const size_t num_blocks = static_cast<size_t>(inputs) / 32;
  auto* rounded = reinterpret_cast<uint16_t*>(rounded_.data());
  const auto* quantised = reinterpret_cast<const QuantBlock*>(quantised_.data());
  const auto in_bf16 = [&](const Part& part) { return rounding_.bf16 && part.weight->type() == WeightType::bf16; };
  if (std::any_of(op.parts.begin(), op.parts.end(), in_bf16))
    for_rows(rows, inputs, [&](int r) {
      kernels_.to_bf16(x.row(r), inputs, rounded + static_cast<size_t>(r) * widest_input_);
    });
  if (!op.from_int8 && std::any_of(op.parts.begin(), op.parts.end(), [&](const Part& p) { return in_int8(p); }))
    for_rows(rows, inputs, [&](int r) { round_int8(x, inputs, r); });

  const Split split = split_of(op, rows);
  const bool are_logits = op.out == logits_ && op.parts[0].weight->rows() == at(op.out).width;
  if (are_logits) {
    stretch_ = split.group * kLanes;
    tops_.resize(static_cast<size_t>(rows) * static_cast<size_t>(split.panel_groups));
  }
  pool_.run(split.panel_groups * split.row_groups, [&](int chunk) {
    const int row_group = chunk / split.panel_groups, nth = chunk % split.panel_groups;
    const auto row_of = [&](int g) { return static_cast<int>(static_cast<int64_t>(rows) * g / split.row_groups); };
    const int first_row = row_of(row_group);
    const int first_panel = split.first_panel(nth, pool_.threads());
    int first = first_panel;
    int left = std::min(split.group, split.panels - first);
    for (size_t i = 0; i < op.parts.size(); ++i) {
      const Part& part = op.parts[i];
      const Weight& w = *part.weight;
      if (first >= w.num_panels()) {
        first -= w.num_panels();
        continue;
      }
      const int count = std::min(left, w.num_panels() - first);
      const int column = first * kLanes;
      const bool bf16 = in_bf16(part);
      const bool int8 = in_int8(part);
      const Ahead ahead = ahead_of(op, split, nth, i, first + count, count == left);
      const LinearSpan span{
          .type = w.type(),
          .panels = w.panel(first),
          .panel_bytes = w.panel_bytes(),
          .num_panels = count,
          .num_outputs = std::min(w.rows() - column, count * kLanes),
          .num_inputs = inputs,
          .next = ahead.panels,
          .next_bytes = ahead.panel_bytes,
          .x = x.row(first_row),
          .x_bf16 = bf16 ? rounded + static_cast<size_t>(first_row) * widest_input_ : nullptr,
          .x_int8 = int8 ? quantised + static_cast<size_t>(first_row) * num_blocks : nullptr,
          .x_stride = int8 ? num_blocks : bf16 ? widest_input_ : x.stride,
          .rows = row_of(row_group + 1) - first_row,
          .out = out.row(first_row) + part.column + column,
          .out_stride = out.stride,
          .bias = part.bias.empty() ? nullptr : part.bias.data() + column,
      };
      (int8 ? kernels_.linear_int8 : bf16 ? kernels_.linear_bf16 : kernels_.linear)(span);
      if (are_logits)  // they are in the cache
        for (int r = 0; r < span.rows; ++r)
          tops_[static_cast<size_t>((first_row + r) * split.panel_groups + first_panel / split.group)] =
              kernels_.max_row(span.out + static_cast<size_t>(r) * out.stride, span.num_outputs);
      left -= count;
      if (left == 0) break;
      first = 0;
    }
  });
}

}  // namespace headrace
