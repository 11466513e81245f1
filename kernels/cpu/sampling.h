// What the sampler asks of one instruction set: passes over a row of logits, masses, and random words.
//
// Equal bits on all of them, but for the rough sums: everything else is exact, or computed element by element.
#pragma once

#include <cstdint>
#include <cstring>
#include <limits>

namespace batonq {

constexpr int kRowBlock = 64;  // logits that are looked at together
constexpr int kMassBits = 44;  // the most likely token's mass is 2⁴⁴
// Rough sums are off by no more than this part of themselves, at temperatures within these.
constexpr double kRoughError = 1.0 / (1 << 15);
constexpr double kLeastRoughTemperature = 1e-3, kMostRoughTemperature = 1e6;

// A row of logits as blocks of 64; the last is padded with -inf if the row ends within it.
struct Row {
  const float* values;
  int64_t count, blocks;
  alignas(64) float last[kRowBlock];
};

// Static, as all that objects of several instruction sets share: the linker must not pick one's code for another.
static inline void set_row(Row& row, const float* values, int64_t count) {
  row.values = values;
  row.count = count;
  row.blocks = (count + kRowBlock - 1) / kRowBlock;
  const int64_t begin = (row.blocks - 1) * kRowBlock;
  for (int i = 0; i < kRowBlock; ++i)
    row.last[i] = begin + i < count ? values[begin + i] : -std::numeric_limits<float>::infinity();
}

static inline const float* block_of(const Row& row, int64_t index) {
  return index + 1 < row.blocks ? row.values + index * kRowBlock : row.last;
}

// Seed and position of a draw, as Philox's key and the first word of its counter.
struct Noise {
  uint32_t position, key0, key1;
};

// Arrays of candidates have room for 64 more than the row. `collect` pads them to a multiple of 16, up to which the
// others read and write.
struct SamplingKernels {
  const char* name;
  // The largest logit of each block; returns that of all, or NaN if there is one.
  float (*largest)(const Row& row, float* maxima);
  // About the sum of exp((x - largest) · inverse_temperature).
  double (*rough_total)(const Row& row, float largest, float inverse_temperature);
  // About exp((x - largest) · inverse_temperature) of each, and the sum of those of them that are at least `least`.
  void (*rough_exps)(const float* values, int64_t count, float largest, float inverse_temperature, float* exps);
  double (*rough_sum)(const float* exps, int64_t count, float least);
  // Ids, ascending, and values of the logits that are at least `least`; returns how many.
  int64_t (*collect)(const Row& row, const float* maxima, float least, int32_t* ids, float* values);
  // z = (x - largest) / temperature and floor(exp(z) · 2⁴⁴).
  void (*masses)(const float* values, int64_t count, float largest, double temperature, double* z, int64_t* mass);
  // The bucket of each value: (high - value) · steps without its fraction, at most 255. None is above `high`.
  void (*buckets)(const float* values, int64_t count, float high, float steps, uint32_t* bucket);
  // How many logits are above `value`, and how many of the first `before` equal it.
  int64_t (*count_ahead)(const Row& row, float value, int64_t before);
  // The random word of each token.
  void (*words)(const Noise& noise, const int32_t* ids, int64_t count, uint32_t* words);
  // Those of a block's 64 tokens. Bit 16·w + c stands for token 4·c + w: its word is words[16·w + c], and the bit is set
  // if that is at least `least`. The words are not written if no bit is.
  uint64_t (*block_words)(const Noise& noise, int64_t block, uint32_t least, uint32_t* words);
};

extern const SamplingKernels k_sampling_avx512, k_sampling_avx2;

}  // namespace batonq
