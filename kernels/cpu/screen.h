// Finds the columns among which a row's largest logit is, by dot products of 8-bit digits (see `Screen` in kernels.h).
//
// With x ≈ s·a and w ≈ t·b, a and b whole: x·w = s·t·(a·b) + s·a·(w - t·b) + (x - s·a)·w, and by Cauchy and Schwarz the
// last two are at most |s·a|·|w - t·b| and |x - s·a|·|w|. Both x and w are rotated before, which spreads what is large in
// few places over many (as QuaRot does, arXiv:2404.00456), so that digits miss less than a hundredth of them.
//
// What it gives is exact: of every column that it passes over it has proved that another one's logit is larger.
#pragma once

#include "arithmetic.h"

namespace batonq::BATONQ_ISA {

constexpr int kQuad = 4;         // digits that one multiplication takes of a column
constexpr int kPanelVectors = kPanel / kLanes;
constexpr int kBias = 128;       // makes a row's digits unsigned
constexpr float kLargestDigit = 127;
// Relative to |x|·|w|: roundings in the rotation (the mixing of up to 64 places takes the most, about 3e-5 on either side),
// in the sums of digits and in the bounds; and, for each element, in the logit.
constexpr float kRoundings = 1e-4f, kElementRounding = 0x1p-23f;
// Longer rows might overflow in their logits, which no bound foresees; in digits of a smaller unit squares underflow.
constexpr float kLongest = 1e18f, kSmallestUnit = 1e-12f;

// sum += a · b in each lane, over its four pairs of digits. GCC 12 keeps sums of integers in memory, those of floats in
// registers; so they are called floats.
[[gnu::always_inline]] inline V multiply_quads(__m512i a, __m512i b, V sum) {
  V result = sum;
  asm("vpdpbusd %2, %1, %0" : "+v"(result) : "v"(a), "v"(b));
  return result;
}

// The norm of a row.
inline float norm_of(const float* x, int64_t width) {
  V squares = zero();
  for (int64_t i = 0; i < width; i += kLanes) {
    const V v = load(x + i, width - i);
    squares = fma(v, v, squares);
  }
  return std::sqrt(sum(squares));
}

// Signs, then a Hadamard transform of each power of two of places, then `mix` across these. Of `scratch`'s two rows the
// second holds the result.
inline const float* rotate_row(const Screen& s, float* scratch) {
  const int64_t inner = s.width / s.outer;
  float *x = scratch, *out = scratch + s.width;
  for (int64_t i = 0; i < s.width; ++i) x[i] *= s.signs[i];
  for (int64_t half = 1; half < inner; half *= 2)
    for (int64_t block = 0; block < s.width; block += 2 * half)
      for (int64_t i = block; i < block + half; ++i) {
        const float a = x[i], b = x[i + half];
        x[i] = a + b, x[i + half] = a - b;
      }
  for (int64_t o = 0; o < s.outer; ++o) {
    float* row = out + o * inner;
    std::fill(row, row + inner, 0.0f);
    for (int64_t k = 0; k < s.outer; ++k) {
      const float factor = s.mix[o * s.outer + k];
      for (int64_t i = 0; i < inner; ++i) row[i] += factor * x[k * inner + i];
    }
  }
  return out;
}

ScreenedRow quantize(const Screen& s, const void* x, DType dtype, float* scratch, uint8_t* digits) {
  for (int64_t i = 0; i < s.width; i += kLanes) {
    const int64_t left = s.width - i;
    store(scratch + i, dtype == DType::kBFloat16 ? load(static_cast<const bf16*>(x) + i, left)
                                                 : load(static_cast<const float*>(x) + i, left), left);
  }
  const float* rotated = rotate_row(s, scratch);
  V most = zero();
  for (int64_t i = 0; i < s.width; i += kLanes) {
    const V v = load(rotated + i, s.width - i);
    most = max(most, max(v, sub(zero(), v)));
  }
  const float length = norm_of(rotated, s.width), unit = largest(most) / kLargestDigit;
  if (!(length < kLongest && unit > kSmallestUnit)) return {0, 0, false};  // NaN too
  std::fill(digits + s.width, digits + s.depth, uint8_t{kBias});
  V held = zero(), missed = zero();
  for (int64_t i = 0; i < s.width; i += kLanes) {
    const int64_t left = s.width - i;
    const V v = load(rotated + i, left), whole = nearest(div(v, splat(unit)));
    const V error = fnma(whole, splat(unit), v);
    held = fma(whole, whole, held), missed = fma(error, error, missed);
    writes(digits + i, bytes_of(left, 1));
    _mm512_mask_cvtepi32_storeu_epi8(digits + i, first(left),
                                     _mm512_add_epi32(_mm512_cvtps_epi32(whole), _mm512_set1_epi32(kBias)));
  }
  const float slack = kRoundings + kElementRounding * static_cast<float>(s.width);
  return {std::sqrt(sum(held)) * (1 + kRoundings), (std::sqrt(sum(missed)) + slack * length) / unit, true};
}

// Dot products of R rows with a panel, from `start` on.
template <int R>
[[gnu::noinline]] void dot_quads(const uint8_t* x, int64_t depth, const int8_t* w, const int32_t* start, Ahead ahead,
                                 float (*sums)[kPanel]) {
  V c[R][kPanelVectors];
  for (int r = 0; r < R; ++r)
    for (int j = 0; j < kPanelVectors; ++j) c[r][j] = load(reinterpret_cast<const float*>(start) + kLanes * j);
  for (const uint8_t* const end = x + depth; x < end; x += kQuad, w += kQuad * kPanel, ahead.at += ahead.stride) {
    fetch(ahead.at);
    __m512i b[kPanelVectors];
    for (int j = 0; j < kPanelVectors; ++j) b[j] = _mm512_loadu_si512(w + kQuad * kLanes * j);
    for (int r = 0; r < R; ++r) {
      int32_t word;
      std::memcpy(&word, x + r * depth, sizeof word);
      const __m512i a = _mm512_set1_epi32(word);
      for (int j = 0; j < kPanelVectors; ++j) c[r][j] = multiply_quads(a, b[j], c[r][j]);
    }
  }
  for (int r = 0; r < R; ++r)
    for (int j = 0; j < kPanelVectors; ++j) store(sums[r] + kLanes * j, c[r][j]);
}

inline void raise(std::atomic<float>& least, float value) {
  float seen = least.load(std::memory_order_relaxed);
  while (value > seen && !least.compare_exchange_weak(seen, value, std::memory_order_relaxed)) continue;
}

inline void add_candidate(Candidates& found, int32_t column, float most, float least) {
  if (most < least) return;
  if (found.count == Candidates::kCapacity) {  // those that have been ruled out since make room
    int64_t kept = 0;
    for (int64_t i = 0; i < found.count; ++i)
      if (found.most[i] >= least) found.columns[kept] = found.columns[i], found.most[kept++] = found.most[i];
    found.count = kept;
  }
  found.full |= found.count == Candidates::kCapacity;
  if (found.full) return;
  found.columns[found.count] = column;
  found.most[found.count++] = most;
}

template <int R>
void scan_tile(const Screen& s, const uint8_t* digits, const ScreenedRow* rows, int64_t panel, Ahead ahead,
               std::atomic<float>* least, Candidates* found) {
  alignas(64) float sums[R][kPanel];
  const int64_t column = panel * kPanel;
  dot_quads<R>(digits, s.depth, s.digits + column * s.depth, s.start + column, ahead, sums);
  for (int j = 0; j < kPanelVectors; ++j) {
    const int64_t at = column + kLanes * j;
    const V scale = load(s.scale + at), error = load(s.error + at), norm = load(s.norm + at);
    for (int r = 0; r < R; ++r) {
      const V value = mul(_mm512_cvtepi32_ps(_mm512_castps_si512(load(sums[r] + kLanes * j))), scale);
      const V reach = fma(splat(rows[r].reach), error, mul(splat(rows[r].slack), norm));
      const V most = add(value, reach);
      const float seen = least[r].load(std::memory_order_relaxed);
      uint32_t beyond = _mm512_cmp_ps_mask(most, splat(seen), _CMP_GE_OQ) & first(s.columns - at);
      if (__builtin_expect(beyond == 0, true)) continue;
      if (!rows[r].usable) continue;
      const int columns = static_cast<int>(std::min<int64_t>(kLanes, s.columns - at));
      const float bound = std::max(seen, largest(between(sub(value, reach), 0, columns, splat(-kInfinity))));
      raise(least[r], bound);
      alignas(64) float bounds[kLanes];
      store(bounds, most);
      for (; beyond != 0; beyond &= beyond - 1) {
        const int lane = __builtin_ctz(beyond);
        add_candidate(found[r], static_cast<int32_t>(at + lane), bounds[lane], bound);
      }
    }
  }
}

void scan(const Screen& s, const uint8_t* digits, const ScreenedRow* rows, int64_t count, int64_t first, int64_t last,
          std::atomic<float>* least, Candidates* found) {
  for (int64_t begin = 0; begin < count; begin += kRowChunk) {
    const int64_t end = std::min(count, begin + kRowChunk);
    // As in `part_of`: each tile fetches its part of the next panel.
    const int64_t stride = end - begin <= kTileRows ? 0 : end - begin <= 2 * kTileRows ? 2 * kLine : kLine;
    for (int64_t panel = first; panel < last; ++panel) {
      const char* next = reinterpret_cast<const char*>(s.digits + (panel + 1) * kPanel * s.depth);
      for (int64_t row = begin; row < end; row += kTileRows, next += s.depth / kQuad * stride) {
        const auto tile = [&](auto rows_together) {
          scan_tile<rows_together.value>(s, digits + row * s.depth, rows + row, panel, {next, stride}, least + row,
                                         found + row);
        };
        switch (std::min<int64_t>(kTileRows, end - row)) {
          case 6: tile(std::integral_constant<int, 6>()); break;
          case 5: tile(std::integral_constant<int, 5>()); break;
          case 4: tile(std::integral_constant<int, 4>()); break;
          case 3: tile(std::integral_constant<int, 3>()); break;
          case 2: tile(std::integral_constant<int, 2>()); break;
          case 1: tile(std::integral_constant<int, 1>()); break;
        }
      }
    }
  }
}

// Lane i computes column i's logit: the chain of `accumulate`, with weights gathered from the panels.
template <typename T>
void logits_of(const T* x, const T* packed, int64_t depth, const int32_t* columns, int64_t count, float* out) {
  for (int64_t i = 0; i < count; i += kLanes) {
    alignas(64) int32_t words[kLanes];
    for (int lane = 0; lane < kLanes; ++lane) {
      const int64_t column = columns[std::min(i + lane, count - 1)];
      words[lane] = static_cast<int32_t>((column / kPanel * kPanel * depth + column % kPanel * kStep<T>) / kStep<T>);
    }
    const __m512i at = _mm512_load_si512(words);
    V total = zero();
    for (int64_t k = 0; k < depth; k += kStep<T>) {
      const __m512i held = _mm512_i32gather_epi32(at, packed + k * kPanel, 4);
      if constexpr (sizeof(T) == sizeof(bf16)) {
        total = multiply_steps(splat_step(x + k), held, total);
      } else {
        total = multiply_steps(splat_step(x + k), _mm512_castsi512_ps(held), total);
      }
    }
    store(out + i, total, count - i);
  }
}

void logits(const void* x, DType dtype, const void* packed, int64_t depth, const int32_t* columns, int64_t count,
            float* out) {
  if (dtype == DType::kBFloat16)
    return logits_of(static_cast<const bf16*>(x), static_cast<const bf16*>(packed), depth, columns, count, out);
  logits_of(static_cast<const float*>(x), static_cast<const float*>(packed), depth, columns, count, out);
}

constexpr ScreenKernels screen_kernels = {quantize, scan, logits};

}  // namespace batonq::BATONQ_ISA
