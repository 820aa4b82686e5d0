// Linear layers of weights of four bits and inputs of twelve by tiles: see Kernels::linear_int12. Included after
// kernels_amx_int8.inl and kernels_scales.inl.
//
// A tile multiplies high or low of 64 inputs of up to sixteen rows and of as many outputs. Nothing else is to be done until
// the last input.

namespace headrace::amx {
namespace {

inline constexpr int kFewInt12Rows = 4;  // up to as many rows, dot products in vectors are faster
inline constexpr int kInt12Steps = 9;    // of 64 inputs, decoded at a time: 18 KiB of the first-level cache

// 64 inputs of a panel as tiles: weights are 16 * high + low.
struct alignas(64) Int12Tiles {
  uint32_t high[kLanes][kLanes], low[kLanes][kLanes];
};

// Of s and c in the halves of lanes: s in both, and c - 8 * s in each byte.
struct ByteScales {
  I scale, offset;

  static __attribute__((always_inline)) ByteScales of(I scales) {
    const I scale = bit_and(scales, 0xffffu), pairs = bit_or(scale, shift_left<16>(scale));
    const I offset = _mm512_sub_epi32(shift_right<16>(scales), shift_left<3>(scale));
    const I first_bytes = _mm512_set4_epi32(0x0c0c0c0c, 0x08080808, 0x04040404, 0);
    return {pairs, _mm512_shuffle_epi8(offset, first_bytes)};
  }
  // Two bytes that s multiplies keep apart: 15 * 15 < 256.
  __attribute__((always_inline)) I weights(I q) const {
    return _mm512_add_epi8(_mm512_mullo_epi16(q, scale), offset);
  }
};

template <WeightType T>
struct DecodeInt12 {
  const uint32_t* words;
  I flips;
  ByteScales high, low;
  uint32_t (*highs)[kLanes], (*lows)[kLanes];

  __attribute__((always_inline)) void put(int quad, I q) {
    store_int(highs[quad], high.weights(q));
    store_int(lows[quad], low.weights(q));
  }
  template <int W>
  __attribute__((always_inline)) void at() {
    const auto [even, odd] = quads_at<T, W>(words);
    put(W, bit_xor(even, flips));
    put(W + 4, bit_xor(odd, flips));
  }
};

// Blocks of a panel from `first` on, an even one. Fetches the same ones of the panel after it.
template <WeightType T>
void decode_int12(const std::byte* panel, F inverse, int first, int count, const Ahead& ahead, Int12Tiles* out) {
  for (int i = 0; i < count; ++i) {
    ahead.fetch(0, (first + i) * step_bytes(T), step_bytes(T));
    const WholeScales scales = whole_scales<T>(panel, first + i, inverse);
    const int row = i % 2 * 8;
    DecodeInt12<T> decode{words_of<T>(panel, first + i), scales.flips,           ByteScales::of(scales.high),
                          ByteScales::of(scales.low),    out[i / 2].high + row, out[i / 2].low + row};
    unrolled<4>(decode);
  }
  if (count % 2 != 0) {
    std::memset(out[count / 2].high[8], 0, 8 * sizeof out->high[0]);
    std::memset(out[count / 2].low[8], 0, 8 * sizeof out->low[0]);
  }
}

struct Int12Scratch {
  Int12Tiles weights[kInt12Steps];
  alignas(64) int32_t sums[kTileGroup / kLanes][2 * 256];  // of tiles of rows: highs, middle
};

// Adds some steps of a tile of rows to its sums, which are in tiles 0 and 1 meanwhile.
HR_INLINE void add_int12(const Int12Tiles* w, const std::byte* x, int steps, bool is_first, int32_t* sums) {
  if (is_first) {
    _tile_zero(0);
    _tile_zero(1);
  } else {
    _tile_loadd(0, sums, 64);
    _tile_loadd(1, sums + 256, 64);
  }
  for (int n = 0; n < steps; ++n, ++w, x += 2 * kInt12Inputs * kLanes) {
    _tile_loadd(4, x, 64);
    _tile_loadd(6, w->high, 64);
    _tile_dpbssd(0, 4, 6);
    _tile_loadd(5, x + kInt12Inputs * kLanes, 64);
    _tile_dpbssd(1, 5, 6);
    _tile_loadd(7, w->low, 64);
    _tile_dpbssd(1, 4, 7);
  }
  _tile_stored(0, sums, 64);
  _tile_stored(1, sums + 256, 64);
  before_tile_loads();
}

HR_INLINE void finish_int12(const LinearSpan& s, int panel, const Units& units, int row, const int32_t* sums) {
  const int height = least(s.rows - row, kLanes), column = panel * kLanes;
  const bool is_whole = s.num_outputs - column >= kLanes && !s.bias;
  alignas(64) float outputs[kLanes * kLanes];
  float* out = is_whole ? s.out + row * s.out_stride + column : outputs;
  const size_t stride = is_whole ? s.out_stride : kLanes;
  for (int r = 0; r < height; ++r) {
    const F highs = to_float(_mm512_load_si512(sums + r * kLanes));
    const F sum = fma(highs, set1(16.0f), to_float(_mm512_load_si512(sums + 256 + r * kLanes)));
    store(out + r * stride, mul(sum, mul(units.of_16, set1(s.x_scales[row + r]))));
  }
  if (!is_whole) finish_panel(s, panel, height, outputs, row);
}

template <WeightType T>
void int12_panel(const LinearSpan& s, int panel, Int12Scratch& scratch) {
  const int num_tiles = (s.rows + kLanes - 1) / kLanes, steps = (s.num_inputs + kInt12Inputs - 1) / kInt12Inputs;
  const int stretches = (steps + kInt12Steps - 1) / kInt12Steps;
  const size_t tile_bytes = int12_row_bytes(s.num_inputs, true) * kLanes;
  const Units units = units_of(s.bounds + panel * kLanes);
  const Ahead ahead = Ahead::of(s, panel, 1);
  for (int i = 0, first = 0, count; i < stretches; ++i, first += count) {
    count = (steps - first) / (stretches - i);
    const int blocks = least(2 * count, s.num_inputs / 32 - 2 * first);
    decode_int12<T>(s.panels + panel * s.panel_bytes, units.inverse, 2 * first, blocks, ahead, scratch.weights);
    before_tile_loads();
    for (int t = 0; t < num_tiles; ++t) {
      const std::byte* x = s.x_int12 + t * tile_bytes + first * (2 * kInt12Inputs * kLanes);
      add_int12(scratch.weights, x, count, first == 0, scratch.sums[t]);
      if (i + 1 == stretches) finish_int12(s, panel, units, t * kLanes, scratch.sums[t]);
    }
  }
}

void linear_int12(const LinearSpan& s) {
  if (s.rows <= kFewInt12Rows) return avx512_kernels()->linear_int12(s);
  TileShapes shapes;
  const int height = least(s.rows, kLanes);
  for (int tile : {0, 1, 4, 5}) shapes.with(tile, height, 64);
  const Tiles tiles(shapes.with(6, kLanes, 64).with(7, kLanes, 64));
  Int12Scratch scratch;
  with_four_bits(s.type, [&](auto t) {
    for (int panel = 0; panel < s.num_panels; ++panel) int12_panel<decltype(t)::value>(s, panel, scratch);
  });
}

}  // namespace
}  // namespace headrace::amx
