// Dot products of bytes, 4 adjacent in K: 16 sums of 4 products each, weights unsigned, activations signed. They are
// exact on every level.
#pragma once

#include "isa/assembly.h"
#include "isa/simd.h"
#include "packed.h"

namespace tokenmill::TM_ISA {

#if defined(__AVX512F__)

using I32 = __m512i;  // 16 int32, or 16 words of 4 bytes

inline I32 load_bytes(const void* from) { return _mm512_loadu_si512(from); }
inline I32 broadcast_i32(int32_t word) { return _mm512_set1_epi32(word); }
inline I32 low_nibbles(I32 a) { return _mm512_and_si512(a, _mm512_set1_epi8(15)); }
inline I32 high_nibbles(I32 a) { return low_nibbles(_mm512_srli_epi16(a, 4)); }
// Adds 16 where a byte of `line` has its highest bit, and moves the next bits there. Bits of other bytes come in behind.
inline I32 add_fifth_bits(I32 nibbles, I32& line) {
  const I32 fifths = _mm512_and_si512(_mm512_srli_epi16(line, 3), _mm512_set1_epi8(16));
  line = _mm512_slli_epi32(line, 1);
  return _mm512_xor_si512(nibbles, fifths);
}
// The same of two bits each, which become bits 5 and 4.
inline I32 add_high_pairs(I32 nibbles, I32& line) {
  const I32 pairs = _mm512_and_si512(_mm512_srli_epi16(line, 2), _mm512_set1_epi8(48));
  line = _mm512_slli_epi32(line, 2);
  return _mm512_xor_si512(nibbles, pairs);
}
inline F32 to_float(I32 a) { return _mm512_cvtepi32_ps(a); }
// 16 bytes, not negative or signed.
inline F32 load_uint8(const uint8_t* from) {
  return to_float(_mm512_and_si512(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from))),
                                   _mm512_set1_epi32(255)));
}
inline F32 load_int8(const uint8_t* from) {
  return to_float(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from))));
}
inline F32 load_fp16(const uint16_t* from) {
  return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
}
// Rounds to integers; they have to fit.
inline void store_int8(int8_t* to, F32 value) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(to), _mm512_cvtsepi32_epi8(_mm512_cvtps_epi32(value)));
}

#if !defined(__AVX512VNNI__)
// For weights up to 128: the sum of two products has to fit 16 bits.
inline I32 dot_small_bytes(I32 sums, I32 w, I32 x) {
  return _mm512_add_epi32(sums, _mm512_madd_epi16(_mm512_maddubs_epi16(w, x), _mm512_set1_epi16(1)));
}
// For any weights, which mean w - 128: |w - 128| times x with the sign of w - 128.
inline I32 dot_centred(I32 sums, I32 w, I32 x) {
  const I32 signed_w = _mm512_xor_si512(w, _mm512_set1_epi8(-128));
  const I32 signed_x = _mm512_mask_sub_epi8(x, _mm512_movepi8_mask(signed_w), _mm512_setzero_si512(), x);
  return dot_small_bytes(sums, _mm512_abs_epi8(signed_w), signed_x);
}
#endif

#else

struct I32 {
  __m256i low, high;
};

