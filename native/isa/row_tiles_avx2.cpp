// The micro-kernels of AVX2 for two rows of x or more: one panel by as many rows as the 16 registers hold sums of. They
// unpack weights beside the products, which other ports of the processor do.
#include "isa/linear_avx2.h"

#if !defined(__AVX512F__)

#include "isa/bytes.h"

namespace tokenmill::TM_ISA {

namespace {

// A K run: so much of the depth stays in the first-level cache, packed, while all rows of a piece pass by.
constexpr int64_t RUN_BLOCKS = UNIT_SIZE / K_BLOCK;

// One panel over a K run by some rows of x, and their sums so far.
struct RowTile {
  const uint8_t* w;
  int64_t inputs;           // of the run: K blocks, but no padding of bf16
  const uint8_t* x;
  int64_t x_stride;         // bytes
  const float* scales;      // [groups][count] of x, of the run and the rows
  const int32_t* x_sums;    // of the inputs that are scaled at once
  int64_t count;
  float* sums;
  int64_t stride;
  const uint8_t* prefetch;  // read as `w` is, or null
  const uint8_t* panel;     // of which the run begins at K block `first_block`
  int64_t first_block, units_bytes;
};

inline void prefetch_line(const uint8_t* lines, int64_t line) {
  if (lines) prefetch_l2(lines + line * 64);
}

inline __m256i load_integers(const void* from) { return _mm256_loadu_si256(static_cast<const __m256i*>(from)); }
inline __m256i broadcast_word(const uint8_t* from) {
  return _mm256_set1_epi32(static_cast<int32_t>(load_word(from)));
}

// Products and their addition in place, as `add_product`.
inline void add_pairs(__m256i& sums, __m256i w, __m256i x) {
  __m256i products;
  asm("vpmaddwd %2, %3, %1\n\tvpaddd %1, %0, %0" : "+x"(sums), "=&x"(products) : "x"(w), "x"(x));
}
inline void add_bytes(__m256i& sums, __m256i w, __m256i x) {
  __m256i products;
  asm("vpmaddubsw %3, %2, %1\n\tvpaddw %1, %0, %0" : "+x"(sums), "=&x"(products) : "x"(w), "x"(x));
}

// Each sum runs over pairs of the depth in order, the odd number of a pair first, as in the micro-kernel of one row.
struct Bf16Tiles {
  static constexpr int MR = 6;  // beside a line of weights and a number of x
  static constexpr int64_t X_BYTES = 4, SCALES = 2 * RUN_BLOCKS, SUMS = SCALES;

  template <int M>
  static void run(const RowTile& tile) {
    F32 sums[M];
    TM_UNROLL for (int m = 0; m < M; ++m) sums[m] = load(tile.sums + m * tile.stride);
    const auto* x = reinterpret_cast<const float*>(tile.x);
    const auto* w = reinterpret_cast<const uint16_t*>(tile.w);
    const int64_t stride = tile.x_stride / 4;
    for (int64_t k = 0; k < tile.inputs; k += 2) {
      prefetch_line(tile.prefetch, k / 2);
      const F32 odd = load_odd_bf16(w + k * LANES);
      TM_UNROLL for (int m = 0; m < M; ++m) add_product(sums[m], odd, broadcast(x[m * stride + k + 1]));
      const F32 even = load_even_bf16(w + k * LANES);
      TM_UNROLL for (int m = 0; m < M; ++m) add_product(sums[m], even, broadcast(x[m * stride + k]));
    }
    TM_UNROLL for (int m = 0; m < M; ++m) store(tile.sums + m * tile.stride, sums[m]);
  }
};

// Where a panel's K run lies in it, for the scales of two levels.
template <Format F>
inline PanelScales<F> scales_of(const RowTile& tile, int64_t block) {
  return PanelScales<F>(tile.panel, tile.first_block + block, tile.units_bytes);
}

// The products of a K step of bytes by M rows of x, which are pairs of int16.
template <int M>
[[gnu::always_inline]] inline void add_step(I32 bytes, const uint8_t* x, int64_t stride, __m256i (&low)[M],
                                            __m256i (&high)[M]) {
  const __m256i mask = _mm256_set1_epi16(255);
  const __m256i even_low = _mm256_and_si256(bytes.low, mask), even_high = _mm256_and_si256(bytes.high, mask);
  TM_UNROLL for (int m = 0; m < M; ++m) {
    const __m256i numbers = broadcast_word(x + m * stride);
    add_pairs(low[m], even_low, numbers);
    add_pairs(high[m], even_high, numbers);
  }
  const __m256i odd_low = _mm256_srli_epi16(bytes.low, 8), odd_high = _mm256_srli_epi16(bytes.high, 8);
  TM_UNROLL for (int m = 0; m < M; ++m) {
    const __m256i numbers = broadcast_word(x + 4 + m * stride);
    add_pairs(low[m], odd_low, numbers);
    add_pairs(high[m], odd_high, numbers);
  }
}

// Pairs of int16, inputs 0 and 2, or 1 and 3, of every four: there is no room in 16 bits for two products of bytes. The
// weights are 128 too large, so the sums of a group begin with what that adds too much.
template <Format F>
struct ByteTiles {
  static constexpr int MR = 5, K_STEPS = GROUP_SIZE / 4;  // beside a line of weights, a pair of x and its product
  static constexpr int64_t X_BYTES = 2;
  // Of a run.
  static constexpr int64_t SCALES = 2 * RUN_BLOCKS, SUMS = SCALES;
  // Of a K block.
  static constexpr int64_t NUMBER_LINES = number_bytes_of(F) / 64, LINES = NUMBER_LINES + 1;

