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
constexpr int kBlockPanels = 32 / kLanes;  // as many as give a block of int8
constexpr int kGatedFloats = 2 * kBlockPanels * kLanes * kLinearRows;

}  // namespace

Program::Split Program::split_of(const Op& op, int rows) const {
  int panels = 0;
  for (const Part& part : op.parts) panels += part.weight->num_panels();
  const int row_groups = ceil_div(rows, kLinearRows);
  const int64_t products = static_cast<int64_t>(panels) * kLanes * at(op.x).width * rows;
  if (op.is_gated) panels /= 2;  // one of the gate and one of up
  const auto chunks = std::clamp<int64_t>(products / (kPieceProducts * pool_.threads()), kChunksPerThread,
                                          kMaxChunksPerThread);
  int group = products < 8 * kSerialCost ? panels
                                         : ceil_div(panels * row_groups, static_cast<int>(chunks) * pool_.threads());
  if (op.is_gated) group = ceil_div(group, kBlockPanels) * kBlockPanels;
  return {panels, group, ceil_div(panels, group), row_groups};
}

// Each of some threads that take turns walks on from piece to piece: what it has fetched ahead is what it needs.
int Program::Split::first_panel(int nth, int threads) const {
  const int of_thread = panel_groups / threads;
  const bool in_turn = nth < of_thread * threads;
  return (in_turn ? nth % threads * of_thread + nth / threads : nth) * group;
}

// Where a panel is that is counted through all parts; behind the last part if there is none.
Program::Place Program::place_of(const Op& op, int panel) {
  size_t part = 0;
  for (; part < op.parts.size() && panel >= op.parts[part].weight->num_panels(); ++part)
    panel -= op.parts[part].weight->num_panels();
  return {part, panel};
}
int Program::column_of(const Op& op, int panel) {
  const Place place = place_of(op, panel);
  return op.parts[place.part].column + place.panel * kLanes;
}
Program::Ahead Program::panels_at(const Op& op, int panel) {
  const Place place = place_of(op, panel);
  if (place.part == op.parts.size()) return {};  // a piece of more threads than there are pieces
  const Weight& w = *op.parts[place.part].weight;
  return {w.panel(place.panel), w.panel_bytes()};
}

// What the thread with the nth piece reads after it, if all take turns: the piece that follows, or, at the end of these,
// its first one of the next linear operation.
Program::Ahead Program::after_piece(const Op& op, const Split& split, int nth) const {
  const int threads = pool_.threads();
  if (nth + threads < split.panel_groups / threads * threads)
    return panels_at(op, split.first_panel(nth, threads) + split.group);
  if (op.next < 0) return {};
  const Op& next = ops_[static_cast<size_t>(op.next)];
  const int rows = rows_of(next.out);
  return rows == 0 ? Ahead{} : panels_at(next, split_of(next, rows).first_panel(nth % threads, threads));
}

// Rounds an operation's inputs to what its weights meet, where nobody has done that.
void Program::round_inputs(const Op& op, int rows) {
  const View x = view(op.x);
  const int inputs = at(op.x).width;
  if (std::any_of(op.parts.begin(), op.parts.end(), [&](const Part& p) { return in_bf16(p); }))
    for_rows(rows, inputs, [&](int r) { kernels_.to_bf16(x.row(r), inputs, bf16_row(inputs, r)); });
  if (!op.from_int12 && std::any_of(op.parts.begin(), op.parts.end(), [&](const Part& p) { return in_int12(p); }))
    for_rows(rows, inputs, [&](int r) { round_to_int12(inputs, r, rows, x.row(r)); });
  if (!op.from_int8 && std::any_of(op.parts.begin(), op.parts.end(), [&](const Part& p) { return in_int8(p); }))
    for_rows(rows, inputs, [&](int r) { round_to_int8(op.quantised, inputs, r, rows, x.row(r), 0, inputs); });
}

