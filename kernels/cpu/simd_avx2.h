// Sixteen floats in two AVX2 registers: the same operations as simd_avx512.h for CPUs without AVX-512.
#pragma once

#include <immintrin.h>

#include <cstdint>
#include <cstring>

#include "kernels.h"

namespace batonq::BATONQ_ISA {

constexpr int kLanes = 16;
constexpr int kTileVectors = 1;

struct V {
  __m256 lo, hi;
};
struct Pairs {
  __m256i lo, hi;
};

// Asks for the line at p: it will be needed soon. Written so that the compiler leaves it where it is; it may gather
// builtin prefetches in a loop of their own.
inline void fetch(const void* p) { asm volatile("prefetcht1 (%0)" ::"r"(p)); }
// Likewise, to be written.
inline void fetch_to_write(const void* p) { asm volatile("prefetchw (%0)" ::"r"(p)); }

inline V zero() { return {_mm256_setzero_ps(), _mm256_setzero_ps()}; }
inline V splat(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
inline V load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
inline V load(const float* p, int64_t count) {
  if (count >= kLanes) return load(p);
  alignas(32) float part[kLanes] = {};
  if (count > 0) std::memcpy(part, p, count * sizeof(float));
  return load(part);
}
inline V widen(const bf16* p) {
  const __m256i lo = _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
  const __m256i hi = _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p + 8)));
  return {_mm256_castsi256_ps(_mm256_slli_epi32(lo, 16)), _mm256_castsi256_ps(_mm256_slli_epi32(hi, 16))};
}
inline V load(const bf16* p, int64_t count) {
  if (count >= kLanes) return widen(p);
  alignas(32) bf16 part[kLanes] = {};
  if (count > 0) std::memcpy(part, p, count * sizeof(bf16));
  return widen(part);
}
inline void store(float* p, V v) {
  _mm256_storeu_ps(p, v.lo);
  _mm256_storeu_ps(p + 8, v.hi);
}
inline void store(float* p, V v, int64_t count) {
  if (count >= kLanes) return store(p, v);
  alignas(32) float part[kLanes];
  store(part, v);
  if (count > 0) std::memcpy(p, part, count * sizeof(float));
}
inline __m256i to_bf16(__m256 v) {
  const __m256i bits = _mm256_castps_si256(v);
  const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
  const __m256i rounded = _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7FFF)));
  const __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(v, v, _CMP_UNORD_Q));
  const __m256i quiet = _mm256_or_si256(bits, _mm256_set1_epi32(0x400000));
  return _mm256_srli_epi32(_mm256_blendv_epi8(rounded, quiet, nan), 16);
}
inline void store(bf16* p, V v, int64_t count) {
  const __m256i packed = _mm256_permute4x64_epi64(_mm256_packus_epi32(to_bf16(v.lo), to_bf16(v.hi)), 0xD8);
  if (count >= kLanes) return _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), packed);
  alignas(32) bf16 part[kLanes];
  _mm256_store_si256(reinterpret_cast<__m256i*>(part), packed);
  if (count > 0) std::memcpy(p, part, count * sizeof(bf16));
}

// The nearest bf16, as float.
inline V rounded(V v) {
  return {_mm256_castsi256_ps(_mm256_slli_epi32(to_bf16(v.lo), 16)),
          _mm256_castsi256_ps(_mm256_slli_epi32(to_bf16(v.hi), 16))};
}