inline I32 load_bytes(const void* from) {
  const auto* low = static_cast<const __m256i*>(from);
  return {_mm256_loadu_si256(low), _mm256_loadu_si256(low + 1)};
}
inline I32 broadcast_i32(int32_t word) { return {_mm256_set1_epi32(word), _mm256_set1_epi32(word)}; }
inline I32 low_nibbles(I32 a) {
  const __m256i mask = _mm256_set1_epi8(15);
  return {_mm256_and_si256(a.low, mask), _mm256_and_si256(a.high, mask)};
}
inline I32 high_nibbles(I32 a) { return low_nibbles({_mm256_srli_epi16(a.low, 4), _mm256_srli_epi16(a.high, 4)}); }
inline __m256i add_fifth_bits(__m256i nibbles, __m256i& line) {
  const __m256i fifths = _mm256_and_si256(_mm256_srli_epi16(line, 3), _mm256_set1_epi8(16));
  line = _mm256_slli_epi32(line, 1);
  return _mm256_xor_si256(nibbles, fifths);
}
// Adds 16 where a byte of `line` has its highest bit, and moves the next bits there. Bits of other bytes come in behind.
inline I32 add_fifth_bits(I32 nibbles, I32& line) {
  return {add_fifth_bits(nibbles.low, line.low), add_fifth_bits(nibbles.high, line.high)};
}
inline __m256i add_high_pairs(__m256i nibbles, __m256i& line) {
  const __m256i pairs = _mm256_and_si256(_mm256_srli_epi16(line, 2), _mm256_set1_epi8(48));
  line = _mm256_slli_epi32(line, 2);
  return _mm256_xor_si256(nibbles, pairs);
}
// The same of two bits each, which become bits 5 and 4.
inline I32 add_high_pairs(I32 nibbles, I32& line) {
  return {add_high_pairs(nibbles.low, line.low), add_high_pairs(nibbles.high, line.high)};
}
inline F32 to_float(I32 a) { return {_mm256_cvtepi32_ps(a.low), _mm256_cvtepi32_ps(a.high)}; }
// 16 bytes, not negative or signed.
inline F32 load_uint8(const uint8_t* from) {
  const auto* low = reinterpret_cast<const __m128i*>(from);
  const auto* high = reinterpret_cast<const __m128i*>(from + 8);
  return to_float({_mm256_cvtepu8_epi32(_mm_loadl_epi64(low)), _mm256_cvtepu8_epi32(_mm_loadl_epi64(high))});
}
inline F32 load_int8(const uint8_t* from) {
  const auto* low = reinterpret_cast<const __m128i*>(from);
  const auto* high = reinterpret_cast<const __m128i*>(from + 8);
  return to_float({_mm256_cvtepi8_epi32(_mm_loadl_epi64(low)), _mm256_cvtepi8_epi32(_mm_loadl_epi64(high))});
}
inline F32 load_fp16(const uint16_t* from) {
  const auto* low = reinterpret_cast<const __m128i*>(from);
  return {_mm256_cvtph_ps(_mm_loadu_si128(low)), _mm256_cvtph_ps(_mm_loadu_si128(low + 1))};
}
inline void store_int8(int8_t* to, F32 value) {
  const __m256i words = _mm256_packs_epi32(_mm256_cvtps_epi32(value.low), _mm256_cvtps_epi32(value.high));
  const __m256i ordered = _mm256_permute4x64_epi64(words, 0xD8);
  const __m128i bytes = _mm_packs_epi16(_mm256_castsi256_si128(ordered), _mm256_extracti128_si256(ordered, 1));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(to), bytes);
}

// For weights up to 128: the sum of two products has to fit 16 bits.
inline __m256i dot_small_bytes(__m256i sums, __m256i w, __m256i x) {
  return _mm256_add_epi32(sums, _mm256_madd_epi16(_mm256_maddubs_epi16(w, x), _mm256_set1_epi16(1)));
}
inline I32 dot_small_bytes(I32 sums, I32 w, I32 x) {
  return {dot_small_bytes(sums.low, w.low, x.low), dot_small_bytes(sums.high, w.high, x.high)};
}
inline __m256i dot_centred(__m256i sums, __m256i w, __m256i x) {
  const __m256i signed_w = _mm256_xor_si256(w, _mm256_set1_epi8(-128));
  return dot_small_bytes(sums, _mm256_abs_epi8(signed_w), _mm256_sign_epi8(x, signed_w));
}
// For any weights, which mean w - 128: |w - 128| times x with the sign of w - 128.
inline I32 dot_centred(I32 sums, I32 w, I32 x) {
  return {dot_centred(sums.low, w.low, x.low), dot_centred(sums.high, w.high, x.high)};
}

#endif  // registers of AVX-512 or AVX2

#if !defined(__AVX512F__)
inline I32 apart(I32 a) { return {apart(a.low), apart(a.high)}; }
#endif

// An entry of a table of 16 bytes for each byte, which is a code below 16.
inline I32 look_up(__m128i table, I32 codes) {
#if defined(__AVX512F__)
  return _mm512_shuffle_epi8(_mm512_broadcast_i32x4(table), codes);
#else
  const __m256i both = _mm256_broadcastsi128_si256(table);
  return {_mm256_shuffle_epi8(both, codes.low), _mm256_shuffle_epi8(both, codes.high)};
#endif
}

// Codes of FP4 (e2m1, the sign in bit 3) in each byte -> twice their numbers plus FP4_ZERO, from 0 to 24.
constexpr int FP4_ZERO = 12;
inline I32 fp4_numbers(I32 codes) {
  return look_up(_mm_setr_epi8(12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0), codes);
}