// Some rows times `count` panels from `panel` on, after which `after` is likely to be read. `out` begins with the first
// row's output of the first panel.
void Program::multiply(const Op& op, const Rows& rows, int panel, int count, Ahead after, View out) {
  const View x = view(op.x);
  const int inputs = at(op.x).width;
  const int first_column = column_of(op, panel);
  for (int end = panel + count, num_panels; panel < end; panel += num_panels) {
    const Place place = place_of(op, panel);
    const Part& part = op.parts[place.part];
    const Weight& w = *part.weight;
    num_panels = std::min(end - panel, w.num_panels() - place.panel);
    const int column = place.panel * kLanes;
    const bool bf16 = in_bf16(part), int8 = in_int8(part), int12 = in_int12(part);
    const Ahead next = panel + num_panels == end ? after : panels_at(op, panel + num_panels);
    const LinearSpan span{
        .type = w.type(),
        .panels = w.panel(place.panel),
        .panel_bytes = w.panel_bytes(),
        .num_panels = num_panels,
        .num_outputs = std::min(w.rows() - column, num_panels * kLanes),
        .num_inputs = inputs,
        .next = next.panels,
        .next_bytes = next.panel_bytes,
        .x = x.row(rows.first),
        .x_bf16 = bf16 ? bf16_row(inputs, rows.first) : nullptr,
        .x_int8 = int8 ? int8_row(op.quantised, inputs, rows.first, rows_of(op.x)).first : nullptr,
        .x_int12 = int12 ? int12_row(inputs, rows.first, rows_of(op.x)) : nullptr,
        .x_scales = int12 ? int12_scales() + rows.first : nullptr,
        .bounds = int12 ? part.bounds.data() + column : nullptr,
        .x_stride = int8 ? static_cast<size_t>(inputs) / 32 : bf16 ? bf16_stride(inputs) : x.stride,
        .rows = rows.count,
        .out = out.data + (part.column + column - first_column),
        .out_stride = out.stride,
        .bias = part.bias.empty() ? nullptr : part.bias.data() + column,
    };
    (int12 ? kernels_.linear_int12 : int8 ? kernels_.linear_int8 : bf16 ? kernels_.linear_bf16 : kernels_.linear)(span);
  }
}

// The same for as many panels of both halves, whose product is the result: a few columns at a time, which are still in the
// cache when they are multiplied and rounded.
void Program::multiply_gated(const Op& op, const Split& split, const Rows& rows, int panel, int count, Ahead after) {
  alignas(64) float both[kGatedFloats];
  const int most = kGatedFloats / (2 * kLanes * rows.count) / kBlockPanels * kBlockPanels;
  for (int end = panel + count, n; panel < end; panel += n) {
    n = std::min(most, end - panel);
    const int columns = n * kLanes, up = split.panels + panel;
    const View gate_up{both, 2 * static_cast<size_t>(columns)};
    multiply(op, rows, panel, n, panels_at(op, up), gate_up);
    multiply(op, rows, up, n, panel + n < end ? panels_at(op, panel + n) : after, {both + columns, gate_up.stride});
    const int column = panel * kLanes;
    for (int r = 0; r < rows.count; ++r) {
      float* out = op.only_int8 ? gate_up.row(r) : view(op.out).row(rows.first + r) + column;
      kernels_.silu_mul(gate_up.row(r), columns, out);
      if (op.to_int8)
        round_to_int8(1 - op.quantised, at(op.out).width, rows.first + r, rows_of(op.out), out, column, columns);
    }
  }
}

void Program::run_linear(const Op& op) {
  const int num_rows = rows_of(op.out);
  if (num_rows == 0) return;
  round_inputs(op, num_rows);
  const View out = view(op.out);
  const Split split = split_of(op, num_rows);
  const bool are_logits = op.out == logits_ && !op.is_gated && op.parts[0].weight->rows() == at(op.out).width;
  if (are_logits) {
    stretch_ = split.group * kLanes;
    tops_.resize(static_cast<size_t>(num_rows) * static_cast<size_t>(split.panel_groups));
  }
  pool_.run(split.panel_groups * split.row_groups, [&](int chunk) {
    const int row_group = chunk / split.panel_groups, nth = chunk % split.panel_groups;
    const auto row_of = [&](int g) {  // whole tiles
      return std::min(num_rows, ceil_div(num_rows, kLanes) * g / split.row_groups * kLanes);
    };
    const Rows rows{row_of(row_group), row_of(row_group + 1) - row_of(row_group)};
    const int panel = split.first_panel(nth, pool_.threads());
    const int count = std::min(split.group, split.panels - panel);
    const Ahead after = after_piece(op, split, nth);
    if (op.is_gated) return multiply_gated(op, split, rows, panel, count, after);
    float* first = out.row(rows.first) + column_of(op, panel);
    multiply(op, rows, panel, count, after, {first, out.stride});
    if (are_logits)  // they are in the cache
      for (int r = 0; r < rows.count; ++r)
        tops_[static_cast<size_t>((rows.first + r) * split.panel_groups + panel / split.group)] = kernels_.max_row(
            first + static_cast<size_t>(r) * out.stride, std::min(count * kLanes, at(op.out).width - panel * kLanes));
  });
}

}  // namespace headrace
