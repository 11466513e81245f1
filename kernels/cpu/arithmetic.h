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
constexpr float kLog2E = 1.44269504f;

// What one multiplication takes of a row: a pair of bf16, or one float.
template <typename T>
constexpr int kStep = sizeof(T) == sizeof(bf16) ? 2 : 1;
inline Pairs load_steps(const bf16* p) { return load_pairs(p); }
inline V load_steps(const float* p) { return load(p); }
inline Pairs splat_step(const bf16* p) { return splat_pair(p); }
inline V splat_step(const float* p) { return splat(*p); }
inline V multiply_steps(Pairs a, Pairs b, V sum) { return multiply_pairs(a, b, sum); }
inline V multiply_steps(V a, V b, V sum) { return fma(a, b, sum); }
// Of steps whose second half may be missing, and then anything, NaN included: it is masked.
inline Pairs load_held(const bf16* p, bool whole) { return whole ? load_pairs(p) : load_firsts(p); }
inline V load_held(const float* p, bool) { return load(p); }

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

// Rows that go through a share of the columns together: their inputs and a panel fit into a core's second cache.
constexpr int64_t kRowChunk = 21 * kTileRows;
constexpr int kLine = 64;

// ── products ────────────────────────────────────────────────────────────────────────────────────────────────────────

// `ahead` is what will be read next; a line of it, `stride` bytes further each time, is fetched at each step.
struct Ahead {
  const char* at;
  int64_t stride;
};

template <int R, int J, typename T>
[[gnu::always_inline]] inline void accumulate_step(V (&c)[R][J], const T* x, int64_t stride, const T* w) {
  decltype(load_steps(w)) b[J];
  for (int j = 0; j < J; ++j) b[j] = load_steps(w + kStep<T> * kLanes * j);
  for (int r = 0; r < R; ++r) {
    const auto a = splat_step(x + r * stride);
    for (int j = 0; j < J; ++j) c[r][j] = multiply_steps(a, b[j], c[r][j]);
  }
}

template <int R, int J, typename T>
[[gnu::always_inline]] inline void accumulate(V (&c)[R][J], const T* x, int64_t stride, const T* w, int64_t depth,
                                              Ahead ahead, Errand* errand) {
  const T* const end = x + depth;
  int64_t bytes = depth / kStep<T> * kLine;
  if (const char* aside = errand == nullptr ? nullptr : errand->take(bytes)) {
    for (; bytes > 0; bytes -= kLine, x += kStep<T>, w += kStep<T> * kPanel) {
      fetch(ahead.at);
      fetch(aside);
      ahead.at += ahead.stride, aside += kLine;
      accumulate_step<R, J>(c, x, stride, w);
    }
  }
  for (; x < end; x += kStep<T>, w += kStep<T> * kPanel, ahead.at += ahead.stride) {
    fetch(ahead.at);
    accumulate_step<R, J>(c, x, stride, w);
  }
}

inline V biased(const Product& p, V sum, int64_t column, int64_t count) {
  return p.bias == nullptr ? sum : add(sum, load(p.bias + column, count));
}

// Where a tile's sums go: sink(r, j, sum) for row r and vector j of the tile.

template <typename Out, bool kAdds>
struct Written {
  const Product& p;
  int64_t row, column;
  // Rows of logits are so long that no cache has them.
  void expect(int r, int j) const {
    if (!kAdds && sizeof(Out) == sizeof(float)) fetch_to_write(p.out.row<Out>(row + r) + column + kLanes * j);
  }
  void operator()(int r, int j, V sum) const {
    const int64_t at = column + kLanes * j, count = p.columns - at;
    if (count <= 0) return;
    Out* out = p.out.row<Out>(row + r) + at;
    V value = biased(p, sum, at, count);
    if constexpr (kAdds) value = add(load(out, count), sizeof(Out) == sizeof(bf16) ? rounded(value) : value);
    store(out, value, count);
  }
};

// A panel of gates and the values beside them, until all of it is there.
template <typename Out>
struct Gated {
  const Product& p;
  int64_t panel;
  int vector;
  Out (*scratch)[kPanel];
  void expect(int, int) const {}
  void operator()(int r, int j, V sum) const {
    constexpr int half = kGated / kLanes;
    const int v = vector + j;
    const int64_t unit = panel * kGated + v % half * kLanes, count = p.columns - unit;
    if (count > 0) store(scratch[r] + v * kLanes, biased(p, sum, v < half ? unit : p.columns + unit, count), kLanes);
  }
};

