// Functions of double numbers, by additions, products and shifts alone: the same bits on every processor, and loops that
// compilers turn into vectors. Nothing is fused but by `__builtin_fma`.
#pragma once

#include <cstdint>
#include <cstring>

namespace tokenmill::TM_ISA {

inline uint64_t bits_of(double value) {
  uint64_t bits;
  std::memcpy(&bits, &value, 8);
  return bits;
}
inline double of_bits(uint64_t bits) {
  double value;
  std::memcpy(&value, &bits, 8);
  return value;
}

// Added to a number below 2^51, it leaves its nearest integer in the low bits of the sum.
constexpr double TO_INTEGER = 6755399441055744.0;  // 1.5 * 2^52

// 1 / n!
constexpr double INVERSE_FACTORIALS[] = {
    1.0,
    1.0,
    1.0 / 2,
    1.0 / 6,
    1.0 / 24,
    1.0 / 120,
    1.0 / 720,
    1.0 / 5040,
    1.0 / 40320,
    1.0 / 362880,
    1.0 / 3628800,
    1.0 / 39916800,
    1.0 / 479001600,
    1.0 / 6227020800,
    1.0 / 87178291200,
    1.0 / 1307674368000,
    1.0 / 20922789888000,
    1.0 / 355687428096000,
};

// The sums of r^n / n! from n = N on, and of every second of these with changing signs, divided by r^N: by recursion, for
// compilers turn no loop around a loop into vectors.
template <int N, int LAST>
inline double exp_series(double r) {
  if constexpr (N == LAST) return INVERSE_FACTORIALS[N];
  else return __builtin_fma(exp_series<N + 1, LAST>(r), r, INVERSE_FACTORIALS[N]);
}
template <int N>
inline double alternating_series(double square) {
  if constexpr (N >= 16) return INVERSE_FACTORIALS[N];
  else return INVERSE_FACTORIALS[N] - alternating_series<N + 2>(square) * square;
}

// e^x for x <= 0, within 10^-11 of itself with nine powers, within 10^-15 with thirteen; about 10^-307 below -708.
template <int POWERS = 9>
inline double exp_of_negative(double x) {
  // x = n ln 2 + r, |r| <= ln 2 / 2; ln 2 in two parts, so that n times the first is exact (Cody and Waite).
  // Compared as integers: no compiler makes vectors of comparisons that may raise an exception.
  const uint64_t bits = bits_of(x), least = bits_of(-708);
  const double bounded = of_bits(bits < least ? bits : least);
  const double shifted = bounded * 1.4426950408889634 + TO_INTEGER, n = shifted - TO_INTEGER;
  const double r = (bounded - n * 0x1.62e43p-1) - n * -1.904654299957768e-9;
  return exp_series<0, POWERS>(r) * of_bits((bits_of(shifted) + 1023) << 52);
}

// 2 artanh(f) within 10^-15 of itself for |f| < 0.18.
inline double twice_artanh(double f) {
  const double square = f * f;
  double sum = 0;
  for (int i = 23; i > 1; i -= 2) sum = (sum + 1.0 / i) * square;
  return 2 * f * (1 + sum);
}

// ln(whole + rest) within 10^-15 of itself, for whole numbers from 1 on and rest >= 0, however small it is.
inline double log_of_sum_of(double whole, double rest) {
  if (whole == 1 && rest < 0.4) return twice_artanh(rest / (2 + rest));  // (x - 1) / (x + 1)
  // x = 2^n m, m in [sqrt(1/2), sqrt(2)).
  const uint64_t bits = bits_of(whole + rest);
  double n = static_cast<double>(static_cast<int64_t>(bits >> 52) - 1023);
  double m = of_bits((bits & 0xFFFFFFFFFFFFF) | 0x3FF0000000000000);
  if (m >= 1.4142135623730951) m *= 0.5, n += 1;
  return n * 0.693147180559945309 + twice_artanh((m - 1) / (m + 1));
}

// e^x within 10^-11 of itself, from 10^-307 to 10^307.
inline double exp(double x) { return x > 0 ? 1 / exp_of_negative(-x) : exp_of_negative(x); }

// ln(1 + e^x), of which large numbers leave x.
inline double softplus(double x) { return (x > 0 ? x : 0) + log_of_sum_of(1, exp_of_negative(x > 0 ? -x : x)); }

struct CosSin {
  double cos, sin;
};

// Of 0 <= x < 2^24, both within 2^-52.
inline CosSin cos_sin(double x) {
  // x = n pi / 2 + r, |r| <= pi / 4; pi / 2 in three parts, so that n times the first two is exact.
  const double shifted = x * 0.6366197723675814 + TO_INTEGER, n = shifted - TO_INTEGER;
  const double r = ((x - n * 0x1.921fb54p+0) - n * 0x1.10b461p-30) - n * 0x1.a62633145c06ep-58, square = r * r;
  const double c = alternating_series<0>(square), s = alternating_series<1>(square) * r;
  // Quarter turns swap the two, and half turns change their signs.
  const uint64_t quarters = bits_of(shifted), swaps = 0 - (quarters & 1), of_cos = bits_of(c), of_sin = bits_of(s);
  const uint64_t first = (of_cos & ~swaps) | (of_sin & swaps), second = (of_sin & ~swaps) | (of_cos & swaps);
  return {of_bits(first ^ (((quarters + 1) & 2) << 62)), of_bits(second ^ ((quarters & 2) << 62))};
}

}  // namespace tokenmill::TM_ISA
