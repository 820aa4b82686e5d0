// Linear layers of quantised weights and quantised inputs by tiles, for many rows. Included after kernels_blocks.inl.
//
// A tile adds up the products of one block: 32 inputs of up to sixteen rows times sixteen outputs. These are integers, and
// what is done with them is the chain of kernels_int8.inl, so the bits are those of every other instruction set. That chain
// is what takes most of the time.

namespace headrace::amx {
namespace {

// What one block's sums of products become. An offset is no case of its own: it is part of the weights, which fit a byte.
enum class Form {
  scaled,  // acc = fma(dot, scale * x.scale, acc)
  affine,  // and then acc = fma(min, x.sum, acc)
  halves,  // scaled, where dot is the sum of both halves' dots, each times its factor
};
constexpr Form form_of(WeightType type) {
  switch (type) {
    case WeightType::q4_1:
    case WeightType::q5_1:
    case WeightType::q4_k:
    case WeightType::q5_k: return Form::affine;
    case WeightType::q6_k: return Form::halves;
    default: return Form::scaled;
  }
}

// Added to 1.5 * 2^23, a whole number below 2^22 is in the low bits of the float.
inline constexpr float kInLowBits = 12582912.0f;

// A block of a panel as it is multiplied: one tile of weights, or one for each half, with zeros for the other.
template <Form kForm>
struct alignas(64) TileBlock {
  static constexpr int kTiles = kForm == Form::halves ? 2 : 1;
  uint32_t quads[kTiles][8][kLanes];
  float scale[kLanes];
  float second[kTiles][kLanes];  // the minimum, or both factors
};

HR_INLINE void store_int(uint32_t* p, I x) { _mm512_store_si512(p, x); }

template <WeightType T>
struct DecodeTile {
  const uint32_t* words;
  TileBlock<form_of(T)>& out;
  I lowered;  // what is taken off each weight as it is stored

