// The vectors of sampling_simd_avx512.h as two AVX2 registers each.
#pragma once

#include "simd_avx2.h"

namespace batonq::BATONQ_ISA {

using F = V;
struct D {
  __m256d lo, hi;
};
struct W {
  __m256i lo, hi;
};

inline __m256 scale_normal(__m256 p, __m256 n) {
  return _mm256_castsi256_ps(_mm256_add_epi32(_mm256_castps_si256(p), _mm256_slli_epi32(_mm256_cvtps_epi32(n), 23)));
}
inline F scale_normal(F p, F n) { return {scale_normal(p.lo, n.lo), scale_normal(p.hi, n.hi)}; }
inline void store_whole(uint32_t* p, F a) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm256_cvttps_epi32(a.lo));
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p + 8), _mm256_cvttps_epi32(a.hi));
}
inline __m256 or_zero(__m256 a, __m256 least) { return _mm256_and_ps(a, _mm256_cmp_ps(a, least, _CMP_GE_OQ)); }
inline F or_zero(F a, F least) { return {or_zero(a.lo, least.lo), or_zero(a.hi, least.hi)}; }
template <int kComparison>
inline uint32_t compare(F a, F b) {
  const int lo = _mm256_movemask_ps(_mm256_cmp_ps(a.lo, b.lo, kComparison));
  return static_cast<uint32_t>(lo | _mm256_movemask_ps(_mm256_cmp_ps(a.hi, b.hi, kComparison)) << 8);
}
inline uint32_t at_least(F a, F b) { return compare<_CMP_GE_OQ>(a, b); }
inline uint32_t above(F a, F b) { return compare<_CMP_GT_OQ>(a, b); }
inline uint32_t equal(F a, F b) { return compare<_CMP_EQ_OQ>(a, b); }
inline uint32_t any_nan(F a, F b) { return compare<_CMP_UNORD_Q>(a, b); }

inline D splat(double x) { return {_mm256_set1_pd(x), _mm256_set1_pd(x)}; }
inline D widen(__m256 a) { return {_mm256_cvtps_pd(_mm256_castps256_ps128(a)), _mm256_cvtps_pd(_mm256_extractf128_ps(a, 1))}; }
inline D widen(const float* p) { return widen(_mm256_loadu_ps(p)); }
inline D low_half(F a) { return widen(a.lo); }
inline D high_half(F a) { return widen(a.hi); }
inline D add(D a, D b) { return {_mm256_add_pd(a.lo, b.lo), _mm256_add_pd(a.hi, b.hi)}; }
inline D sub(D a, D b) { return {_mm256_sub_pd(a.lo, b.lo), _mm256_sub_pd(a.hi, b.hi)}; }
inline D div(D a, D b) { return {_mm256_div_pd(a.lo, b.lo), _mm256_div_pd(a.hi, b.hi)}; }
inline D fma(D a, D b, D c) { return {_mm256_fmadd_pd(a.lo, b.lo, c.lo), _mm256_fmadd_pd(a.hi, b.hi, c.hi)}; }
inline D max(D a, D b) { return {_mm256_max_pd(a.lo, b.lo), _mm256_max_pd(a.hi, b.hi)}; }
inline void store(double* p, D a) {
  _mm256_storeu_pd(p, a.lo);
  _mm256_storeu_pd(p + 4, a.hi);
}
inline W bits(D a) { return {_mm256_castpd_si256(a.lo), _mm256_castpd_si256(a.hi)}; }
inline D number(W a) { return {_mm256_castsi256_pd(a.lo), _mm256_castsi256_pd(a.hi)}; }
// 2⁵² added to a whole number leaves it in the mantissa.
inline __m256i truncate(__m256d a) {
  const __m256d magic = _mm256_set1_pd(0x1p52);
  return _mm256_xor_si256(_mm256_castpd_si256(_mm256_add_pd(_mm256_floor_pd(a), magic)), _mm256_castpd_si256(magic));
}
inline W truncate(D a) { return {truncate(a.lo), truncate(a.hi)}; }

