// The vectors that `sampling_arithmetic.h` computes with, in AVX-512: sixteen floats, eight doubles, eight 64-bit words.
#pragma once

#include "simd_avx512.h"

namespace batonq::BATONQ_ISA {

using F = V;
using D = __m512d;
using W = __m512i;

// p · 2ⁿ for whole n that leave it a normal number.
inline F scale_normal(F p, F n) {
  return _mm512_castsi512_ps(_mm512_add_epi32(_mm512_castps_si512(p), _mm512_slli_epi32(_mm512_cvtps_epi32(n), 23)));
}
// The whole parts.
inline void store_whole(uint32_t* p, F a) { _mm512_storeu_si512(p, _mm512_cvttps_epi32(a)); }
// The lanes that are at least `least`, else 0.
inline F or_zero(F a, F least) { return _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(a, least, _CMP_GE_OQ), a); }
// A bit for each lane.
inline uint32_t at_least(F a, F b) { return _mm512_cmp_ps_mask(a, b, _CMP_GE_OQ); }
inline uint32_t above(F a, F b) { return _mm512_cmp_ps_mask(a, b, _CMP_GT_OQ); }
inline uint32_t equal(F a, F b) { return _mm512_cmp_ps_mask(a, b, _CMP_EQ_OQ); }
inline uint32_t any_nan(F a, F b) { return _mm512_cmp_ps_mask(a, b, _CMP_UNORD_Q); }

inline D splat(double x) { return _mm512_set1_pd(x); }
inline D widen(const float* p) { return _mm512_cvtps_pd(_mm256_loadu_ps(p)); }
inline D low_half(F a) { return _mm512_cvtps_pd(_mm512_castps512_ps256(a)); }
inline D high_half(F a) { return _mm512_cvtps_pd(_mm512_extractf32x8_ps(a, 1)); }
inline D add(D a, D b) { return _mm512_add_pd(a, b); }
inline D sub(D a, D b) { return _mm512_sub_pd(a, b); }
inline D div(D a, D b) { return _mm512_div_pd(a, b); }
inline D fma(D a, D b, D c) { return _mm512_fmadd_pd(a, b, c); }
inline D max(D a, D b) { return _mm512_max_pd(a, b); }
inline void store(double* p, D a) { _mm512_storeu_pd(p, a); }
inline W bits(D a) { return _mm512_castpd_si512(a); }
inline D number(W a) { return _mm512_castsi512_pd(a); }
// The whole part of doubles in [0, 2⁵²).
inline W truncate(D a) { return _mm512_cvttpd_epi64(a); }

inline W splat(uint64_t x) { return _mm512_set1_epi64(static_cast<int64_t>(x)); }
inline W widen(const int32_t* p) { return _mm512_cvtepu32_epi64(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))); }
inline W count_from(uint64_t x) { return _mm512_add_epi64(splat(x), _mm512_setr_epi64(0, 1, 2, 3, 4, 5, 6, 7)); }
inline W add(W a, W b) { return _mm512_add_epi64(a, b); }
// Of the low halves.
inline W multiply(W a, W b) { return _mm512_mul_epu32(a, b); }
inline W exclusive_or(W a, W b, W c) { return _mm512_ternarylogic_epi64(a, b, c, 0x96); }
template <int kBits>
inline W shift_left(W a) {
  return _mm512_slli_epi64(a, kBits);
}
template <int kBits>
inline W shift_right(W a) {
  return _mm512_srli_epi64(a, kBits);
}
inline void store(int64_t* p, W a) { _mm512_storeu_si512(p, a); }
inline void store_low(uint32_t* p, W a) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtepi64_epi32(a)); }
// The lane of the vector a, b, c, d that the low two bits of `which` name, lane by lane.
inline W choose(W which, W a, W b, W c, W d) {
  const __mmask8 odd = _mm512_test_epi64_mask(which, splat(uint64_t{1}));
  const __mmask8 upper = _mm512_test_epi64_mask(which, splat(uint64_t{2}));
  return _mm512_mask_mov_epi64(_mm512_mask_mov_epi64(a, odd, b), upper, _mm512_mask_mov_epi64(c, odd, d));
}
// A bit for each lane whose low half is at least `least`.
inline uint32_t low_at_least(W a, uint32_t least) {
  return _mm256_cmpge_epu32_mask(_mm512_cvtepi64_epi32(a), _mm256_set1_epi32(static_cast<int32_t>(least)));
}

// Writes ids and values of the lanes in `kept`, the first lane's id being `id`; returns how many.
inline int append(uint32_t kept, F a, int32_t id, int32_t* ids, float* values) {
  const __m512i lanes = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
  const __mmask16 mask = static_cast<__mmask16>(kept);
  // In a register first: compressing to memory takes a hundred cycles on some CPUs.
  _mm512_storeu_si512(ids, _mm512_maskz_compress_epi32(mask, _mm512_add_epi32(lanes, _mm512_set1_epi32(id))));
  _mm512_storeu_ps(values, _mm512_maskz_compress_ps(mask, a));
  return __builtin_popcount(kept);
}

}  // namespace batonq::BATONQ_ISA