// A tile: R rows from `row` on, and J vectors of columns, whose weights begin at `w`.
template <int R, int J, typename In, typename Sink>
inline void tile(const Product& p, const In* w, int64_t row, Ahead ahead, const Sink& sink) {
  V c[R][J];
  for (int r = 0; r < R; ++r)
    for (int j = 0; j < J; ++j) c[r][j] = zero(), sink.expect(r, j);
  accumulate<R, J>(c, p.x.row<In>(row), p.x.stride, w, p.depth, ahead, p.errand);
  for (int r = 0; r < R; ++r)
    for (int j = 0; j < J; ++j) sink(r, j, c[r][j]);
}

template <int J, typename In, typename Sink>
inline void tile_of(int64_t rows, const Product& p, const In* w, int64_t row, Ahead ahead, const Sink& sink) {
  switch (rows) {
    case 6: return tile<6, J, In>(p, w, row, ahead, sink);
    case 5: return tile<5, J, In>(p, w, row, ahead, sink);
    case 4: return tile<4, J, In>(p, w, row, ahead, sink);
    case 3: return tile<3, J, In>(p, w, row, ahead, sink);
    case 2: return tile<2, J, In>(p, w, row, ahead, sink);
    case 1: return tile<1, J, In>(p, w, row, ahead, sink);
  }
}

// Parts of [begin, end) of up to `most` each, as equal as can be, so that none is a small rest that reads as much as the
// others: take(from, to, index).
template <typename Take>
[[gnu::always_inline]] inline void evenly(int64_t begin, int64_t end, int64_t most, const Take& take) {
  const int64_t count = end - begin, parts = (count + most - 1) / most;
  for (int64_t i = 0; i < parts; ++i) take(begin + count * i / parts, begin + count * (i + 1) / parts, i);
}

// Of the weights that come next, the part that one of the tiles of some rows fetches. Two tiles have to fetch two
// lines a step, of which the processor adds the second by itself; a single tile reads the weights in one stream, which
// it foresees.
template <typename In>
inline Ahead part_of(const In* next, const Product& p, int64_t tile, int64_t rows) {
  const int64_t stride = rows <= kTileRows ? 0 : rows <= 2 * kTileRows ? 2 * kLine : kLine;
  const int64_t steps = p.depth * static_cast<int64_t>(sizeof(In)) / 4;
  return {reinterpret_cast<const char*>(next) + tile * steps * stride, stride};
}

// Rows [begin, end) through J vectors of columns.
template <int J, typename In, typename Sink>
void strip(const Product& p, const In* w, const In* next, int64_t column, int64_t begin, int64_t end) {
  evenly(begin, end, kTileRows, [&](int64_t row, int64_t to, int64_t tile) {
    tile_of<J, In>(to - row, p, w, row, part_of(next, p, tile, end - begin), Sink{p, row, column});
  });
}

template <typename In>
inline const In* weights_at(const Product& p, int64_t column) {
  return static_cast<const In*>(p.packed) + column / kPanel * kPanel * p.depth + column % kPanel * kStep<In>;
}

template <typename In, typename Sink>
void multiply(const Product& p, int64_t first, int64_t last, int64_t begin, int64_t end) {
  constexpr int wide = kTileVectors * kLanes, narrow = std::min(wide, kColumnGrain);
  evenly(begin, end, kRowChunk, [&](int64_t rows, int64_t to, int64_t) {
    for (int64_t column = first; column < last;) {
      const bool whole = column % wide == 0 && column + wide <= last;
      const int64_t next = column + (whole ? wide : narrow);
      const In *w = weights_at<In>(p, column), *ahead = weights_at<In>(p, next);
      if (whole) {
        strip<wide / kLanes, In, Sink>(p, w, ahead, column, rows, to);
      } else {
        strip<narrow / kLanes, In, Sink>(p, w, ahead, column, rows, to);
      }
      column = next;
    }
  });
}

template <typename T>
void silu_mul(const T* gate, const T* up, T* out, int64_t width);

