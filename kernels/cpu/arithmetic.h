// The ops' arithmetic over `simd_*.h`, compiled once for each instruction set (see kernels.h for what is promised).
//
// Bits depend on the order of operations alone, which is written out here; the build forbids the compiler to contract or
// reorder floating-point expressions.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

namespace batonq::BATONQ_ISA {

constexpr float kInfinity = std::numeric_limits<float>::infinity();

// e^x, for x up to 88, to about 1 ulp; 0 below -87.3. Cody-Waite reduction and a polynomial of degree 6 (as in Cephes).
inline V exponential(V x) {
  const V bounded = max(x, splat(-104.0f));
  const V n = nearest(mul(bounded, splat(1.44269504f)));
  V r = fnma(n, splat(0.693359375f), bounded);
  r = fnma(n, splat(-2.12194440e-4f), r);
  V p = splat(1.9875691500e-4f);
  p = fma(p, r, splat(1.3981999507e-3f));
  p = fma(p, r, splat(8.3334519073e-3f));
  p = fma(p, r, splat(4.1665795894e-2f));
  p = fma(p, r, splat(1.6666665459e-1f));
  p = fma(p, r, splat(5.0000001201e-1f));
  p = fma(p, mul(r, r), add(r, splat(1.0f)));
  return where_below(x, -87.3f, zero(), scale(p, n));
}

// Rows that go through a share of the columns together: their inputs and a panel fit into a core's second cache.
constexpr int64_t kRowChunk = 21 * kTileRows;
constexpr int kLine = 64;

// ── products ────────────────────────────────────────────────────────────────────────────────────────────────────────

// `ahead` is what will be read next; F lines of it are fetched at each step.
template <int R, int J, int F>
inline void accumulate(V (&c)[R][J], const bf16* x, int64_t stride, const bf16* w, int64_t depth, const char* ahead) {
  for (int64_t k = 0; k < depth; k += 2, w += 2 * kPanel, ahead += F * kLine) {
    Pairs b[J];
    for (int j = 0; j < J; ++j) b[j] = load_pairs(w + 2 * kLanes * j);
    for (int f = 0; f < F; ++f) fetch(ahead + f * kLine);
    for (int r = 0; r < R; ++r) {
      const Pairs a = splat_pair(x + r * stride + k);
      for (int j = 0; j < J; ++j) c[r][j] = multiply_pairs(a, b[j], c[r][j]);
    }
  }
}

template <int R, int J, int F>
inline void accumulate(V (&c)[R][J], const float* x, int64_t stride, const float* w, int64_t depth,
                       const char* ahead) {
  for (int64_t k = 0; k < depth; ++k, w += kPanel, ahead += F * kLine) {
    V b[J];
    for (int j = 0; j < J; ++j) b[j] = load(w + kLanes * j);
    for (int f = 0; f < F; ++f) fetch(ahead + f * kLine);
    for (int r = 0; r < R; ++r) {
      const V a = splat(x[r * stride + k]);
      for (int j = 0; j < J; ++j) c[r][j] = fma(a, b[j], c[r][j]);
    }
  }
}

// A tile: R rows from `row` on, columns [column, column + 16 · J), whose weights begin at `w`.
template <int R, int J, int F, typename In, typename Out>
void tile(const Product& p, const In* w, int64_t column, int64_t row, const char* ahead) {
  V c[R][J];
  for (auto& of_row : c)
    for (V& sum : of_row) sum = zero();
  accumulate<R, J, F>(c, p.x.row<In>(row), p.x.stride, w, p.depth, ahead);
  for (int j = 0; j < J; ++j) {
    const int64_t at = column + kLanes * j, count = p.columns - at;
    if (count <= 0) return;
    for (int r = 0; r < R; ++r) {
      const V value = p.bias == nullptr ? c[r][j] : add(c[r][j], load(p.bias + at, count));
      store(p.out.row<Out>(row + r) + at, value, count);
    }
  }
}

// Rows [begin, end) through 16 · J columns. Tile after tile fetches another part of what comes next, from `ahead` on.
template <int J, int F, typename In, typename Out>
void strip(const Product& p, const In* w, int64_t column, int64_t begin, int64_t end, const char* ahead) {
  const int64_t bytes = p.depth * sizeof(In) / 4 * F * kLine;
  int64_t row = begin;
  for (; row + kTileRows <= end; row += kTileRows, ahead += bytes)
    tile<kTileRows, J, F, In, Out>(p, w, column, row, ahead);
  switch (end - row) {
    case 5: return tile<5, J, F, In, Out>(p, w, column, row, ahead);
    case 4: return tile<4, J, F, In, Out>(p, w, column, row, ahead);
    case 3: return tile<3, J, F, In, Out>(p, w, column, row, ahead);
    case 2: return tile<2, J, F, In, Out>(p, w, column, row, ahead);
    case 1: return tile<1, J, F, In, Out>(p, w, column, row, ahead);
    default: return;
  }
}

// The same, with as many lines a step as the number of tiles asks for. A single tile reads weights in one stream, which
// the processor foresees by itself.
template <int J, typename In, typename Out>
void strip(const Product& p, const In* w, int64_t column, int64_t begin, int64_t end, const char* ahead) {
  const int64_t rows = end - begin;
  if (rows <= kTileRows) return strip<J, 0, In, Out>(p, w, column, begin, end, ahead);
  if (rows <= 2 * kTileRows) return strip<J, 2, In, Out>(p, w, column, begin, end, ahead);
  return strip<J, 1, In, Out>(p, w, column, begin, end, ahead);
}

template <typename In, typename Out>
void multiply(const Product& p, int64_t first, int64_t last, int64_t begin, int64_t end) {
  constexpr int pair = sizeof(In) == sizeof(bf16) ? 2 : 1;
  const auto at = [&](int64_t column) {
    return static_cast<const In*>(p.packed) + column / kPanel * kPanel * p.depth + column % kPanel * pair;
  };
  for (int64_t rows = begin; rows < end; rows += kRowChunk) {
    const int64_t to = std::min(end, rows + kRowChunk);
    for (int64_t column = first; column < last;) {
      constexpr int wide = kTileVectors * kLanes, narrow = std::min(wide, kColumnGrain);
      const bool whole = column % wide == 0 && column + wide <= last;
      const int64_t next = column + (whole ? wide : narrow);
      const char* ahead = reinterpret_cast<const char*>(at(next));
      if (whole) {
        strip<wide / kLanes, In, Out>(p, at(column), column, rows, to, ahead);
      } else {
        strip<narrow / kLanes, In, Out>(p, at(column), column, rows, to, ahead);
      }
      column = next;
    }
  }
}

void product(const Product& p, int64_t first, int64_t last, int64_t begin, int64_t end) {
  if (p.x.dtype == DType::kFloat32) {
    multiply<float, float>(p, first, last, begin, end);
  } else if (p.out.dtype == DType::kFloat32) {
    multiply<bf16, float>(p, first, last, begin, end);
  } else {
    multiply<bf16, bf16>(p, first, last, begin, end);
  }
}

// ── rows ────────────────────────────────────────────────────────────────────────────────────────────────────────────

template <typename T>
void rms_norm(const T* x, const float* weight, T* out, int64_t width, float eps) {
  V squares = zero();
  for (int64_t i = 0; i < width; i += kLanes) {
    const V v = load(x + i, width - i);
    squares = fma(v, v, squares);
  }
  const V factor = splat(1.0f / std::sqrt(sum(squares) / static_cast<float>(width) + eps));
  for (int64_t i = 0; i < width; i += kLanes) {
    const int64_t left = width - i;
    store(out + i, mul(mul(load(x + i, left), factor), load(weight + i, left)), left);
  }
}

template <typename T>
void silu_mul(const T* gate, const T* up, T* out, int64_t width) {
  for (int64_t i = 0; i < width; i += kLanes) {
    const int64_t left = width - i;
    const V g = load(gate + i, left);
    // Of -|g|, so that nothing overflows: sigmoid(g) = e^min(g, 0) / (1 + e^-|g|).
    const V e = exponential(min(g, sub(zero(), g)));
    const V sigmoid = div(where_below(g, 0.0f, e, splat(1.0f)), add(splat(1.0f), e));
    store(out + i, mul(mul(g, sigmoid), load(up + i, left)), left);
  }
}

template <typename T>
void sum_rows(const T* x, const T* y, T* out, int64_t width) {
  for (int64_t i = 0; i < width; i += kLanes) {
    const int64_t left = width - i;
    store(out + i, add(load(x + i, left), load(y + i, left)), left);
  }
}

template <typename T>
void rotate(T* head, const float* cos, const float* sin, int64_t half) {
  for (int64_t i = 0; i < half; i += kLanes) {
    const int64_t left = half - i;
    const V a = load(head + i, left), b = load(head + half + i, left);
    const V c = load(cos + i, left), s = load(sin + i, left);
    store(head + i, fnma(b, s, mul(a, c)), left);
    store(head + half + i, fma(b, c, mul(a, s)), left);
  }
}

// ── attention ───────────────────────────────────────────────────────────────────────────────────────────────────────
//
// Rows are the query heads of one KV head, for one or several tokens of a sequence. Each row walks the keys in order, in
// chunks that begin at multiples of kChunk, with a running maximum and sum (Milakov and Gimelshein, arXiv:1805.02867).
// Rows go together only to read a block once: a key that a row doesn't see weighs exactly 0 in it.

constexpr int kChunkBlocks = 8, kChunk = kChunkBlocks * kBlock;
constexpr int kBlockVectors = kBlock / kLanes;
constexpr int kScoreVectors = kTileVectors < kBlockVectors ? kTileVectors : kBlockVectors;

// A chunk's blocks. While one is read, what is read next is fetched: the next block of keys, the first of values, the next
// block of values, and the keys of the next chunk or of the next job.
template <typename T>
struct Chunk {
  const T* keys[kChunkBlocks];
  const T* values[kChunkBlocks + 1];  // and what comes after them
  int blocks;
  int held;  // tokens in them
};

// 2^x to 2 ulp for x from -126 to 127; 0 from -150 down. The polynomial is a minimax fit of the relative error on
// [-1/2, 1/2].
inline V power_of_two(V x) {
  const V bounded = max(x, splat(-200.0f));
  const V n = nearest(bounded);
  const V r = sub(bounded, n);
  V p = splat(1.326472731e-3f);
  p = fma(p, r, splat(9.671512991e-3f));
  p = fma(p, r, splat(5.550733581e-2f));
  p = fma(p, r, splat(2.402224243e-1f));
  p = fma(p, r, splat(6.931470037e-1f));
  p = fma(p, r, splat(1.0f));
  return scale(p, n);
}

// Scores of R rows with J vectors of keys, `ahead` being what is fetched meanwhile.
template <int R, int J>
inline void scores(const bf16* const* q, const bf16* keys, const bf16* ahead, int head_dim, float (*out)[kChunk]) {
  V c[R][J];
  for (auto& of_row : c)
    for (V& sum : of_row) sum = zero();
  for (int d = 0; d < head_dim; d += 2) {
    Pairs k[J];
    for (int j = 0; j < J; ++j) {
      k[j] = load_pairs(keys + (j * head_dim + d) * kLanes);
      fetch(ahead + (j * head_dim + d) * kLanes);
    }
    for (int r = 0; r < R; ++r) {
      const Pairs a = splat_pair(q[r] + d);
      for (int j = 0; j < J; ++j) c[r][j] = multiply_pairs(a, k[j], c[r][j]);
    }
  }
  for (int r = 0; r < R; ++r)
    for (int j = 0; j < J; ++j) store(out[r] + kLanes * j, c[r][j]);
}

template <int R, int J>
inline void scores(const float* const* q, const float* keys, const float* ahead, int head_dim, float (*out)[kChunk]) {
  V c[R][J];
  for (auto& of_row : c)
    for (V& sum : of_row) sum = zero();
  for (int d = 0; d < head_dim; ++d) {
    V k[J];
    for (int j = 0; j < J; ++j) {
      k[j] = load(keys + (j * head_dim + d) * kLanes);
      fetch(ahead + (j * head_dim + d) * kLanes);
    }
    for (int r = 0; r < R; ++r) {
      const V a = splat(q[r][d]);
      for (int j = 0; j < J; ++j) c[r][j] = fma(a, k[j], c[r][j]);
    }
  }
  for (int r = 0; r < R; ++r)
    for (int j = 0; j < J; ++j) store(out[r] + kLanes * j, c[r][j]);
}

// sums = sums · factor + weights · values, for columns [column, column + 16 · J) of R rows.
template <int R, int J>
inline void mix(float (*sums)[kMaxHeadDim], const float* factor, const bf16 (*weights)[kChunk],
                const Chunk<bf16>& chunk, int head_dim, int column) {
  V c[R][J];
  for (int r = 0; r < R; ++r)
    for (int j = 0; j < J; ++j) c[r][j] = mul(load(sums[r] + column + kLanes * j), splat(factor[r]));
  for (int token = 0; token < chunk.held; token += 2) {
    const int block = token / kBlock, at = (token % kBlock * head_dim + column * 2);
    Pairs v[J];
    for (int j = 0; j < J; ++j) {
      const bf16* pair = chunk.values[block] + at + kLanes * j * 2;
      // A second token that doesn't exist may be anything, NaN included: it is masked.
      v[j] = token + 1 < chunk.held ? load_pairs(pair) : load_firsts(pair);
      fetch(chunk.values[block + 1] + at + kLanes * j * 2);
    }
    for (int r = 0; r < R; ++r) {
      const Pairs a = splat_pair(weights[r] + token);
      for (int j = 0; j < J; ++j) c[r][j] = multiply_pairs(a, v[j], c[r][j]);
    }
  }
  for (int r = 0; r < R; ++r)
    for (int j = 0; j < J; ++j) store(sums[r] + column + kLanes * j, c[r][j]);
}

template <int R, int J>
inline void mix(float (*sums)[kMaxHeadDim], const float* factor, const float (*weights)[kChunk],
                const Chunk<float>& chunk, int head_dim, int column) {
  V c[R][J];
  for (int r = 0; r < R; ++r)
    for (int j = 0; j < J; ++j) c[r][j] = mul(load(sums[r] + column + kLanes * j), splat(factor[r]));
  for (int token = 0; token < chunk.held; ++token) {
    const int block = token / kBlock, at = token % kBlock * head_dim + column;
    V v[J];
    for (int j = 0; j < J; ++j) {
      v[j] = load(chunk.values[block] + at + kLanes * j);
      fetch(chunk.values[block + 1] + at + kLanes * j);
    }
    for (int r = 0; r < R; ++r) {
      const V a = splat(weights[r][token]);
      for (int j = 0; j < J; ++j) c[r][j] = fma(a, v[j], c[r][j]);
    }
  }
  for (int r = 0; r < R; ++r)
    for (int j = 0; j < J; ++j) store(sums[r] + column + kLanes * j, c[r][j]);
}

// What a tile's rows have come to, and which keys of the present chunk each of them sees.
template <typename T>
struct Rows {
  const T* q[kMaxRows];
  int position[kMaxRows], from[kMaxRows], to[kMaxRows];
  float maximum[kMaxRows], total[kMaxRows];
  alignas(64) float sums[kMaxRows][kMaxHeadDim];
};

// Turns R rows' scores of a chunk into weights, and brings maxima and totals up to date. `scaling` includes log2(e).
// Returns in `factor` what the rows' sums so far must be multiplied with.
template <int R, typename T>
inline void weigh(Rows<T>& rows, int first, float (*s)[kChunk], T (*weights)[kChunk], int vectors, float scaling,
                  float* factor) {
  alignas(64) float change[kLanes] = {};
  for (int r = 0; r < R; ++r) {
    const int from = rows.from[first + r], to = rows.to[first + r];
    if (from > 0 || to < vectors * kLanes)
      for (int j = 0; j < vectors; ++j)
        store(s[r] + kLanes * j,
              between(load(s[r] + kLanes * j), from - kLanes * j, to - kLanes * j, splat(-kInfinity)));
    V highest = load(s[r]);
    for (int j = 1; j < vectors; ++j) highest = max(highest, load(s[r] + kLanes * j));
    const float maximum = std::max(rows.maximum[first + r], largest(highest) * scaling);
    change[r] = rows.maximum[first + r] - maximum;
    rows.maximum[first + r] = maximum;
    V total = zero();
    for (int j = 0; j < vectors; ++j) {
      const V weight = power_of_two(fma(load(s[r] + kLanes * j), splat(scaling), splat(-maximum)));
      store(weights[r] + kLanes * j, weight, kLanes);
      total = add(total, weight);
    }
    factor[r] = sum(total);
  }
  store(change, power_of_two(load(change)));
  for (int r = 0; r < R; ++r) {
    rows.total[first + r] = rows.total[first + r] * change[r] + factor[r];
    factor[r] = change[r];
  }
}

// Takes R rows from `first` on through one chunk.
template <int R, typename T>
void through_chunk(Rows<T>& rows, int first, const Chunk<T>& chunk, const AttentionJob& job) {
  alignas(64) float s[R][kChunk];
  alignas(64) T weights[R][kChunk];
  float factor[R];
  for (int b = 0; b < chunk.blocks; ++b) {
    const T* ahead = b + 1 < chunk.blocks ? chunk.keys[b + 1] : chunk.values[0];
    for (int v = 0; v < kBlockVectors; v += kScoreVectors) {
      const int64_t at = static_cast<int64_t>(v) * kLanes * job.head_dim;
      scores<R, kScoreVectors>(rows.q + first, chunk.keys[b] + at, ahead + at, job.head_dim,
                               reinterpret_cast<float(*)[kChunk]>(&s[0][b * kBlock + v * kLanes]));
    }
  }
  weigh<R>(rows, first, s, weights, chunk.blocks * kBlockVectors, job.scale * 1.44269504f, factor);
  int column = 0;
  constexpr int wide = kTileVectors;
  for (; column + wide * kLanes <= job.head_dim; column += wide * kLanes)
    mix<R, wide>(rows.sums + first, factor, weights, chunk, job.head_dim, column);
  for (; column < job.head_dim; column += kLanes)
    mix<R, 1>(rows.sums + first, factor, weights, chunk, job.head_dim, column);
}

template <typename T>
void attend(const AttentionJob& job) {
  const int group = job.q_heads / job.kv_heads, count = group * job.count;
  Rows<T> rows;
  for (int r = 0; r < count; ++r) {
    const int64_t token = job.first + r / group;
    rows.q[r] = job.qkv.row<T>(token) + (job.kv_head * group + r % group) * job.head_dim;
    rows.position[r] = job.positions[token];
    rows.maximum[r] = -kInfinity;
    rows.total[r] = 0.0f;
    std::memset(rows.sums[r], 0, sizeof(float) * job.head_dim);
  }
  const int last = rows.position[count - 1], last_block = last / kBlock;
  const int seen_from = job.window > 0 ? std::max(0, rows.position[0] - job.window + 1) : 0;
  const auto at = [&](const void* memory, int block) {
    const int64_t index = static_cast<int64_t>(job.block_table[block]) * job.kv_heads + job.kv_head;
    return static_cast<const T*>(memory) + index * kBlock * job.head_dim;
  };
  for (int block = seen_from / kChunk * kChunkBlocks; block <= last_block; block += kChunkBlocks) {
    Chunk<T> chunk;
    const int base = block * kBlock;
    chunk.blocks = std::min(kChunkBlocks, last_block + 1 - block);
    chunk.held = std::min(kChunk, last + 1 - base);
    for (int b = 0; b < chunk.blocks; ++b)
      chunk.keys[b] = at(job.keys, block + b), chunk.values[b] = at(job.values, block + b);
    const int next = block + chunk.blocks;
    chunk.values[chunk.blocks] = next <= last_block ? at(job.keys, next) : static_cast<const T*>(job.ahead);
    for (int r = 0; r < count; ++r) {
      rows.to[r] = std::clamp(rows.position[r] + 1 - base, 0, kChunk);
      rows.from[r] = job.window > 0 ? std::clamp(rows.position[r] + 1 - job.window - base, 0, kChunk) : 0;
    }
    for (int r = 0; r < count;) {
      int seeing = 0;
      while (seeing < kTileRows && r + seeing < count && rows.from[r + seeing] < rows.to[r + seeing]) ++seeing;
      switch (seeing) {
        case 6: through_chunk<6, T>(rows, r, chunk, job); break;
        case 5: through_chunk<5, T>(rows, r, chunk, job); break;
        case 4: through_chunk<4, T>(rows, r, chunk, job); break;
        case 3: through_chunk<3, T>(rows, r, chunk, job); break;
        case 2: through_chunk<2, T>(rows, r, chunk, job); break;
        case 1: through_chunk<1, T>(rows, r, chunk, job); break;
        default: seeing = 1;  // this row sees nothing of the chunk
      }
      r += seeing;
    }
  }
  for (int r = 0; r < count; ++r) {
    const V total = splat(rows.total[r]);
    T* out = job.out.row<T>(job.first + r / group) + (job.kv_head * group + r % group) * job.head_dim;
    for (int d = 0; d < job.head_dim; d += kLanes) store(out + d, div(load(rows.sums[r] + d), total), kLanes);
  }
}

// ── the table ───────────────────────────────────────────────────────────────────────────────────────────────────────

template <typename T>
constexpr RowKernels row_kernels() {
  return {
      [](const void* x, const float* weight, void* out, int64_t width, float eps) {
        rms_norm(static_cast<const T*>(x), weight, static_cast<T*>(out), width, eps);
      },
      [](const void* gate, const void* up, void* out, int64_t width) {
        silu_mul(static_cast<const T*>(gate), static_cast<const T*>(up), static_cast<T*>(out), width);
      },
      [](const void* x, const void* y, void* out, int64_t width) {
        sum_rows(static_cast<const T*>(x), static_cast<const T*>(y), static_cast<T*>(out), width);
      },
      [](void* head, const float* cos, const float* sin, int64_t half) {
        rotate(static_cast<T*>(head), cos, sin, half);
      },
      [](const AttentionJob& job) { attend<T>(job); },
  };
}

}  // namespace batonq::BATONQ_ISA
