// The arithmetic of every operation, compiled once for each instruction set.
//
// A kernel gives each output element by a fixed sequence of operations that depends on nothing but its inputs: not on
// the rows computed beside it, the thread, the chunk, or the instruction set.
#pragma once

#include <cstddef>
#include <cstdint>

namespace headrace {

inline constexpr int kLanes = 16;
inline constexpr int kBlockTokens = 16;
inline constexpr int kMaxHeadDim = 256;

// One pass of online softmax covers this many tokens; passes are merged in order. A fixed length lets several threads
// share one long sequence and still give the bits that one thread gives.
inline constexpr int kSegmentTokens = 256;

// Tokens that an online softmax takes at a time.
inline constexpr int kSoftmaxTokens = 64;

// (query, head) rows that share one walk over the keys.
inline constexpr int kAttentionRows = 48;
// The same where tiles multiply, so fast that widening keys and values for fewer would take as long.
inline constexpr int kTiledRows = 192;

// Types from q4_0 on are quantised in blocks.
enum class WeightType : uint8_t { f32, f16, bf16, q4_0, q4_1, q5_0, q5_1, q8_0, q4_g32, q4_g128, q4_k, q5_k, q6_k };

constexpr bool is_quantised(WeightType type) { return type >= WeightType::q4_0; }
// Weights are scale * (q + offset), where offset is a whole number.
constexpr bool has_offset(WeightType type) { return type == WeightType::q4_g32 || type == WeightType::q4_g128; }

// Weights of 16 outputs ("lanes"), as a run of records along the input dimension:
//   f32, f16     record = 8 inputs:   [8][16]
//   bf16         record = 8 inputs:   [4 pairs][16 lanes][2], the pair order of the dot-product instructions
//   q8_0         record = 32 inputs:  f16 scale[16], uint32 [8 quads][16]; see `quad_input`
//   q4_0, q5_0   record = 32 inputs:  f16 scale[16], words
//   q4_1, q5_1   record = 32 inputs:  f16 scale[16], f16 min[16], words
//   q4_g32       record = 32 inputs:  f16 scale[16], f16 offset[16], words
//   q4_g128      record = 128 inputs: f16 scale[16], f16 offset[16], then for each block of 32 inputs words
//   q4_k, q5_k   record = 256 inputs: f16 scale[16], f16 -min[16], then for each block of 32 inputs int8 [16][2], by
//                which scale and -min are multiplied there, then for each block words
//   q6_k         record = 256 inputs: f16 scale[16], 32 bytes unused, then for each block of 32 inputs int8 [16][2], by
//                which the scale of its inputs 0-15 and 16-31 is multiplied, then for each block words
// The words of a block hold the low four bits of each weight and then the bits above:
//   uint32 [4][16]      word w has quad w in the low nibbles of its bytes and quad w + 4 in the high ones, so nibble j is
//                       of input 4 * j + w
//   q5: uint32 [1][16]  bit n is of input n, so byte i has the bits of quads 0 to 7, from the lowest
//   q6: uint32 [2][16]  byte i of word h has two bits of each of quads 4 * h to 4 * h + 3, from the lowest
constexpr int weight_bits(WeightType type) {
  switch (type) {
    case WeightType::f32: return 32;
    case WeightType::f16:
    case WeightType::bf16: return 16;
    case WeightType::q4_0:
    case WeightType::q4_1:
    case WeightType::q4_g32:
    case WeightType::q4_g128:
    case WeightType::q4_k: return 4;
    case WeightType::q5_0:
    case WeightType::q5_1:
    case WeightType::q5_k: return 5;
    case WeightType::q6_k: return 6;
    case WeightType::q8_0: return 8;
  }
  return 0;
}
constexpr bool has_four_bits(WeightType type) { return weight_bits(type) == 4; }
constexpr int record_inputs(WeightType type) {
  return !is_quantised(type) ? 8 : type < WeightType::q4_g128 ? 32 : type < WeightType::q4_k ? 128 : 256;
}
constexpr size_t header_bytes(WeightType type) {
  switch (type) {
    case WeightType::f32:
    case WeightType::f16:
    case WeightType::bf16: return 0;
    case WeightType::q4_0:
    case WeightType::q5_0:
    case WeightType::q8_0: return 32;
    case WeightType::q4_1:
    case WeightType::q5_1:
    case WeightType::q4_g32:
    case WeightType::q4_g128: return 64;
    case WeightType::q4_k:
    case WeightType::q5_k:
    case WeightType::q6_k: return 64 + 8 * 32;
  }
  return 0;
}
constexpr size_t record_bytes(WeightType type) {
  return header_bytes(type) + static_cast<size_t>(record_inputs(type) * weight_bits(type) * kLanes / 8);
}

// Inputs that meet weights in bf16 are added up in stretches, as tiles have them.
inline constexpr int kBf16Inputs = 32;
constexpr int bf16_stretches(int num_inputs) { return (num_inputs + kBf16Inputs - 1) / kBf16Inputs; }

// Kernels decode this many inputs at a time, a "step": a record, or one block of it.
constexpr int step_inputs(WeightType type) { return is_quantised(type) ? 32 : 8; }
constexpr size_t step_bytes(WeightType type) {
  return record_bytes(type) / static_cast<size_t>(record_inputs(type) / step_inputs(type));
}

// Quantised inputs meet in quads, four bytes of one 32-bit word. Byte i of quad q is this input of the block of 32.
constexpr int quad_input(int quad, int i) { return quad + 8 * i; }

// 32 inputs of a row, rounded to scale * q with q in -127..127, in the order of the quads.
struct QuantBlock {
  int8_t q[32];
  float scale;
  float sum;      // scale * total
  int32_t total;  // of q
  int16_t negated_halves[2];  // minus the totals of inputs 0-15 and 16-31
};

// Inputs as whole numbers of 12 bits are 16 * high + low, of high in -127..127 and low in -8..7. Rows are two rows of
// QuantBlock each, of which only the integers count: those of high, then those of low. In tiles of 16 rows, the high ones
// of 64 inputs of all rows are followed by the low ones, each in the order of the quads, with zeros behind the last input.
inline constexpr int kInt12Inputs = 64;
constexpr size_t int12_row_bytes(int num_inputs, bool in_tile) {
  if (in_tile) return static_cast<size_t>((num_inputs + kInt12Inputs - 1) / kInt12Inputs * 2 * kInt12Inputs);
  return static_cast<size_t>(num_inputs / 32 * 2) * sizeof(QuantBlock);
}
// Sums of products of as many inputs fit 32 bits.
inline constexpr int kMostInt12Inputs = 1 << 16;

// Some rows times some panels of one weight: out[r][n] = chain over k of fma(w[n][k], x[r][k], acc), acc = 0 at first,
// then + bias[n] where given.
struct LinearSpan {
  WeightType type;
  const std::byte* panels;
  size_t panel_bytes;
  int num_panels;
  int num_outputs;  // the last panel may be partly padding
  int num_inputs;
  // Panels of perhaps another weight, which whoever computes this is likely to read next. May be null.
  const std::byte* next;
  size_t next_bytes;  // of one of them
  const float* x;
  const std::byte* x_bf16;   // rows as to_bf16 gives them (linear_bf16 only)
  const QuantBlock* x_int8;  // rows in blocks (linear_int8 only), x_stride of them; or tiles of rows, see `rows_in_tiles`
  const std::byte* x_int12;  // linear_int12 only: rows, or from some number on tiles of rows
  const float* x_scales;     // and what each row's whole numbers are worth
  const float* bounds;       // of the first panel's outputs, see weight_bounds
  size_t x_stride;
  int rows;
  float* out;
  size_t out_stride;
  const float* bias;  // of the first panel's first output; may be null
};

// How keys and values are stored, each rounded to nearest even. What is no number stays none.
//   bf16
//   int8  scale * q with q in -127..127, one scale for each token's key or value
//   fp8   E4M3 (OCP "fn"): finite values beyond 448 become 448
enum class KvType : uint8_t { bf16, int8, fp8 };
constexpr int kv_element_bytes(KvType type) { return type == KvType::bf16 ? 2 : 1; }
// A KV head's keys in a block, [head_dim][16 tokens] and (int8) float scale[16]; as many bytes of values follow,
// [16 tokens][head_dim] and (int8) float scale[16].
constexpr size_t kv_part_bytes(KvType type, int head_dim) {
  const int scales = type == KvType::int8 ? static_cast<int>(sizeof(float)) : 0;
  return static_cast<size_t>(kBlockTokens) * static_cast<size_t>(head_dim * kv_element_bytes(type) + scales);
}

// One row of q, k, v: rotate q into `q_out`; rotate k and append k and v to a KV block.
struct RopeRow {
  const float* qkv;
  const float* cos;  // [head_dim / 2]
  const float* sin;
  bool interleaved;
  int num_heads, num_kv_heads, head_dim;
  float* q_out;
  KvType type;
  std::byte* block;  // of the row's layer
  int slot;          // token within the block
};

// A query of one head.
struct AttentionRow {
  int32_t token;  // row of the step
  int32_t head;   // within the group of its KV head
  int32_t position;
  int64_t partial;  // where its results for the segments of KV head 0 begin, or -1
};

// Rows that read the same keys.
struct AttentionTile {
  KvType type;
  const std::byte* kv;  // block 0, at the tile's layer and KV head
  size_t block_stride;
  const int32_t* table;
  float* q_out;  // token 0, first head of the group: rotated queries on entry, results on exit
  size_t stride;
  int head_dim;
  float scale;
  bool in_bf16;  // queries and weights are rounded to bf16
  const AttentionRow* rows;  // in order of position
  int num_rows;
  int first_segment, end_segment;
  // Null: all segments are covered and the rows are finished. Else each segment's result of a row goes to
  // partials + row.partial + segment * partial_floats(head_dim).
  float* partials;
};
// The result of one segment: weighted sums of values, the greatest score, the sum of weights.
constexpr int64_t partial_floats(int head_dim) { return (head_dim + kLanes - 1) / kLanes * kLanes + kLanes; }

struct Kernels {
  const char* name;
  void (*linear)(const LinearSpan&);
  // bf16 weights times inputs rounded to bf16, in stretches of 32 with zeros behind the last one, where numbers too small
  // to be normal count as zero: for each, acc + (even + odd), which are the chains over its even and its odd inputs, each
  // from zero; then the bias. "fma" and "tiles" do so; "dot" is one chain over all pairs, in the arithmetic of VDPBF16PS.
  void (*linear_bf16)(const LinearSpan&);
  const char* bf16_products;
  int bf16_bytes;  // of an input rounded to bf16: 2, or 4 as float32
  // Quantised weights times quantised inputs: chain over blocks of 32 of fma(dot, scale * x.scale, acc), where dot is
  // the integer sum of products, then (q4_1, q5_1, q4_k, q5_k) fma(min, x.sum, acc). Scale and minimum are those of the
  // block, products of theirs exact. In q6_k, dot is the sum of both halves' integers, each times its factor. Offsets are
  // part of dot.
  void (*linear_int8)(const LinearSpan&);
  // Weights of four bits times inputs as whole numbers. Weights are such numbers as well, s * (q - 8) + c, where s and c are
  // the scale, and what the weight is at q = 8, in units of their output, bound / 2000, to nearest even. (Of a negative
  // scale, 15 - q counts as q.) With s = 16 * s1 + s0 and c = 16 * c1 + c0, of s0 in 0..15 and c0 in -8..7, a weight is
  // 16 * high + low, where high = s1 * (q - 8) + c1. fma(highs, 16, middle) * (16 * unit * scale), where highs is the integer
  // sum of high * x.high, and middle that of low * x.high + high * x.low; then the bias. low * x.low is left out.
  void (*linear_int12)(const LinearSpan&);
  // What the 16 outputs of a panel have no greater weight than.
  void (*weight_bounds)(WeightType, const std::byte* panel, int num_inputs, float* out);
  void (*to_bf16)(const float* x, int n, std::byte* out);  // with zeros up to whole stretches
  void (*to_int8)(const float* x, int n, QuantBlock* out, int step);  // n is a multiple of 32; blocks are `step` apart
  // One row, alone or in a tile of 16, and its scale; n is a multiple of 32.
  void (*to_int12)(const float* x, int n, bool in_tile, std::byte* out, float* scale);
  void (*weight_row)(WeightType, const std::byte* panel, int lane, int num_inputs, float* out);
  void (*add)(const float* x, const float* y, int n, float* out);
  // out = norm(x), or, where y is given, sum = x + y and out = norm(sum).
  void (*rms_norm)(const float* x, const float* y, float* sum, const float* weight, float eps, int n, float* out);
  void (*silu_mul)(const float* gate_up, int n, float* out);
  void (*rope_row)(const RopeRow&);
  void (*attend)(const AttentionTile&);
  // Finish rows whose segments are all done, from `partials`.
  void (*merge_segments)(const AttentionTile&);
  // The greatest of a row; NaN or infinity where one is in it.
  float (*max_row)(const float* x, int n);
  // exp(x - shift), 0 where the difference is below -700. Differences are not positive.
  void (*exp_row)(const double* x, double shift, int n, double* out);
  double (*sum_exp_row)(const double* x, double shift, int n);  // of what exp_row gives, added up in order
  void (*divide_row)(const float* x, double divisor, int n, double* out);
  // The indices of numbers in [floor, ceiling), in order, and how many there are. `out` has room for one more than n.
  int (*find_row)(const double* x, double floor, double ceiling, int n, int* out);
  int rows_in_bf16 = kAttentionRows;  // of a tile that `attend` takes at most where it multiplies in bf16
  // From so many rows on, linear_int8 takes them in tiles of 16: block by block, that of one row beside that of the next.
  int rows_in_tiles = 1 << 30;
  int rows_in_int12_tiles = 1 << 30;  // the same for linear_int12
};

const Kernels* portable_kernels();
const Kernels* avx2_kernels();    // null where not compiled in
const Kernels* avx512_kernels();  // null where not compiled in
const Kernels* amx_kernels();     // null where not compiled in
const Kernels* neon_kernels();    // null where not compiled in

}  // namespace headrace