// Gates and values lie side by side in each panel, so that a unit is made where its two sums are.
template <typename T>
void multiply_gated(const Product& p, int64_t first, int64_t last, int64_t begin, int64_t end) {
  alignas(64) T scratch[kTileRows][kPanel];
  evenly(begin, end, kRowChunk, [&](int64_t rows, int64_t to, int64_t) {
    for (int64_t column = first; column < last; column += kPanel) {
      const int64_t panel = column / kPanel, unit = panel * kGated;
      evenly(rows, to, kTileRows, [&](int64_t row, int64_t row_end, int64_t tile) {
        for (int v = 0; v < kPanel / kLanes; v += kTileVectors)
          tile_of<kTileVectors, T>(row_end - row, p, weights_at<T>(p, column + v * kLanes), row,
                                   part_of(weights_at<T>(p, column + kPanel), p, tile, to - rows),
                                   Gated<T>{p, panel, v, scratch});
        for (int64_t r = row; r < row_end; ++r)
          silu_mul(scratch[r - row], scratch[r - row] + kGated, p.out.row<T>(r) + unit,
                   std::min<int64_t>(kGated, p.columns - unit));
      });
    }
  });
}

template <typename In, typename Out>
void product_of(const Product& p, int64_t first, int64_t last, int64_t begin, int64_t end) {
  if (p.into == Into::kStore) return multiply<In, Written<Out, false>>(p, first, last, begin, end);
  if constexpr (sizeof(In) == sizeof(Out)) {
    if (p.into == Into::kAdd) return multiply<In, Written<Out, true>>(p, first, last, begin, end);
    return multiply_gated<In>(p, first, last, begin, end);
  }
}

