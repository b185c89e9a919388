#pragma once

// Vectors of the widest registers that this file is compiled for, and half precision.

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <utility>

#if defined(__AVX512F__) || (defined(__AVX2__) && defined(__F16C__) && defined(__FMA__))
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#else
#define TIDEMILL_NO_LANES
#endif

#ifndef TIDEMILL_NO_LANES
namespace tidemill {

using Half = std::uint16_t;  ///< the bits of an IEEE half

#if defined(__AVX512F__)
constexpr std::size_t kLanes = 16;
constexpr std::size_t kWide = 4;  ///< vectors side by side that a kernel keeps for each of its rows
constexpr std::size_t kRows = 6;
#elif defined(__AVX2__)
constexpr std::size_t kLanes = 8;
constexpr std::size_t kWide = 2;
constexpr std::size_t kRows = 4;
#else
constexpr std::size_t kLanes = 4;
constexpr std::size_t kWide = 4;
constexpr std::size_t kRows = 5;
#endif

using Lanes = float __attribute__((vector_size(kLanes * sizeof(float))));
using Whole = std::int32_t __attribute__((vector_size(kLanes * sizeof(float))));

inline Lanes every(float value) { return value - Lanes{}; }

inline Lanes load(const float* from) {
  Lanes lanes;
  std::memcpy(&lanes, from, sizeof lanes);
  return lanes;
}

inline Lanes load(const Half* from) {
#if defined(__AVX512F__)
  return (Lanes)_mm512_maskz_cvtph_ps(0xFFFF, _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
#elif defined(__AVX2__)
  return (Lanes)_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
#else
  return (Lanes)vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(from)));
#endif
}

inline void store(float* to, Lanes lanes) { std::memcpy(to, &lanes, sizeof lanes); }

inline Lanes larger(Lanes a, Lanes b) { return a > b ? a : b; }

inline float sum(Lanes lanes) {
  float total = 0;
  for (std::size_t i = 0; i < kLanes; ++i) total += lanes[i];
  return total;
}

inline float largest(Lanes lanes) {
  float most = lanes[0];
  for (std::size_t i = 1; i < kLanes; ++i) most = lanes[i] > most ? lanes[i] : most;
  return most;
}

/// e^x for x <= 0, to about two units in the last place; 0 below -87, where single precision ends.
inline Lanes exponential(Lanes x) {
  constexpr float kLog2e = 1.44269504F;
  constexpr float kLn2High = 0.693359375F;  // 9 bits, so that its multiples are exact
  constexpr float kLn2Low = -2.12194440e-4F;
  constexpr float kRound = 12582912.0F;  // 1.5 * 2^23: adding it rounds to a whole number in the low bits
  const Lanes shifted = x * kLog2e + kRound;
  const Lanes n = shifted - kRound;
  const Lanes r = (x - n * kLn2High) - n * kLn2Low;
  Lanes p = every(1.9875691500e-4F);
  p = p * r + 1.3981999507e-3F;
  p = p * r + 8.3334519073e-3F;
  p = p * r + 4.1665795894e-2F;
  p = p * r + 1.6666665459e-1F;
  p = p * r + 5.0000001201e-1F;
  p = p * (r * r) + r + 1.0F;
  const Whole power = ((Whole)shifted - 0x4B400000) << 23;
  const Lanes value = (Lanes)((Whole)p + power);
  return x < -87.0F ? Lanes{} : value;
}

namespace detail {

template <std::size_t... I>
inline Lanes pick(Lanes a, Lanes b, std::index_sequence<I...>) {
#if defined(__clang__) || __GNUC__ >= 12
  return __builtin_shufflevector(a, b, I...);
#else
  return __builtin_shuffle(a, b, Whole{static_cast<std::int32_t>(I)...});
#endif
}

/// The lanes of halves `half` of all segments of 2 * Block lanes: first those of a, then those of b.
template <std::size_t Block, std::size_t Half_, std::size_t... I>
inline Lanes halves(Lanes a, Lanes b, std::index_sequence<I...>) {
  return pick(a, b, std::index_sequence<(I / Block * 2 * Block + Half_ * Block + I % Block)...>{});
}

template <std::size_t Block>
inline void fold(Lanes (&all)[kLanes]) {
  if constexpr (Block > 0) {
    using Index = std::make_index_sequence<kLanes>;
    for (std::size_t i = 0; i < Block; ++i) {
      const Lanes a = all[2 * i];
      const Lanes b = all[2 * i + 1];
      all[i] = halves<Block, 0>(a, b, Index{}) + halves<Block, 1>(a, b, Index{});
    }
    fold<Block / 2>(all);
  }
}

template <std::size_t... I>
inline void zip(const Lanes (&from)[kLanes], Lanes (&to)[kLanes], std::index_sequence<I...>) {
  for (std::size_t i = 0; i < kLanes / 2; ++i) {
    const Lanes a = from[i];
    const Lanes b = from[i + kLanes / 2];
    to[2 * i] = pick(a, b, std::index_sequence<(I / 2 + I % 2 * kLanes)...>{});
    to[2 * i + 1] = pick(a, b, std::index_sequence<(kLanes / 2 + I / 2 + I % 2 * kLanes)...>{});
  }
}

}  // namespace detail

/// Lane i of the result is the sum of all lanes of vector i; spoils `all`.
inline Lanes sums(Lanes (&all)[kLanes]) {
  detail::fold<kLanes / 2>(all);
  return all[0];
}

/// Lane i of vector j becomes lane j of vector i.
inline void transpose(Lanes (&all)[kLanes]) {
  using Index = std::make_index_sequence<kLanes>;
  Lanes other[kLanes];
  for (std::size_t n = kLanes; n > 1; n /= 4) {
    detail::zip(all, other, Index{});
    if (n == 2) {
      std::memcpy(&all, &other, sizeof all);
      return;
    }
    detail::zip(other, all, Index{});
  }
}

}  // namespace tidemill
#endif
