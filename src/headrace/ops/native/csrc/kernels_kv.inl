// Keys and values as they lie in the blocks of the KV cache. Included once for each instruction set, after its simd header.

namespace headrace::HEADRACE_ISA {
namespace {

constexpr int kSegmentBlocks = kSegmentTokens / kBlockTokens;

HR_INLINE float* row_pointer(const AttentionTile& t, int row) {
  return t.q_out + static_cast<size_t>(t.rows[row].token) * t.stride +
         static_cast<size_t>(t.rows[row].head) * static_cast<size_t>(t.head_dim);
}
HR_INLINE float* partial_of(const AttentionTile& t, int row, int segment) {
  return t.partials + t.rows[row].partial + segment * partial_floats(t.head_dim);
}
HR_INLINE int last_position(const AttentionTile& t) { return t.rows[t.num_rows - 1].position; }
// The first row that sees the token.
HR_INLINE int first_seeing(const AttentionTile& t, int token) {
  int row = 0;
  while (row < t.num_rows && t.rows[row].position < token) ++row;
  return row;
}
// Of the tokens from `start` on, the next `count` at most, those that the row sees.
HR_INLINE int visible(const AttentionTile& t, int row, int start, int count) {
  return least(t.rows[row].position - start + 1, count);
}

// What a segment reads, in the order in which it is read: the keys of some blocks, up to Group of them, then their values,
// then the next ones; and, to fetch them ahead, the first keys of the next segment. The hardware cannot guess where the next
// block lies, and memory takes as long as the products of some blocks.
template <int Group>
struct Parts {
  static constexpr int kAhead = 4;
  int num_blocks;
  const std::byte* parts[2 * kSegmentBlocks + kAhead];

  Parts(const AttentionTile& t, int segment, size_t part_bytes) {
    const int begin = segment * kSegmentBlocks;
    const int end = least(last_position(t) / kBlockTokens + 1, t.end_segment * kSegmentBlocks);
    num_blocks = least(end - begin, kSegmentBlocks);
    const auto keys_of = [&](int block) { return t.kv + t.table[block] * t.block_stride; };
    for (int i = 0; i < num_blocks; ++i) {
      parts[nth_keys(i)] = keys_of(begin + i);
      parts[nth_values(i)] = keys_of(begin + i) + part_bytes;
    }
    for (int i = 2 * num_blocks, block = begin + num_blocks; i < 2 * num_blocks + kAhead; ++i, ++block)
      parts[i] = block < end ? keys_of(block) : t.kv;  // anything
  }
  int nth_keys(int block) const { return block + block / Group * Group; }
  int nth_values(int block) const { return nth_keys(block) + least(num_blocks - block / Group * Group, Group); }
  const std::byte* keys(int block) const { return parts[nth_keys(block)]; }
  const std::byte* values(int block) const { return parts[nth_values(block)]; }
  // Fetch ahead what lies where the given bytes of a part do.
  __attribute__((always_inline)) void prefetch(int part, size_t offset, size_t bytes) const {
    for (size_t line = offset; line < offset + bytes; line += 64) __builtin_prefetch(parts[part + kAhead] + line);
  }
};

// Keys or values as they lie in a block, element 0 and `stride` elements apart. They are widened in registers: for few
// rows a copy as floats would not pay. Those in int8 are still to be multiplied by their token's scale.
template <KvType T>
struct Stored {
  const std::byte* data;
  size_t stride;
  __attribute__((always_inline)) F operator()(int k) const {
    const std::byte* p = data + k * stride * kv_element_bytes(T);
    if constexpr (T == KvType::bf16)
      return from_bf16(reinterpret_cast<const uint16_t*>(p));
    else if constexpr (T == KvType::int8)
      return from_int8(reinterpret_cast<const int8_t*>(p));
    else
      return from_fp8(reinterpret_cast<const uint8_t*>(p));
  }
};
// The scales of a block's 16 keys, or values.
HR_INLINE F scales_of(const std::byte* part, int head_dim) {
  return load(reinterpret_cast<const float*>(part + head_dim * kBlockTokens));
}

// A block's keys, or values, as floats.
template <KvType T>
void widen(const std::byte* part, int head_dim, float* out) {
  const Stored<T> stored{part, kLanes};
#pragma GCC unroll 4
  for (int i = 0; i < head_dim; ++i) store(out + i * kLanes, stored(i));
}

// A block's values as floats, the tokens `dim` apart.
template <KvType T>
void widen_values(const std::byte* values, int head_dim, int dim, float* out) {
  widen<T>(values, head_dim, out);
  if (dim == head_dim) return;
  // Then apart, from the last row on, so that none is overwritten before it has moved.
  for (int token = kBlockTokens - 1; token >= 0; --token) {
    __builtin_memmove(out + token * dim, out + token * head_dim, head_dim * sizeof(float));
    for (int d = head_dim; d < dim; ++d) out[token * dim + d] = 0.0f;
  }
}

}  // namespace
}  // namespace headrace::HEADRACE_ISA