inline V add(V a, V b) { return {_mm256_add_ps(a.lo, b.lo), _mm256_add_ps(a.hi, b.hi)}; }
inline V sub(V a, V b) { return {_mm256_sub_ps(a.lo, b.lo), _mm256_sub_ps(a.hi, b.hi)}; }
inline V mul(V a, V b) { return {_mm256_mul_ps(a.lo, b.lo), _mm256_mul_ps(a.hi, b.hi)}; }
inline V div(V a, V b) { return {_mm256_div_ps(a.lo, b.lo), _mm256_div_ps(a.hi, b.hi)}; }
inline V fma(V a, V b, V c) { return {_mm256_fmadd_ps(a.lo, b.lo, c.lo), _mm256_fmadd_ps(a.hi, b.hi, c.hi)}; }
inline V fnma(V a, V b, V c) { return {_mm256_fnmadd_ps(a.lo, b.lo, c.lo), _mm256_fnmadd_ps(a.hi, b.hi, c.hi)}; }
inline V min(V a, V b) { return {_mm256_min_ps(a.lo, b.lo), _mm256_min_ps(a.hi, b.hi)}; }
inline V max(V a, V b) { return {_mm256_max_ps(a.lo, b.lo), _mm256_max_ps(a.hi, b.hi)}; }
inline __m256 nearest(__m256 a) { return _mm256_round_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
inline V nearest(V a) { return {nearest(a.lo), nearest(a.hi)}; }
// p · 2ⁿ for whole n from -252 to 252, in two steps so that neither factor leaves the range.
inline __m256 scale(__m256 p, __m256 n) {
  const __m256i whole = _mm256_cvtps_epi32(n);
  const __m256i half = _mm256_srai_epi32(whole, 1), rest = _mm256_sub_epi32(whole, half);
  const __m256i bias = _mm256_set1_epi32(127);
  const __m256 a = _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(half, bias), 23));
  const __m256 b = _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(rest, bias), 23));
  return _mm256_mul_ps(_mm256_mul_ps(p, a), b);
}
inline V scale(V p, V n) { return {scale(p.lo, n.lo), scale(p.hi, n.hi)}; }
inline __m256 between(__m256 v, int from, int to, __m256 other, int base) {
  const __m256i lane = _mm256_add_epi32(_mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7), _mm256_set1_epi32(base));
  const __m256i inside = _mm256_and_si256(_mm256_cmpgt_epi32(lane, _mm256_set1_epi32(from - 1)),
                                          _mm256_cmpgt_epi32(_mm256_set1_epi32(to), lane));
  return _mm256_blendv_ps(other, v, _mm256_castsi256_ps(inside));
}
inline V between(V v, int from, int to, V other) {
  return {between(v.lo, from, to, other.lo, 0), between(v.hi, from, to, other.hi, 8)};
}

inline float sum(V v) {
  const __m256 a = _mm256_add_ps(v.lo, v.hi);
  __m128 b = _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
  b = _mm_add_ps(b, _mm_movehl_ps(b, b));
  return _mm_cvtss_f32(_mm_add_ss(b, _mm_movehdup_ps(b)));
}
inline float largest(V v) {
  const __m256 a = _mm256_max_ps(v.lo, v.hi);
  __m128 b = _mm_max_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
  b = _mm_max_ps(b, _mm_movehl_ps(b, b));
  return _mm_cvtss_f32(_mm_max_ss(b, _mm_movehdup_ps(b)));
}

inline Pairs load_pairs(const bf16* p) {
  return {_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)),
          _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p + 16))};
}
inline Pairs load_firsts(const bf16* p) {
  const __m256i low = _mm256_set1_epi32(0xFFFF);
  const Pairs all = load_pairs(p);
  return {_mm256_and_si256(all.lo, low), _mm256_and_si256(all.hi, low)};
}
inline Pairs splat_pair(const bf16* p) {
  int32_t word;
  std::memcpy(&word, p, sizeof word);
  return {_mm256_set1_epi32(word), _mm256_set1_epi32(word)};
}
inline __m256 multiply_pairs(__m256i a, __m256i b, __m256 sum) {
  const __m256i high = _mm256_set1_epi32(static_cast<int32_t>(0xFFFF0000));
  sum = _mm256_fmadd_ps(_mm256_castsi256_ps(_mm256_slli_epi32(a, 16)), _mm256_castsi256_ps(_mm256_slli_epi32(b, 16)),
                        sum);
  return _mm256_fmadd_ps(_mm256_castsi256_ps(_mm256_and_si256(a, high)),
                         _mm256_castsi256_ps(_mm256_and_si256(b, high)), sum);
}
inline V multiply_pairs(Pairs a, Pairs b, V sum) {
  return {multiply_pairs(a.lo, b.lo, sum.lo), multiply_pairs(a.hi, b.hi, sum.hi)};
}

}  // namespace batonq::BATONQ_ISA