  template <int M>
  static void run(const RowTile& tile) {
    for (int64_t block = 0; block < tile.inputs / K_BLOCK; ++block) {
      prefetch_line(tile.prefetch, block * LINES + NUMBER_LINES);
      add_group<M, 0>(tile, block);
      add_group<M, 1>(tile, block);
    }
  }

  template <int M, int Half>
  [[gnu::always_inline]] static void add_group(const RowTile& tile, int64_t block) {
    constexpr bool HasNibbles = F != Format::int8;
    const int64_t group = 2 * block + Half, first = group * tile.count;
    const int64_t line = block * LINES + (HasNibbles ? 0 : Half * K_STEPS);
    __m256i low[M], high[M];
    TM_UNROLL for (int m = 0; m < M; ++m) {
      const int32_t start = -INT8_ZERO * tile.x_sums[first + m];
      low[m] = apart(_mm256_set1_epi32(start));
      high[m] = apart(_mm256_set1_epi32(start));
    }
    const uint8_t *w = tile.w + line * 64, *x = tile.x + group * GROUP_SIZE * X_BYTES;
    TM_UNROLL for (int k_step = 0; k_step < K_STEPS; ++k_step, w += 4 * LANES, x += 4 * X_BYTES) {
      if (!HasNibbles || k_step % 2 == Half) prefetch_line(tile.prefetch, line + k_step);
      I32 bytes = load_bytes(w);
      if constexpr (HasNibbles) bytes = nibbles<F, Half>(bytes);
      add_step(bytes, x, tile.x_stride, low, high);
    }
    const F32 scales = scales_of<F>(tile, block).scale(Half);
    TM_UNROLL for (int m = 0; m < M; ++m) {
      float* total = tile.sums + m * tile.stride;
      const F32 sums = to_float(I32{low[m], high[m]});
      store(total, fma(sums, mul(scales, broadcast(tile.scales[first + m])), load(total)));
    }
  }
};

// As above, of rotated int8: a run has one scale of x, and the scales of the weights come last.
struct RotatedTiles {
  static constexpr int MR = 5;
  static constexpr int64_t X_BYTES = 2, SCALES = 1, SUMS = 1;  // the last two of a run

  template <int M>
  static void run(const RowTile& tile) {
    __m256i low[M], high[M];
    TM_UNROLL for (int m = 0; m < M; ++m) {
      const __m256i start = _mm256_set1_epi32(-INT8_ZERO * tile.x_sums[m]);
      low[m] = apart(start);
      high[m] = apart(start);
    }
    const uint8_t *w = tile.w, *x = tile.x;
    for (int64_t k_step = 0; k_step < tile.inputs / 4; ++k_step, w += 4 * LANES, x += 4 * X_BYTES) {
      prefetch_line(tile.prefetch, k_step);
      add_step(load_bytes(w), x, tile.x_stride, low, high);
    }
    TM_UNROLL for (int m = 0; m < M; ++m) {
      float* total = tile.sums + m * tile.stride;
      store(total, fma(to_float(I32{low[m], high[m]}), broadcast(tile.scales[m]), load(total)));
    }
  }
};

// Bytes. A group's products in a lane of 16 bits, two of each K step, are 16 * 15 * 127 together: less than 2^15. Those of
// larger numbers are added up in parts: 24 of mxfp4 and 31 of five bits in two, 63 of six bits in four.
template <Format F>
struct NibbleTiles {
  static constexpr int K_STEPS = GROUP_SIZE / 4, STEPS = SCALED_STEPS<F>;
  static constexpr int MR = 5, PART = bits_of(F) == 6 ? 2 : bits_of(F) == 5 || F == Format::mxfp4 ? 4 : 8;
  static constexpr int64_t X_BYTES = 1;
  // Of a run.
  static constexpr int64_t SCALES = 2 * RUN_BLOCKS, SUMS = SCALES * K_STEPS / STEPS;
  // Of a K block.
  static constexpr int64_t NUMBER_LINES = number_bytes_of(F) / 64, LINES = NUMBER_LINES + scale_bytes_of(F) / 64;