void product(const Product& p, int64_t first, int64_t last, int64_t begin, int64_t end) {
  if (p.x.dtype == DType::kFloat32) return product_of<float, float>(p, first, last, begin, end);
  if (p.out.dtype == DType::kFloat32) return product_of<bf16, float>(p, first, last, begin, end);
  return product_of<bf16, bf16>(p, first, last, begin, end);
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
    // g / (1 + e^-g); beyond 2^126 the quotient is no more than a rounding away from 0.
    const V e = power_of_two(min(mul(g, splat(-kLog2E)), splat(126.0f)));
    store(out + i, mul(div(g, add(splat(1.0f), e)), load(up + i, left)), left);
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

// Scores of R rows with J vectors of keys, `ahead` being what is fetched meanwhile.
template <int R, int J, typename T>
inline void scores(const T* const* q, const T* keys, const T* ahead, int head_dim, float (*out)[kChunk]) {
  V c[R][J];
  for (auto& of_row : c)
    for (V& sum : of_row) sum = zero();
  for (int d = 0; d < head_dim; d += kStep<T>) {
    decltype(load_steps(keys)) k[J];
    for (int j = 0; j < J; ++j) {
      k[j] = load_steps(keys + (j * head_dim + d) * kLanes);
      fetch(ahead + (j * head_dim + d) * kLanes);
    }
    for (int r = 0; r < R; ++r) {
      const auto a = splat_step(q[r] + d);
      for (int j = 0; j < J; ++j) c[r][j] = multiply_steps(a, k[j], c[r][j]);
    }
  }
  for (int r = 0; r < R; ++r)
    for (int j = 0; j < J; ++j) store(out[r] + kLanes * j, c[r][j]);
}

// Of a chunk: tokens [from, to), columns from `column` on, and the head that lies `offset` behind the chunk's pointers.
struct Part {
  int from, to, column, head_dim;
  int64_t offset;
};

template <typename T>
inline const T* values_at(const Chunk<T>& chunk, const Part& part, int token) {
  return chunk.values[token / kBlock] + part.offset + token % kBlock * part.head_dim + part.column * kStep<T>;
}

// sums = sums · factor + weights · values, for 16 · J columns of R rows, over tokens that all of them see.
template <int R, int J, typename T>
inline void mix(float (*sums)[kMaxHeadDim], const float* factor, const T (*weights)[kChunk], const Chunk<T>& chunk,
                const Part& part) {
  V c[R][J];
  for (int r = 0; r < R; ++r)
    for (int j = 0; j < J; ++j) c[r][j] = mul(load(sums[r] + part.column + kLanes * j), splat(factor[r]));
  for (int token = part.from; token < part.to; token += kStep<T>) {
    const T* values = values_at(chunk, part, token);
    const T* ahead = values - chunk.values[token / kBlock] + chunk.values[token / kBlock + 1];
    decltype(load_steps(values)) v[J];
    for (int j = 0; j < J; ++j) {
      v[j] = load_steps(values + kLanes * j * kStep<T>);
      fetch(ahead + kLanes * j * kStep<T>);
    }
    for (int r = 0; r < R; ++r) {
      const auto a = splat_step(weights[r] + token);
      for (int j = 0; j < J; ++j) c[r][j] = multiply_steps(a, v[j], c[r][j]);
    }
  }
  for (int r = 0; r < R; ++r)
    for (int j = 0; j < J; ++j) store(sums[r] + part.column + kLanes * j, c[r][j]);
}

// The same for a row's last tokens, of which there may be half a step.
template <int J, typename T>
inline void mix_rest(float* sums, const T* weights, const Chunk<T>& chunk, const Part& part) {
  V c[J];
  for (int j = 0; j < J; ++j) c[j] = load(sums + part.column + kLanes * j);
  for (int token = part.from; token < part.to; token += kStep<T>) {
    const T* values = values_at(chunk, part, token);
    const auto a = splat_step(weights + token);
    for (int j = 0; j < J; ++j)
      c[j] = multiply_steps(a, load_held(values + kLanes * j * kStep<T>, token + kStep<T> <= part.to), c[j]);
  }
  for (int j = 0; j < J; ++j) store(sums + part.column + kLanes * j, c[j]);
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

// Scores of R rows with block b of a chunk, for the head that lies `offset` behind the chunk's pointers.
template <int R, typename T>
inline void score_block(const Rows<T>& rows, int first, const Chunk<T>& chunk, int b, int64_t offset, int head_dim,
                        float (*s)[kChunk]) {
  const T* ahead = b + 1 < chunk.blocks ? chunk.keys[b + 1] : chunk.values[0];
  for (int v = 0; v < kBlockVectors; v += kScoreVectors) {
    const int64_t at = offset + static_cast<int64_t>(v) * kLanes * head_dim;
    scores<R, kScoreVectors>(rows.q + first, chunk.keys[b] + at, ahead + at, head_dim,
                             reinterpret_cast<float(*)[kChunk]>(&s[0][b * kBlock + v * kLanes]));
  }
}

// Each row over the tokens of the part that it sees. Behind them weights are 0, but values may be NaN, of a later row's
// making, so a row's last tokens are not multiplied for others.
template <int R, int J, typename T>
inline void mix_seen(Rows<T>& rows, int first, const float* factor, const T (*weights)[kChunk], const Chunk<T>& chunk,
                     Part part) {
  const int to = part.to, common = std::min(to, *std::min_element(rows.to + first, rows.to + first + R));
  part.to = common / kStep<T> * kStep<T>;
  mix<R, J>(rows.sums + first, factor, weights, chunk, part);
  part.from = std::max(part.from, part.to);
  for (int r = 0; r < R; ++r) {
    part.to = std::min(to, rows.to[first + r]);
    if (part.from < part.to) mix_rest<J>(rows.sums[first + r], weights[r], chunk, part);
  }
}

template <int R, typename T>
inline void mix_columns(Rows<T>& rows, int first, const float* factor, const T (*weights)[kChunk],
                        const Chunk<T>& chunk, Part part) {
  constexpr int wide = kTileVectors;
  for (; part.column + wide * kLanes <= part.head_dim; part.column += wide * kLanes)
    mix_seen<R, wide>(rows, first, factor, weights, chunk, part);
  for (; part.column < part.head_dim; part.column += kLanes)
    mix_seen<R, 1>(rows, first, factor, weights, chunk, part);
}

// Takes R rows from `first` on through one chunk.
template <int R, typename T>
void through_chunk(Rows<T>& rows, int first, const Chunk<T>& chunk, const AttentionJob& job) {
  alignas(64) float s[R][kChunk];
  alignas(64) T weights[R][kChunk];
  float factor[R];
  for (int b = 0; b < chunk.blocks; ++b) score_block<R>(rows, first, chunk, b, 0, job.head_dim, s);
  weigh<R>(rows, first, s, weights, chunk.blocks * kBlockVectors, job.scale * kLog2E, factor);
  mix_columns<R>(rows, first, factor, weights, chunk, {0, chunk.held, 0, job.head_dim, 0});
}

// Takes one token's rows, R for each of the job's KV heads, through one chunk, block by block for all heads: so memory
// is read in one piece. Where sums pause between blocks they are stored as they are, so the bits are the same.
template <int R, typename T>
void heads_through_chunk(Rows<T>& rows, const Chunk<T>& chunk, const AttentionJob& job) {
  alignas(64) float s[kMaxRows][kChunk];
  alignas(64) T weights[kMaxRows][kChunk];
  float factor[kMaxRows], ones[R];
  std::fill(ones, ones + R, 1.0f);
  const int64_t stride = static_cast<int64_t>(kBlock) * job.head_dim;
  for (int b = 0; b < chunk.blocks; ++b)
    for (int h = 0; h < job.heads; ++h) score_block<R>(rows, h * R, chunk, b, h * stride, job.head_dim, s + h * R);
  for (int h = 0; h < job.heads; ++h)
    weigh<R>(rows, h * R, s + h * R, weights + h * R, chunk.blocks * kBlockVectors, job.scale * kLog2E, factor + h * R);
  for (int b = 0; b < chunk.blocks; ++b) {
    const int from = b * kBlock, to = std::min(chunk.held, from + kBlock);
    for (int h = 0; h < job.heads; ++h)
      mix_columns<R>(rows, h * R, b == 0 ? factor + h * R : ones, weights + h * R, chunk,
                     {from, to, 0, job.head_dim, h * stride});
  }
}

// All rows of a tile through one chunk, as many together as see something of it.
template <typename T>
void rows_through_chunk(Rows<T>& rows, int count, const Chunk<T>& chunk, const AttentionJob& job) {
  for (int r = 0; r < count;) {
    int seeing = 0;
    while (seeing < kTileRows && r + seeing < count && rows.from[r + seeing] < rows.to[r + seeing]) ++seeing;
    switch (seeing) {
      case 6: through_chunk<6>(rows, r, chunk, job); break;
      case 5: through_chunk<5>(rows, r, chunk, job); break;
      case 4: through_chunk<4>(rows, r, chunk, job); break;
      case 3: through_chunk<3>(rows, r, chunk, job); break;
      case 2: through_chunk<2>(rows, r, chunk, job); break;
      case 1: through_chunk<1>(rows, r, chunk, job); break;
      default: seeing = 1;  // this row sees nothing of the chunk
    }
    r += seeing;
  }
}

template <typename T>
void heads_through_chunk(Rows<T>& rows, int group, const Chunk<T>& chunk, const AttentionJob& job) {
  if (rows.from[0] >= rows.to[0]) return;  // the window begins behind the chunk
  switch (group) {
    case 6: return heads_through_chunk<6>(rows, chunk, job);
    case 5: return heads_through_chunk<5>(rows, chunk, job);
    case 4: return heads_through_chunk<4>(rows, chunk, job);
    case 3: return heads_through_chunk<3>(rows, chunk, job);
    case 2: return heads_through_chunk<2>(rows, chunk, job);
    case 1: return heads_through_chunk<1>(rows, chunk, job);
  }
}

template <typename T>
void attend(const AttentionJob& job) {
  const int group = job.q_heads / job.kv_heads, together = group * job.heads, count = together * job.count;
  // Row r of the tile belongs to query r / together and to query head kv_head · group + r % together.
  const auto column = [&](int r) { return (job.kv_head * group + r % together) * job.head_dim; };
  Rows<T> rows;
  for (int r = 0; r < count; ++r) {
    const int64_t query = job.first + r / together;
    rows.q[r] = job.qkv.row<T>(query) + column(r);
    rows.position[r] = job.positions[query];
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
    if (job.heads > 1) {
      heads_through_chunk(rows, group, chunk, job);
    } else {
      rows_through_chunk(rows, count, chunk, job);
    }
  }
  for (int r = 0; r < count; ++r) {
    const V total = splat(rows.total[r]);
    T* out = job.out.row<T>(job.first + r / together) + column(r);
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
