// What one thread can do at most: multiply-adds that stay in registers, and memory read in order.
//
// Compiled by ceilings.py for the instruction set in use. More chains than the units are deep hide their latency; the
// chains begin with different numbers, or the compiler would make one of them.

#include <cstdint>

#ifdef __AVX512F__
#include <immintrin.h>
constexpr int kLanes = 16, kChains = 24;
#else
constexpr int kLanes = 8, kChains = 12;
#endif

typedef float Vector __attribute__((vector_size(kLanes * sizeof(float))));

namespace {

template <typename Step>
double operations(int64_t rounds, float* numbers, Step step) {
  Vector sums[kChains];
  for (int i = 0; i < kChains; ++i) sums[i] = Vector{} + numbers[i];
  for (int64_t round = 0; round < rounds; ++round)
#pragma GCC unroll 24
    for (int i = 0; i < kChains; ++i) sums[i] = step(sums[i]);
  for (int i = 0; i < kChains; ++i) numbers[i] = sums[i][0];
  return static_cast<double>(rounds) * kChains * kLanes;
}

}  // namespace

extern "C" {

// Each runs `rounds` rounds from the 24 `numbers`, which it replaces, and returns how many operations that were.
double multiply_adds(int64_t rounds, float* numbers) {
  const Vector x = Vector{} + numbers[0], y = Vector{} + numbers[1];
  return 2 * operations(rounds, numbers, [=](Vector sum) { return sum * x + y; });
}

#ifdef __AVX512BF16__
double bf16_products(int64_t rounds, float* numbers) {
  const __m512bh x = (__m512bh)(Vector{} + numbers[0]), y = (__m512bh)(Vector{} + numbers[1]);
  return 4 * operations(rounds, numbers, [=](Vector sum) { return (Vector)_mm512_dpbf16_ps((__m512)sum, x, y); });
}
#endif

// The sum of `count` numbers, a multiple of 8 vectors.
float read_memory(const float* data, int64_t count) {
  Vector sums[8] = {};
  for (const Vector *at = reinterpret_cast<const Vector*>(data), *end = at + count / kLanes; at < end; at += 8)
    for (int i = 0; i < 8; ++i) sums[i] += at[i];
  for (int i = 1; i < 8; ++i) sums[0] += sums[i];
  return sums[0][0];
}
}