inline W splat(uint64_t x) {
  const __m256i v = _mm256_set1_epi64x(static_cast<int64_t>(x));
  return {v, v};
}
inline W widen(const int32_t* p) {
  return {_mm256_cvtepu32_epi64(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))),
          _mm256_cvtepu32_epi64(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p + 4)))};
}
inline W add(W a, W b) { return {_mm256_add_epi64(a.lo, b.lo), _mm256_add_epi64(a.hi, b.hi)}; }
inline W count_from(uint64_t x) {
  return add(splat(x), {_mm256_setr_epi64x(0, 1, 2, 3), _mm256_setr_epi64x(4, 5, 6, 7)});
}
inline W multiply(W a, W b) { return {_mm256_mul_epu32(a.lo, b.lo), _mm256_mul_epu32(a.hi, b.hi)}; }
inline W exclusive_or(W a, W b, W c) {
  return {_mm256_xor_si256(_mm256_xor_si256(a.lo, b.lo), c.lo), _mm256_xor_si256(_mm256_xor_si256(a.hi, b.hi), c.hi)};
}
template <int kBits>
inline W shift_left(W a) {
  return {_mm256_slli_epi64(a.lo, kBits), _mm256_slli_epi64(a.hi, kBits)};
}
template <int kBits>
inline W shift_right(W a) {
  return {_mm256_srli_epi64(a.lo, kBits), _mm256_srli_epi64(a.hi, kBits)};
}
inline void store(int64_t* p, W a) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), a.lo);
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p + 4), a.hi);
}
// The low halves of all lanes, in order.
inline __m256i narrow(W a) {
  const __m256 pairs = _mm256_shuffle_ps(_mm256_castsi256_ps(a.lo), _mm256_castsi256_ps(a.hi), 0x88);
  return _mm256_permute4x64_epi64(_mm256_castps_si256(pairs), 0xD8);
}
inline void store_low(uint32_t* p, W a) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), narrow(a)); }
// By the sign: the lowest bit of `which`, then the one above it, is moved there.
inline __m256i choose(__m256i which, __m256i a, __m256i b, __m256i c, __m256i d) {
  const __m256d odd = _mm256_castsi256_pd(_mm256_slli_epi64(which, 63));
  const __m256d upper = _mm256_castsi256_pd(_mm256_slli_epi64(which, 62));
  const __m256d lower = _mm256_blendv_pd(_mm256_castsi256_pd(a), _mm256_castsi256_pd(b), odd);
  return _mm256_castpd_si256(
      _mm256_blendv_pd(lower, _mm256_blendv_pd(_mm256_castsi256_pd(c), _mm256_castsi256_pd(d), odd), upper));
}
inline W choose(W which, W a, W b, W c, W d) {
  return {choose(which.lo, a.lo, b.lo, c.lo, d.lo), choose(which.hi, a.hi, b.hi, c.hi, d.hi)};
}
inline uint32_t low_at_least(W a, uint32_t least) {
  const __m256i v = narrow(a);
  const __m256i kept = _mm256_cmpeq_epi32(_mm256_max_epu32(v, _mm256_set1_epi32(static_cast<int32_t>(least))), v);
  return static_cast<uint32_t>(_mm256_movemask_ps(_mm256_castsi256_ps(kept)));
}

inline int append(uint32_t kept, F a, int32_t id, int32_t* ids, float* values) {
  alignas(32) float lanes[16];
  _mm256_store_ps(lanes, a.lo);
  _mm256_store_ps(lanes + 8, a.hi);
  int count = 0;
  for (; kept != 0; kept &= kept - 1, ++count) {
    const int lane = __builtin_ctz(kept);
    ids[count] = id + lane;
    values[count] = lanes[lane];
  }
  return count;
}

}  // namespace batonq::BATONQ_ISA
