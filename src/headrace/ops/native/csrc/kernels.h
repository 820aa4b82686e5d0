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

enum class WeightType : uint8_t { f32, f16, bf16, q4_0, q4_1, q8_0 };

// Weights of 16 outputs ("lanes"), as a run of records along the input dimension:
//   f32, f16     record = 8 inputs:  [8][16]
//   bf16         record = 8 inputs:  [4 pairs][16 lanes][2], the pair order of the dot-product instructions
//   q8_0         record = 32 inputs: f16 scale[16], uint32 [8][16]; see `quad_inputs`
//   q4_1, q4_0   record = 32 inputs: f16 scale[16], (q4_1: f16 min[16]), uint32 [4][16]: word w holds quad w in the low
//                nibbles of its bytes and quad w + 4 in the high ones, so input 4 * j + w is nibble j
constexpr int record_inputs(WeightType type) {
  return type == WeightType::f32 || type == WeightType::f16 || type == WeightType::bf16 ? 8 : 32;
}
constexpr size_t record_bytes(WeightType type) {
  switch (type) {
    case WeightType::f32: return 8 * 16 * 4;
    case WeightType::f16: return 8 * 16 * 2;
    case WeightType::bf16: return 8 * 16 * 2;
    case WeightType::q4_0: return 16 * 18;
    case WeightType::q4_1: return 16 * 20;
    case WeightType::q8_0: return 16 * 34;
  }
  return 0;
}

// Quantised inputs meet in quads, four bytes of one 32-bit word. Byte i of quad q is this input of the block of 32.
constexpr int quad_input(int quad, int i) { return quad + 8 * i; }

// 32 inputs of a row, rounded to scale * q with q in -127..127, in the order of the quads.
struct QuantBlock {
  int8_t q[32];
  float scale;
  float sum;      // scale * total
  int32_t total;  // of q
  int32_t unused;
};

// Some rows times some panels of one weight: out[r][n] = chain over k of fma(w[n][k], x[r][k], acc), acc = 0 at first,
// then + bias[n] where given.
struct LinearSpan {
  WeightType type;
  const std::byte* panels;
  size_t panel_bytes;
  int num_panels;
  int num_outputs;  // the last panel may be partly padding
  int num_inputs;
  const float* x;
  const uint16_t* x_bf16;    // rows rounded to bf16 and padded to an even length (linear_bf16 only)
  const QuantBlock* x_int8;  // rows in blocks (linear_int8 only)
  size_t x_stride;
  int rows;
  float* out;
  size_t out_stride;
  const float* bias;  // of the first panel's first output; may be null
};

// One row of q, k, v: rotate q into `q_out`; rotate k and append k and v, rounded to bf16, to a KV block.
struct RopeRow {
  const float* qkv;
  const float* cos;  // [head_dim / 2]
  const float* sin;
  bool interleaved;
  int num_heads, num_kv_heads, head_dim;
  float* q_out;
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

// Rows that read the same keys. A KV block holds, for each KV head, keys [head_dim][16 tokens] and values
// [16 tokens][head_dim] in bf16.
struct AttentionTile {
  const std::byte* kv;  // block 0, at the tile's layer and KV head
  size_t block_stride;
  const int32_t* table;
  float* q_out;  // token 0, first head of the group: rotated queries on entry, results on exit
  size_t stride;
  int head_dim;
  float scale;
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
  void (*linear_bf16)(const LinearSpan&);  // null where the instruction set has no bf16 dot product
  // Quantised weights times quantised inputs: chain over blocks of 32 of fma(dot, scale * x.scale, acc), where dot is
  // the integer sum of products, then (q4_1) fma(min, x.sum, acc).
  void (*linear_int8)(const LinearSpan&);
  void (*to_bf16)(const float* x, int n, uint16_t* out);
  void (*to_int8)(const float* x, int n, QuantBlock* out);  // n is a multiple of 32
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
};

const Kernels* portable_kernels();
const Kernels* avx2_kernels();    // null where not compiled in
const Kernels* avx512_kernels();  // null where not compiled in
const Kernels* neon_kernels();    // null where not compiled in

}  // namespace headrace