  __attribute__((always_inline)) void put(int quad, I q) {
    if constexpr (T == WeightType::q6_k) {
      store_int(out.quads[0][quad], bit_and(q, 0x0000ffffu));
      store_int(out.quads[1][quad], bit_and(q, 0xffff0000u));
    } else {
      store_int(out.quads[0][quad], q);
    }
  }
  template <int W>
  __attribute__((always_inline)) void at() {
    auto [even, odd] = quads_at<T, W>(words);
    if constexpr (form_of(T) != Form::affine) {
      even = _mm512_sub_epi8(even, lowered);
      odd = _mm512_sub_epi8(odd, lowered);
    }
    put(W, even);
    put(W + 4, odd);
  }
};

template <WeightType T>
HR_INLINE I lowered_by(const std::byte* panel, int block) {
  if constexpr (has_offset(T)) {  // a whole number from -15 to 0
    const I lowered = bit_and(as_int(sub(set1(kInLowBits), second_of_header<T>(panel, block))), 0xffu);
    const I twice = bit_or(lowered, shift_left<8>(lowered));
    return bit_or(twice, shift_left<16>(twice));
  } else if constexpr (form_of(T) == Form::affine) {
    return zero_int();
  } else {
    return _mm512_set1_epi8(1 << (weight_bits(T) - 1));
  }
}

template <WeightType T>
void decode_tiles(const std::byte* panel, int first, int count, TileBlock<form_of(T)>* out) {
  for (int block = first; block < first + count; ++block, ++out) {
    if constexpr (T == WeightType::q8_0) {
      for (int quad = 0; quad < 8; ++quad)
        store_int(out->quads[0][quad], load_u32(words_of<T>(panel, block) + quad * kLanes));
    } else {
      DecodeTile<T> tile{words_of<T>(panel, block), *out, lowered_by<T>(panel, block)};
      unrolled<4>(tile);
    }
    if constexpr (form_of(T) == Form::affine) {
      const Affine of = affine<T>(panel, block);
      store(out->scale, of.scale);
      store(out->second[0], of.min);
    } else {
      store(out->scale, scale_of<T>(panel, block));
    }
    if constexpr (form_of(T) == Form::halves) {
      const I factors = block_factors<T>(panel, block);
      store(out->second[0], first_of(factors));
      store(out->second[1], second_of(factors));
    }
  }
}

inline constexpr int kFewRows = 8;       // up to as many rows, dot products in vectors are faster
inline constexpr int kTileStretch = 64;  // most blocks decoded at a time
inline constexpr int kTileGroup = 192;   // rows that share them

// Begins the products of a block, which are in tiles 0 and (halves) 1 or, of every other block, in 2 and 3.
template <Form kForm>
HR_INLINE void multiply_block(int nth, const TileBlock<kForm>& w, const QuantBlock* x) {
  constexpr size_t stride = sizeof(QuantBlock);
  if (nth % 2 == 0) {
    _tile_loadd(4, x->q, stride);
    _tile_loadd(5, w.quads[0], 64);
    _tile_zero(0);
    _tile_dpbssd(0, 4, 5);
    if constexpr (kForm == Form::halves) {
      _tile_loadd(5, w.quads[1], 64);
      _tile_zero(1);
      _tile_dpbssd(1, 4, 5);
    }
  } else {
    _tile_loadd(6, x->q, stride);
    _tile_loadd(7, w.quads[0], 64);
    _tile_zero(2);
    _tile_dpbssd(2, 6, 7);
    if constexpr (kForm == Form::halves) {
      _tile_loadd(7, w.quads[1], 64);
      _tile_zero(3);
      _tile_dpbssd(3, 6, 7);
    }
  }
}
template <Form kForm>
HR_INLINE void store_block(int nth, float* dots) {
  if (nth % 2 == 0) {
    _tile_stored(0, dots, 64);
    if constexpr (kForm == Form::halves) _tile_stored(1, dots + 256, 64);
  } else {
    _tile_stored(2, dots, 64);
    if constexpr (kForm == Form::halves) _tile_stored(3, dots + 256, 64);
  }
  before_tile_loads();  // GCC does not know either that tiles write it
}

// use(0), use(1), ... use(R - 1), for which sums of R rows are registers: loops are unrolled too late for that.
template <int R, class Use>
HR_INLINE void each_row(Use use) {
  [&]<int... r>(std::integer_sequence<int, r...>) __attribute__((always_inline)) {
    (use(std::integral_constant<int, r>{}), ...);
  }(std::make_integer_sequence<int, R>{});
}

// acc[r] += the panel's 16 outputs times a block of row r, x[r], whose sums are known: dots[tile][row][16].
template <Form kForm, int R>
HR_INLINE void add_block(const TileBlock<kForm>& w, const QuantBlock* x, const float* dots, F (&acc)[R]) {
  // While tiles are at work, only one of two ports multiplies floats and converts to them; the other adds.
  const F shift = set1(kInLowBits);
  const auto sums = [&](int tile, int r) __attribute__((always_inline)) {
    return sub(as_float(add_u32(as_int(load(dots + tile * 256 + r * kLanes)), as_int(shift))), shift);
  };
  const F scale = load(w.scale);
  each_row<R>([&](auto r) __attribute__((always_inline)) {
    const QuantBlock& row = x[r];
    F dot = sums(0, r);
    // Whole numbers, whose products and sum are below 2^24. A sum of zero has the sign that an integer's has.
    if constexpr (kForm == Form::halves) dot = fma(sums(1, r), load(w.second[1]), fma(dot, load(w.second[0]), zero()));
    acc[r] = fma(dot, mul(scale, set1(row.scale)), acc[r]);
    if constexpr (kForm == Form::affine) acc[r] = fma(load(w.second[0]), set1(row.sum), acc[r]);
  });
}

// Memory that is read after this, fetched line by line as blocks are computed.
struct Lines {
  const std::byte* next;
  int count, per_block;