  template <int M>
  static void run(const RowTile& tile) {
    const uint8_t* w = tile.w;
    for (int64_t block = 0; block < tile.inputs / K_BLOCK; ++block, w += LINES * 64) {
      for (int64_t line = K_STEPS; line < LINES; ++line) prefetch_line(tile.prefetch, block * LINES + line);
      add_part<M, 0, 0>(tile, block, w);
      if constexpr (STEPS < K_STEPS) add_part<M, 0, STEPS>(tile, block, w);
      add_part<M, 1, 0>(tile, block, w);
      if constexpr (STEPS < K_STEPS) add_part<M, 1, STEPS>(tile, block, w);
    }
  }

  // Half 0 or 1 of a K block: the low or high nibbles of its bytes; of these the K steps from First on that are scaled at
  // once.
  template <int M, int Half, int First>
  [[gnu::always_inline]] static void add_part(const RowTile& tile, int64_t block, const uint8_t* w) {
    constexpr int PARTS = K_STEPS / STEPS, Part = Half * PARTS + First / STEPS;
    __m256i low[M], high[M];
    I32 exact[M];
    const __m256i ones = _mm256_set1_epi16(1);
    const uint8_t* x = tile.x + (2 * block + Half) * GROUP_SIZE + First * 4;
    HighBits<F, Half, First> high_bits(w);
    TM_UNROLL for (int part = First; part < First + STEPS; part += PART) {
      TM_UNROLL for (int m = 0; m < M; ++m) low[m] = high[m] = _mm256_setzero_si256();
      for (int k_step = part; k_step < part + PART; ++k_step, x += 4) {
        if (k_step % 2 == Half) prefetch_line(tile.prefetch, block * LINES + k_step);
        const I32 numbers = high_bits.add(nibbles<F, Half>(load_bytes(w + k_step * 4 * LANES)));
        TM_UNROLL for (int m = 0; m < M; ++m) {
          const __m256i four = broadcast_word(x + m * tile.x_stride);
          add_bytes(low[m], numbers.low, four);
          add_bytes(high[m], numbers.high, four);
        }
      }
      TM_UNROLL for (int m = 0; m < M; ++m) {
        const I32 sums = {_mm256_madd_epi16(low[m], ones), _mm256_madd_epi16(high[m], ones)};
        exact[m] = part == First ? sums : I32{_mm256_add_epi32(exact[m].low, sums.low),
                                              _mm256_add_epi32(exact[m].high, sums.high)};
      }
    }
    const PanelScales<F> scales = scales_of<F>(tile, block);
    const F32 own = scales.scale(Part);
    TM_UNROLL for (int m = 0; m < M; ++m) {
      const int32_t x_sum = tile.x_sums[(2 * PARTS * block + Part) * tile.count + m];
      I32 sums = exact[m];
      if (!has_offsets(F)) {
        const __m256i too_much = _mm256_set1_epi32(ZERO<F> * x_sum);
        sums = {_mm256_sub_epi32(sums.low, too_much), _mm256_sub_epi32(sums.high, too_much)};
      }
      const F32 scale = broadcast(tile.scales[(2 * block + Half) * tile.count + m]);
      float* totals = tile.sums + m * tile.stride;
      F32 total = fma(to_float(sums), mul(own, scale), load(totals));
      if constexpr (has_offsets(F)) {
        const F32 sum = mul(broadcast(static_cast<float>(x_sum)), scale);
        total = fma(scales.offset(Part), sum, total);
      }
      store(totals, total);
    }
  }
};

// Tiles::run<rows> for every number of rows.
template <class Tiles, int... Row>
void run_tile(int rows, const RowTile& tile, std::integer_sequence<int, Row...>) {
  static constexpr void (*functions[])(const RowTile&) = {Tiles::template run<Row + 1>...};
  functions[rows - 1](tile);
}

// All rows of a piece by one panel over the K run that begins at K block `block`.
template <class Tiles>
void run_panel(const MicroTile& piece, int p, int64_t block) {
  const Packed& weights = piece.weights;
  const bool is_bf16 = weights.format == Format::bf16;
  const int64_t block_bytes = is_bf16 ? K_BLOCK * LANES * 2 : weights.k_block_bytes(), first = block * K_BLOCK;
  const int64_t depth = is_bf16 ? (weights.depth + 1) / 2 * 2 : weights.k_blocks() * K_BLOCK;
  const int64_t inputs = depth - first < RUN_BLOCKS * K_BLOCK ? depth - first : RUN_BLOCKS * K_BLOCK;
  const int64_t units_bytes = is_bf16 ? 0 : weights.units_bytes();
  const int64_t offset = p * weights.panel_bytes() + units_bytes + block * block_bytes;
  const int64_t tiles = ceil_div(piece.rows, Tiles::MR);
  for (int64_t i = 0; i < tiles; ++i) {
    // Tiles of nearly equal height. The first one prefetches: each line once.
    const int64_t top = piece.rows * i / tiles, end = piece.rows * (i + 1) / tiles, row = piece.row + top;
    // Of the first group, and of the inputs that are scaled at once; of rotated int8 a run has one of each.
    const int64_t scale = Tiles::SCALES * block / RUN_BLOCKS * piece.x.count + row;
    const int64_t sum = Tiles::SUMS * block / RUN_BLOCKS * piece.x.count + row;
    const RowTile tile = {weights.data + piece.panel * weights.panel_bytes() + offset,
                          inputs,
                          piece.x.data + row * piece.x.stride + first * Tiles::X_BYTES,
                          piece.x.stride,
                          is_bf16 ? nullptr : piece.x.scales + scale,
                          is_bf16 ? nullptr : piece.x.sums + sum,
                          piece.x.count,
                          piece.sums + top * piece.stride + p * LANES,
                          piece.stride,
                          i == 0 && piece.prefetch_panel ? piece.prefetch_panel + offset : nullptr,
                          weights.data + (piece.panel + p) * weights.panel_bytes(),
                          block,
                          units_bytes};
    run_tile<Tiles>(static_cast<int>(end - top), tile, std::make_integer_sequence<int, Tiles::MR>());
  }
}

template <class Tiles>
void run_row_tiles(const MicroTile& piece) {
  for (int m = 0; m < piece.rows; ++m) {
    for (int p = 0; p < piece.panels; ++p) store(piece.sums + m * piece.stride + p * LANES, zero());
  }
  for (int64_t block = 0; block < piece.weights.k_blocks(); block += RUN_BLOCKS) {
    for (int p = 0; p < piece.panels; ++p) run_panel<Tiles>(piece, p, block);
  }
}

// Multiplies sums by the scales of the panels' rows.
void scale_rows(const MicroTile& piece) {
  for (int p = 0; p < piece.panels; ++p) {
    const uint8_t* panel = piece.weights.data + (piece.panel + p) * piece.weights.panel_bytes();
    const F32 scales = load(reinterpret_cast<const float*>(panel));
    for (int m = 0; m < piece.rows; ++m) {
      float* sums = piece.sums + m * piece.stride + p * LANES;
      store(sums, mul(load(sums), scales));
    }
  }
}

}  // namespace

void row_tiles_bf16(const MicroTile& tile) { run_row_tiles<Bf16Tiles>(tile); }
void row_tiles_int8(const MicroTile& tile) { run_row_tiles<ByteTiles<Format::int8>>(tile); }
void row_tiles_int8_rotated(const MicroTile& tile) {
  run_row_tiles<RotatedTiles>(tile);
  scale_rows(tile);
}
void row_tiles_iq4(const MicroTile& tile) { run_row_tiles<ByteTiles<Format::iq4>>(tile); }
void row_tiles_int4(const MicroTile& tile) { run_row_tiles<NibbleTiles<Format::int4>>(tile); }
void row_tiles_int4_offset(const MicroTile& tile) { run_row_tiles<NibbleTiles<Format::int4_offset>>(tile); }
void row_tiles_int5(const MicroTile& tile) { run_row_tiles<NibbleTiles<Format::int5>>(tile); }
void row_tiles_int5_offset(const MicroTile& tile) { run_row_tiles<NibbleTiles<Format::int5_offset>>(tile); }
void row_tiles_q4_k(const MicroTile& tile) { run_row_tiles<NibbleTiles<Format::q4_k>>(tile); }
void row_tiles_q5_k(const MicroTile& tile) { run_row_tiles<NibbleTiles<Format::q5_k>>(tile); }
void row_tiles_q6_k(const MicroTile& tile) { run_row_tiles<NibbleTiles<Format::q6_k>>(tile); }
void row_tiles_mxfp4(const MicroTile& tile) { run_row_tiles<NibbleTiles<Format::mxfp4>>(tile); }

}  // namespace tokenmill::TM_ISA

#endif
