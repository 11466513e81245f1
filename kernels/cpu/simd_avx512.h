// Sixteen floats in one AVX-512 register, and products of bf16 pairs: in one instruction where `BATONQ_BF16` says that
// the CPU has it, in two fused multiply-adds elsewhere.
#pragma once

#include <immintrin.h>

#include <cstdint>
#include <cstring>

#include "kernels.h"
#include "sanitizers.h"

namespace batonq::BATONQ_ISA {

constexpr int kLanes = 16;
// Vectors of columns of a product's tile.
constexpr int kTileVectors = 4;

using V = __m512;
using Pairs = __m512i;

inline __mmask16 first(int64_t count) {
  return count >= kLanes ? 0xFFFF : count <= 0 ? 0 : static_cast<__mmask16>((1u << count) - 1);
}

// Asks for the line at p: it will be needed soon. Written so that the compiler leaves it where it is; it may gather
// builtin prefetches in a loop of their own.
inline void fetch(const void* p) { asm volatile("prefetcht1 (%0)" ::"r"(p)); }
// Likewise, to be written.
inline void fetch_to_write(const void* p) { asm volatile("prefetchw (%0)" ::"r"(p)); }

inline V zero() { return _mm512_setzero_ps(); }
inline V splat(float x) { return _mm512_set1_ps(x); }
inline V load(const float* p) { return _mm512_loadu_ps(p); }
// Bytes of the first `count` lanes.
inline size_t bytes_of(int64_t count, size_t size) { return size * (count >= kLanes ? kLanes : count <= 0 ? 0 : count); }
inline V load(const float* p, int64_t count) {
  reads(p, bytes_of(count, sizeof(float)));
  return _mm512_maskz_loadu_ps(first(count), p);
}
inline V load(const bf16* p, int64_t count) {
  reads(p, bytes_of(count, sizeof(bf16)));
  return _mm512_castsi512_ps(
      _mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(first(count), p)), 16));
}
inline void store(float* p, V v) { _mm512_storeu_ps(p, v); }
inline void store(float* p, V v, int64_t count) {
  writes(p, bytes_of(count, sizeof(float)));
  _mm512_mask_storeu_ps(p, first(count), v);
}

// Round to nearest even. NaN stays NaN.
inline __m256i to_bf16(V v) {
#ifdef BATONQ_BF16
  return (__m256i)_mm512_cvtneps_pbh(v);
#else
  const __m512i bits = _mm512_castps_si512(v);
  const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
  const __m512i rounded = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7FFF)));
  const __mmask16 nan = _mm512_cmp_ps_mask(v, v, _CMP_UNORD_Q);
  return _mm512_cvtepi32_epi16(
      _mm512_srli_epi32(_mm512_mask_or_epi32(rounded, nan, bits, _mm512_set1_epi32(0x400000)), 16));
#endif
}
inline V widen(__m256i v) { return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(v), 16)); }
// The nearest bf16, as float.
inline V rounded(V v) { return widen(to_bf16(v)); }
inline void store(bf16* p, V v, int64_t count) {
  writes(p, bytes_of(count, sizeof(bf16)));
  _mm256_mask_storeu_epi16(p, first(count), to_bf16(v));
}

inline V add(V a, V b) { return _mm512_add_ps(a, b); }
inline V sub(V a, V b) { return _mm512_sub_ps(a, b); }
inline V mul(V a, V b) { return _mm512_mul_ps(a, b); }
inline V div(V a, V b) { return _mm512_div_ps(a, b); }
inline V fma(V a, V b, V c) { return _mm512_fmadd_ps(a, b, c); }
inline V fnma(V a, V b, V c) { return _mm512_fnmadd_ps(a, b, c); }
inline V min(V a, V b) { return _mm512_min_ps(a, b); }
inline V max(V a, V b) { return _mm512_max_ps(a, b); }
inline V nearest(V a) { return _mm512_roundscale_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
// p · 2ⁿ for whole n.
inline V scale(V p, V n) { return _mm512_scalef_ps(p, n); }
// Lanes [from, to) of v, `other` elsewhere.
inline V between(V v, int from, int to, V other) {
  return _mm512_mask_mov_ps(other, static_cast<__mmask16>(first(to) & ~first(from)), v);
}

// Sum and maximum of the lanes; the sum as a fixed tree: halves, quarters, eighths, pairs.
inline float sum(V v) {
  const __m256 a = _mm256_add_ps(_mm512_castps512_ps256(v), _mm512_extractf32x8_ps(v, 1));
  __m128 b = _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
  b = _mm_add_ps(b, _mm_movehl_ps(b, b));
  return _mm_cvtss_f32(_mm_add_ss(b, _mm_movehdup_ps(b)));
}
inline float largest(V v) { return _mm512_reduce_max_ps(v); }

inline Pairs load_pairs(const bf16* p) { return _mm512_loadu_si512(p); }
// Only the first of each pair is read; the second may be anything in memory.
inline Pairs load_firsts(const bf16* p) { return _mm512_maskz_loadu_epi16(0x55555555, p); }
inline Pairs splat_pair(const bf16* p) {
  int32_t word;
  std::memcpy(&word, p, sizeof word);
  return _mm512_set1_epi32(word);
}
inline V multiply_pairs(Pairs a, Pairs b, V sum) {
#ifdef BATONQ_BF16
  return _mm512_dpbf16_ps(sum, (__m512bh)a, (__m512bh)b);
#else
  const __m512i high = _mm512_set1_epi32(static_cast<int32_t>(0xFFFF0000));
  sum = fma(_mm512_castsi512_ps(_mm512_slli_epi32(a, 16)), _mm512_castsi512_ps(_mm512_slli_epi32(b, 16)), sum);
  return fma(_mm512_castsi512_ps(_mm512_and_si512(a, high)), _mm512_castsi512_ps(_mm512_and_si512(b, high)), sum);
#endif
}

}  // namespace batonq::BATONQ_ISA
