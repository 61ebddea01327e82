// The micro-kernels of AVX2 for two rows of x or more: one panel by as many rows as the 16 registers hold sums of. They
// unpack weights beside the products, which other ports of the processor do.
#include "isa/linear_avx2.h"

#if !defined(__AVX512F__)

#include "isa/bytes.h"

namespace tokenmill::TM_ISA {

namespace {

// A K run: so much of the depth stays in the first-level cache, packed, while all rows of a piece pass by.
constexpr int64_t RUN_BLOCKS = 4;

// One panel over a K run by some rows of x, and their sums so far.
struct RowTile {
  const uint8_t* w;
  int64_t inputs;           // of the run: K blocks, but no padding of bf16
  const uint8_t* x;
  int64_t x_stride;         // bytes
  const float* scales;      // [groups][count], of the run and the rows
  const int32_t* x_sums;
  int64_t count;
  float* sums;
  int64_t stride;
  const uint8_t* prefetch;  // read as `w` is, or null
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
  static constexpr int64_t X_BYTES = 4;

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

// Pairs of int16, inputs 0 and 2, or 1 and 3, of every four: there is no room in 16 bits for two products of bytes. The
// weights are 128 too large, so the sums of a group begin with what that adds too much.
struct Int8Tiles {
  static constexpr int MR = 5, K_STEPS = GROUP_SIZE / 4;  // beside a line of weights, a pair of x and its product
  static constexpr int64_t X_BYTES = 2;
  static constexpr int64_t LINES = 2 * K_STEPS + 1;  // of a K block

  template <int M>
  static void run(const RowTile& tile) {
    for (int64_t block = 0; block < tile.inputs / K_BLOCK; ++block) {
      prefetch_line(tile.prefetch, block * LINES + 2 * K_STEPS);
      add_group<M>(tile, block, 0);
      add_group<M>(tile, block, 1);
    }
  }

  template <int M>
  [[gnu::always_inline]] static void add_group(const RowTile& tile, int64_t block, int64_t half) {
    const int64_t group = 2 * block + half, first = group * tile.count, line = block * LINES + half * K_STEPS;
    __m256i low[M], high[M];
    TM_UNROLL for (int m = 0; m < M; ++m) {
      const int32_t start = -INT8_ZERO * tile.x_sums[first + m];
      low[m] = apart(_mm256_set1_epi32(start));
      high[m] = apart(_mm256_set1_epi32(start));
    }
    const uint8_t *w = tile.w + line * 64, *x = tile.x + group * GROUP_SIZE * X_BYTES;
    TM_UNROLL for (int k_step = 0; k_step < K_STEPS; ++k_step, w += 4 * LANES, x += 4 * X_BYTES) {
      prefetch_line(tile.prefetch, line + k_step);
      const __m256i bytes_low = load_integers(w), bytes_high = load_integers(w + 32), mask = _mm256_set1_epi16(255);
      const __m256i even_low = _mm256_and_si256(bytes_low, mask), even_high = _mm256_and_si256(bytes_high, mask);
      TM_UNROLL for (int m = 0; m < M; ++m) {
        const __m256i numbers = broadcast_word(x + m * tile.x_stride);
        add_pairs(low[m], even_low, numbers);
        add_pairs(high[m], even_high, numbers);
      }
      const __m256i odd_low = _mm256_srli_epi16(bytes_low, 8), odd_high = _mm256_srli_epi16(bytes_high, 8);
      TM_UNROLL for (int m = 0; m < M; ++m) {
        const __m256i numbers = broadcast_word(x + 4 + m * tile.x_stride);
        add_pairs(low[m], odd_low, numbers);
        add_pairs(high[m], odd_high, numbers);
      }
    }
    const uint8_t* halves = tile.w + (block * LINES + 2 * K_STEPS) * 64 + half * LANES * 2;
    const F32 scales = load_fp16(reinterpret_cast<const uint16_t*>(halves));
    TM_UNROLL for (int m = 0; m < M; ++m) {
      float* total = tile.sums + m * tile.stride;
      const F32 sums = to_float(I32{low[m], high[m]});
      store(total, fma(sums, mul(scales, broadcast(tile.scales[first + m])), load(total)));
    }
  }
};

// Bytes. A group's products in a lane of 16 bits, two of each K step, are 16 * 15 * 127 together: less than 2^15. Those of
// mxfp4 are 16 * 24 * 127 and those of int5 16 * 31 * 127, so they are added up in two parts.
template <Format F>
struct Int4Tiles {
  static constexpr bool Offset = F == Format::int4_offset;
  static constexpr int MR = 5, K_STEPS = GROUP_SIZE / 4, PART = NIBBLE_ZERO<F> > 8 ? K_STEPS / 2 : K_STEPS;
  static constexpr int64_t X_BYTES = 1;
  // Of a K block.
  static constexpr int64_t NUMBER_LINES = number_bytes_of(F) / 64, LINES = NUMBER_LINES + (Offset ? 2 : 1);