  // What the nth tile of rows fetches of `bytes`.
  static Lines of_tile(const std::byte* from, size_t bytes, int nth, int num_tiles, int blocks) {
    const int all = from ? static_cast<int>((bytes + 63) / 64) : 0;
    const int first = all * nth / num_tiles, count = all * (nth + 1) / num_tiles - first;
    return {from + first * 64, count, (count + blocks - 1) / blocks};
  }
  HR_INLINE void fetch(Lines& lines) {
    for (int n = least(lines.count, lines.per_block); n > 0; --n, --lines.count, lines.next += 64)
      __builtin_prefetch(lines.next);
  }
};

// Some blocks of a panel, of which there is at least one, and what is kept of the sums of those before.
template <Form kForm>
struct Stretch {
  const TileBlock<kForm>* weights;
  int panel, first, blocks;
};

// Sixteen outputs of R rows. What a tile gives takes long to come, so the products of each block are under way while the
// sums of the one before are stored, and those of the one before that are added.
template <Form kForm, int R>
void add_rows(const LinearSpan& s, const Stretch<kForm>& stretch, int row, Lines lines, float* kept) {
  F acc[R];
  each_row<R>([&](auto r) __attribute__((always_inline)) {
    acc[r] = stretch.first > 0 ? load(kept + r * kLanes) : zero();
  });
  alignas(64) float dots[2][TileBlock<kForm>::kTiles * 256];
  const TileBlock<kForm>* w = stretch.weights;
  const QuantBlock* x = s.x_int8 + row * s.x_stride + stretch.first * kLanes;
  const int blocks = stretch.blocks;
  const bool is_last = (stretch.first + blocks) * 32 == s.num_inputs;
  // Stores are done in order: those of outputs, waiting for their lines, would keep the sums of the next tile.
  if (is_last)
    for (int r = 0; r < R; ++r) __builtin_prefetch(s.out + (row + r) * s.out_stride + stretch.panel * kLanes, 1);
  before_tile_loads();
  multiply_block<kForm>(0, *w, x);
  for (int i = 1; i < blocks; ++i, ++w, x += kLanes) {
    multiply_block<kForm>(i, w[1], x + kLanes);
    Lines::fetch(lines);
    if (i > 1) add_block<kForm, R>(w[-1], x - kLanes, dots[i % 2], acc);
    store_block<kForm>(i - 1, dots[(i - 1) % 2]);
  }
  if (blocks > 1) add_block<kForm, R>(w[-1], x - kLanes, dots[blocks % 2], acc);
  store_block<kForm>(blocks - 1, dots[(blocks - 1) % 2]);
  add_block<kForm, R>(*w, x, dots[(blocks - 1) % 2], acc);
  if (is_last) {
    F done[R];
    each_row<R>([&](auto r) __attribute__((always_inline)) { done[r] = acc[r]; });
    finish_rows<R>(s, stretch.panel, done, row);
  } else {
    each_row<R>([&](auto r) __attribute__((always_inline)) { store(kept + r * kLanes, acc[r]); });
  }
}

template <Form kForm, int R = 16>
HR_INLINE void add_tile(const LinearSpan& s, const Stretch<kForm>& stretch, int row, int height, Lines lines, float* kept) {
  if constexpr (R > 0) {
    if (height == R) return add_rows<kForm, R>(s, stretch, row, lines, kept);
    add_tile<kForm, R - 1>(s, stretch, row, height, lines, kept);
  }
}

constexpr TileShapes whole_shapes() {
  TileShapes shapes;
  for (int sums = 0; sums < 4; ++sums) shapes.with(sums, kLanes, 64);
  return shapes.with(4, kLanes, 32).with(6, kLanes, 32).with(5, 8, 64).with(7, 8, 64);
}

template <WeightType T>
void tile_panels(const LinearSpan& s) {
  constexpr Form kForm = form_of(T);
  alignas(64) float kept[kTileGroup * kLanes];
  TileBlock<kForm> weights[kTileStretch];
  const int num_tiles = (s.rows + kLanes - 1) / kLanes;
  static constexpr TileShapes kShapes = whole_shapes();
  const Tiles tiles(kShapes);
  const int all = s.num_inputs / 32, stretches = (all + kTileStretch - 1) / kTileStretch;
  for (int panel = 0; panel < s.num_panels; ++panel)
    for (int i = 0, first = 0; i < stretches; ++i) {
      const int blocks = (all - first) / (stretches - i), end = first + blocks;
      const std::byte* weights_of_panel = s.panels + panel * s.panel_bytes;
      decode_tiles<T>(weights_of_panel, first, blocks, weights);
      const bool is_last = panel + 1 == s.num_panels && end == all;
      const std::byte* after = is_last ? s.next : weights_of_panel + end * step_bytes(T);
      for (int t = 0; t < num_tiles; ++t) {
        const int row = t * kLanes, height = least(s.rows - row, kLanes);  // what a tile has beyond them is not looked at
        const Lines lines = Lines::of_tile(after, blocks * step_bytes(T), t, num_tiles, blocks);
        add_tile<kForm>(s, {weights, panel, first, blocks}, row, height, lines, kept + row * kLanes);
      }
      first = end;
    }
}

void linear_int8(const LinearSpan& s) {
  if (s.rows <= kFewRows) return avx512_kernels()->linear_int8(s);
  switch (s.type) {
    case WeightType::q4_0: return tile_panels<WeightType::q4_0>(s);
    case WeightType::q4_1: return tile_panels<WeightType::q4_1>(s);
    case WeightType::q5_0: return tile_panels<WeightType::q5_0>(s);
    case WeightType::q5_1: return tile_panels<WeightType::q5_1>(s);
    case WeightType::q8_0: return tile_panels<WeightType::q8_0>(s);
    case WeightType::q4_g32: return tile_panels<WeightType::q4_g32>(s);
    case WeightType::q4_g128: return tile_panels<WeightType::q4_g128>(s);
    case WeightType::q4_k: return tile_panels<WeightType::q4_k>(s);
    case WeightType::q5_k: return tile_panels<WeightType::q5_k>(s);
    case WeightType::q6_k: return tile_panels<WeightType::q6_k>(s);
    default: return avx512_kernels()->linear_int8(s);
  }
}

}  // namespace
}  // namespace headrace::amx