// What stands for 0 in bytes.
constexpr int INT8_ZERO = 128;
// The numbers of IQ4_NL and IQ4_XS by code.
constexpr int8_t IQ4[] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};
// Codes -> their numbers plus INT8_ZERO.
inline I32 iq4_numbers(I32 codes) {
  const __m128i numbers = _mm_loadu_si128(reinterpret_cast<const __m128i*>(IQ4));
  return look_up(_mm_xor_si128(numbers, _mm_set1_epi8(-128)), codes);
}

// The numbers of half 0 or 1 of a K block's bytes: those of 32 inputs, in the low or the high nibbles.
template <Format F, int Half>
inline I32 nibbles(I32 bytes) {
  const I32 codes = Half ? high_nibbles(bytes) : low_nibbles(bytes);
  if constexpr (F == Format::mxfp4) return fp4_numbers(codes);
  if constexpr (F == Format::iq4) return iq4_numbers(codes);
  return codes;
}
// Whether numbers fill their bytes, as they are stored or looked up.
template <Format F>
constexpr bool HAS_BYTES = F == Format::int8 || F == Format::int8_rotated || F == Format::iq4;
// What stands for 0; with offsets that is added in the end.
template <Format F>
constexpr int ZERO = HAS_BYTES<F>             ? INT8_ZERO
                     : F == Format::mxfp4     ? FP4_ZERO
                     : F == Format::int5      ? 16
                     : F == Format::q6_k      ? 32
                     : F == Format::int4      ? 8
                                              : 0;
// The inputs whose sum is scaled at once, in K steps.
template <Format F>
constexpr int SCALED_STEPS = (F == Format::q6_k ? GROUP_SIZE / 2 : GROUP_SIZE) / 4;

// The bits above the nibbles in half 0 or 1 of a K block, from a K step on that is a multiple of SCALED_STEPS.
template <Format F, int Half, int First>
class HighBits {
 public:
  HighBits() = default;
  explicit HighBits(const uint8_t* k_block) {
    constexpr int64_t LINE = 4 * LANES, at = bits_of(F) == 6 ? 2 * Half + First / 4 : Half;
    if constexpr (bits_of(F) == 5 || bits_of(F) == 6) line_ = load_bytes(k_block + GROUP_SIZE * LANES + at * LINE);
  }
  // The numbers of the next K step, with their high bits.
  inline I32 add(I32 numbers) {
    if constexpr (bits_of(F) == 5) return add_fifth_bits(numbers, line_);
    if constexpr (bits_of(F) == 6) return add_high_pairs(numbers, line_);
    return numbers;
  }

 private:
  I32 line_;
};

// The scales and offsets of a panel's rows for some inputs. Products with units are exact.
template <Format F>
struct PanelScales {
  const uint8_t* scales;  // of a K block
  const uint16_t* units;  // of its 256 inputs, where there are two levels

  PanelScales(const uint8_t* panel, int64_t k_block, int64_t units_bytes)
      : scales(panel + units_bytes + k_block * (number_bytes_of(F) + scale_bytes_of(F)) + number_bytes_of(F)),
        units(reinterpret_cast<const uint16_t*>(panel + k_block * K_BLOCK / UNIT_SIZE * unit_bytes_of(F))) {}

  // `part`: half or, where the sums of 16 inputs are scaled, quarter of the K block.
  inline F32 scale(int part) const {
    if constexpr (F == Format::q6_k) return mul(load_fp16(units), load_int8(scales + part * LANES));
    if constexpr (has_levels(F)) return mul(load_fp16(units), load_uint8(scales + part * LANES));
    return load_fp16(reinterpret_cast<const uint16_t*>(scales) + part * LANES);
  }
  inline F32 offset(int part) const {
    if constexpr (has_levels(F)) {
      return sub(zero(), mul(load_fp16(units + LANES), load_uint8(scales + (2 + part) * LANES)));
    }
    return load_fp16(reinterpret_cast<const uint16_t*>(scales) + (2 + part) * LANES);
  }
};

#if defined(__AVX512VNNI__)
// The instruction takes any bytes, so it multiplies w instead of w - 128; the sums start with -128 times the sum of x.
inline I32 start_centred(int32_t x_sum) { return apart(broadcast_i32(-INT8_ZERO * x_sum)); }
inline I32 dot_centred(I32 sums, I32 w, I32 x) { return dot_bytes(sums, w, x); }
inline I32 dot_small_bytes(I32 sums, I32 w, I32 x) { return dot_bytes(sums, w, x); }
#else
inline I32 start_centred(int32_t) { return apart(broadcast_i32(0)); }
#endif

}  // namespace tokenmill::TM_ISA