  template <int M>
  static void run(const RowTile& tile) {
    const uint8_t* w = tile.w;
    for (int64_t block = 0; block < tile.inputs / K_BLOCK; ++block, w += LINES * 64) {
      for (int64_t line = K_STEPS; line < LINES; ++line) prefetch_line(tile.prefetch, block * LINES + line);
      add_group<M, 0>(tile, block, w);
      add_group<M, 1>(tile, block, w);
    }
  }

  // Half 0 or 1 of a K block: the low or high nibbles of its bytes.
  template <int M, int Half>
  [[gnu::always_inline]] static void add_group(const RowTile& tile, int64_t block, const uint8_t* w) {
    __m256i low[M], high[M];
    I32 exact[M];
    const __m256i ones = _mm256_set1_epi16(1);
    const uint8_t* x = tile.x + (2 * block + Half) * GROUP_SIZE;
    I32 fifth_bits;
    if constexpr (F == Format::int5) fifth_bits = load_bytes(w + (K_STEPS + Half) * 4 * LANES);
    TM_UNROLL for (int part = 0; part < K_STEPS; part += PART) {
      TM_UNROLL for (int m = 0; m < M; ++m) low[m] = high[m] = _mm256_setzero_si256();
      for (int k_step = part; k_step < part + PART; ++k_step, x += 4) {
        if (k_step % 2 == Half) prefetch_line(tile.prefetch, block * LINES + k_step);
        I32 numbers = nibbles<F, Half>(load_bytes(w + k_step * 4 * LANES));
        if constexpr (F == Format::int5) numbers = add_fifth_bits(numbers, fifth_bits);
        TM_UNROLL for (int m = 0; m < M; ++m) {
          const __m256i four = broadcast_word(x + m * tile.x_stride);
          add_bytes(low[m], numbers.low, four);
          add_bytes(high[m], numbers.high, four);
        }
      }
      TM_UNROLL for (int m = 0; m < M; ++m) {
        const I32 sums = {_mm256_madd_epi16(low[m], ones), _mm256_madd_epi16(high[m], ones)};
        exact[m] = part == 0 ? sums : I32{_mm256_add_epi32(exact[m].low, sums.low),
                                          _mm256_add_epi32(exact[m].high, sums.high)};
      }
    }
    const auto* halves = reinterpret_cast<const uint16_t*>(w + NUMBER_LINES * 64) + Half * LANES;
    const F32 scales = load_fp16(halves);
    TM_UNROLL for (int m = 0; m < M; ++m) {
      const int64_t at = (2 * block + Half) * tile.count + m;
      const __m256i x_sum = _mm256_set1_epi32(tile.x_sums[at]);
      I32 sums = exact[m];
      if (!Offset) {
        const __m256i too_much = _mm256_set1_epi32(NIBBLE_ZERO<F> * tile.x_sums[at]);
        sums = {_mm256_sub_epi32(sums.low, too_much), _mm256_sub_epi32(sums.high, too_much)};
      }
      const F32 scale = broadcast(tile.scales[at]);
      float* totals = tile.sums + m * tile.stride;
      F32 total = fma(to_float(sums), mul(scales, scale), load(totals));
      if (Offset) {
        const F32 sum = mul(to_float(I32{x_sum, x_sum}), scale);
        total = fma(load_fp16(halves + 2 * LANES), sum, total);
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
  const int64_t offset = p * weights.panel_bytes() + block * block_bytes;
  const int64_t tiles = ceil_div(piece.rows, Tiles::MR);
  for (int64_t i = 0; i < tiles; ++i) {
    // Tiles of nearly equal height. The first one prefetches: each line once.
    const int64_t top = piece.rows * i / tiles, end = piece.rows * (i + 1) / tiles, row = piece.row + top;
    const int64_t scale = 2 * block * piece.x.count + row;  // of the first group
    const RowTile tile = {weights.data + piece.panel * weights.panel_bytes() + offset,
                          inputs,
                          piece.x.data + row * piece.x.stride + first * Tiles::X_BYTES,
                          piece.x.stride,
                          is_bf16 ? nullptr : piece.x.scales + scale,
                          is_bf16 ? nullptr : piece.x.sums + scale,
                          piece.x.count,
                          piece.sums + top * piece.stride + p * LANES,
                          piece.stride,
                          i == 0 && piece.prefetch_panel ? piece.prefetch_panel + offset : nullptr};
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

}  // namespace

void row_tiles_bf16(const MicroTile& tile) { run_row_tiles<Bf16Tiles>(tile); }
void row_tiles_int8(const MicroTile& tile) { run_row_tiles<Int8Tiles>(tile); }
void row_tiles_int4(const MicroTile& tile) { run_row_tiles<Int4Tiles<Format::int4>>(tile); }
void row_tiles_int4_offset(const MicroTile& tile) { run_row_tiles<Int4Tiles<Format::int4_offset>>(tile); }
void row_tiles_int5(const MicroTile& tile) { run_row_tiles<Int4Tiles<Format::int5>>(tile); }
void row_tiles_mxfp4(const MicroTile& tile) { run_row_tiles<Int4Tiles<Format::mxfp4>>(tile); }

}  // namespace tokenmill::TM_ISA

#endif
