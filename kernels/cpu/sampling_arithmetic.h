// The kernels of sampling.h, written once over the vectors of sampling_simd_*.h.
#pragma once

#include <initializer_list>

#include "sampling.h"

namespace batonq::BATONQ_ISA {

constexpr int kFloats = 16, kWords = 8;

inline float largest(const Row& row, float* maxima) {
  F top = splat(-std::numeric_limits<float>::infinity());
  uint32_t nan = 0;
  for (int64_t i = 0; i < row.blocks; ++i) {
    const float* p = block_of(row, i);
    const F a = load(p), b = load(p + 16), c = load(p + 32), d = load(p + 48);
    nan |= any_nan(a, b) | any_nan(c, d);
    const F here = max(max(a, b), max(c, d));
    maxima[i] = largest(here);
    top = max(top, here);
  }
  return nan ? std::numeric_limits<float>::quiet_NaN() : largest(top);
}

// exp(z) for z ≤ 0 to 2⁻²² or so; below -80 it gives exp(-80).
inline F rough_exp(F z) {
  z = max(z, splat(-80.0f));
  const F n = nearest(mul(z, splat(1.44269504f)));
  const F r = fma(n, splat(-0.693147181f), z);
  F p = splat(1.0f / 720);
  for (const float c : {1.0f / 120, 1.0f / 24, 1.0f / 6, 0.5f, 1.0f, 1.0f}) p = fma(p, r, splat(c));
  return scale_normal(p, n);
}

inline double sum_of_lanes(D a) {
  double lanes[kWords], sum = 0.0;
  store(lanes, a);
  for (const double lane : lanes) sum += lane;
  return sum;
}

inline double rough_total(const Row& row, float largest, float inverse_temperature) {
  const F m = splat(largest), s = splat(inverse_temperature);
  D total = splat(0.0);
  for (int64_t i = 0; i < row.blocks; ++i) {
    const float* p = block_of(row, i);
    F sum = splat(0.0f);
    for (int j = 0; j < kRowBlock; j += kFloats) sum = add(sum, rough_exp(mul(sub(load(p + j), m), s)));
    total = add(total, add(low_half(sum), high_half(sum)));
  }
  return sum_of_lanes(total);
}

inline void rough_exps(const float* values, int64_t count, float largest, float inverse_temperature, float* exps) {
  const F m = splat(largest), s = splat(inverse_temperature);
  for (int64_t i = 0; i < count; i += kFloats) store(exps + i, rough_exp(mul(sub(load(values + i), m), s)));
}

inline double rough_sum(const float* exps, int64_t count, float least) {
  const F bound = splat(least);
  D total = splat(0.0);
  for (int64_t i = 0; i < count; i += kFloats) {
    const F kept = or_zero(load(exps + i), bound);
    total = add(total, add(low_half(kept), high_half(kept)));
  }
  return sum_of_lanes(total);
}

inline int64_t collect(const Row& row, const float* maxima, float least, int32_t* ids, float* values) {
  const F bound = splat(least);
  int64_t count = 0;
  for (int64_t i = 0; i < row.blocks; ++i) {
    if (!(maxima[i] >= least)) continue;
    const float* p = block_of(row, i);
    for (int j = 0; j < kRowBlock; j += kFloats) {
      const F x = load(p + j);
      const uint32_t kept = at_least(x, bound);
      if (kept) count += append(kept, x, static_cast<int32_t>(i * kRowBlock + j), ids + count, values + count);
    }
  }
  for (int64_t i = count; i % kFloats != 0; ++i) {
    ids[i] = 0;
    values[i] = -std::numeric_limits<float>::infinity();
  }
  return count;
}

// exp(z) · 2⁴⁴ for z ≤ 0 to an ulp or so: exp(z) = 2ⁿ · exp(r) with |r| ≤ log(2) / 2, and Taylor's polynomial of r.
// Below -40, where the mass is 0, it gives less than 1.
inline D scaled_exp(D z) {
  constexpr double kMagic = 0x1.8p52;  // what is added to it is rounded to whole numbers, and lies in the lowest bits
  z = max(z, splat(-40.0));
  const D t = fma(z, splat(0x1.71547652b82fep0), splat(kMagic));
  const D n = sub(t, splat(kMagic));
  D r = fma(n, splat(-0x1.62e42fefa39efp-1), z);
  r = fma(n, splat(-0x1.abc9e3b39803fp-56), r);
  D p = splat(1.0 / 6227020800);
  for (const double c : {1.0 / 479001600, 1.0 / 39916800, 1.0 / 3628800, 1.0 / 362880, 1.0 / 40320, 1.0 / 5040, 1.0 / 720,
                         1.0 / 120, 1.0 / 24, 1.0 / 6, 0.5, 1.0, 1.0})
    p = fma(p, r, splat(c));
  const W exponent = add(shift_left<52>(bits(t)), splat(uint64_t{kMassBits} << 52));
  return number(add(bits(p), exponent));
}

inline void masses(const float* values, int64_t count, float largest, double temperature, double* z, int64_t* mass) {
  const D m = splat(static_cast<double>(largest)), t = splat(temperature);
  for (int64_t i = 0; i < count; i += kWords) {
    D v = sub(widen(values + i), m);
    if (temperature != 1.0) v = div(v, t);
    store(z + i, v);
    store(mass + i, truncate(scaled_exp(v)));
  }
}

inline void buckets(const float* values, int64_t count, float high, float steps, uint32_t* bucket) {
  const F h = splat(high), s = splat(steps), last = splat(255.0f);
  for (int64_t i = 0; i < count; i += kFloats) store_whole(bucket + i, min(mul(sub(h, load(values + i)), s), last));
}

inline int64_t count_ahead(const Row& row, float value, int64_t before) {
  const F v = splat(value);
  int64_t count = 0;
  for (int64_t i = 0; i < row.blocks; ++i) {
    const float* p = block_of(row, i);
    for (int j = 0; j < kRowBlock; j += kFloats) {
      const F x = load(p + j);
      const int64_t left = before - (i * kRowBlock + j);
      uint32_t ahead = above(x, v);
      if (left > 0) ahead |= equal(x, v) & (left < kFloats ? (1u << left) - 1 : 0xFFFFu);
      count += __builtin_popcount(ahead);
    }
  }
  return count;
}

// Philox4x32-10 of the counters (position, c1, purpose 0, rng version 2): the words of `kernels/philox.py`. Only low
// halves count; what products leave in the high ones is never read.
inline void philox(const Noise& noise, W c1, W out[4]) {
  W c0 = splat(uint64_t{noise.position}), c2 = splat(uint64_t{0}), c3 = splat(uint64_t{2});
  const W multiplier0 = splat(uint64_t{0xD2511F53}), multiplier1 = splat(uint64_t{0xCD9E8D57});
  uint32_t key0 = noise.key0, key1 = noise.key1;
  for (int round = 0; round < 10; ++round) {
    const W product0 = multiply(c0, multiplier0), product1 = multiply(c2, multiplier1);
    c0 = exclusive_or(shift_right<32>(product1), c1, splat(uint64_t{key0}));
    c2 = exclusive_or(shift_right<32>(product0), c3, splat(uint64_t{key1}));
    c1 = product1;
    c3 = product0;
    key0 += 0x9E3779B9;
    key1 += 0xBB67AE85;
  }
  out[0] = c0;
  out[1] = c1;
  out[2] = c2;
  out[3] = c3;
}

inline void words(const Noise& noise, const int32_t* ids, int64_t count, uint32_t* words) {
  for (int64_t i = 0; i < count; i += kWords) {
    const W id = widen(ids + i);
    W w[4];
    philox(noise, shift_right<2>(id), w);
    store_low(words + i, choose(id, w[0], w[1], w[2], w[3]));
  }
}

inline uint64_t block_words(const Noise& noise, int64_t block, uint32_t least, uint32_t* words) {
  const uint64_t counter = static_cast<uint64_t>(block) * (kRowBlock / 4);
  W low[4], high[4];
  philox(noise, count_from(counter), low);
  philox(noise, count_from(counter + kWords), high);
  uint64_t kept = 0;
  for (int w = 0; w < 4; ++w)
    kept |= static_cast<uint64_t>(low_at_least(low[w], least) | low_at_least(high[w], least) << kWords) << (16 * w);
  if (kept)
    for (int w = 0; w < 4; ++w) {
      store_low(words + 16 * w, low[w]);
      store_low(words + 16 * w + kWords, high[w]);
    }
  return kept;
}

}  // namespace batonq::BATONQ_ISA
