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

// ── products ────────────────────────────────────────────────────────────────────────────────────────────────────────

template <int R, int J>
inline void accumulate(V (&c)[R][J], const bf16* x, int64_t stride, const bf16* w, int64_t depth) {
  for (int64_t k = 0; k < depth; k += 2, w += 2 * kPanel) {
    Pairs b[J];
    for (int j = 0; j < J; ++j) b[j] = load_pairs(w + 2 * kLanes * j);
    for (int r = 0; r < R; ++r) {
      const Pairs a = splat_pair(x + r * stride + k);
      for (int j = 0; j < J; ++j) c[r][j] = multiply_pairs(a, b[j], c[r][j]);
    }
  }
}

template <int R, int J>
inline void accumulate(V (&c)[R][J], const float* x, int64_t stride, const float* w, int64_t depth) {
  for (int64_t k = 0; k < depth; ++k, w += kPanel) {
    V b[J];
    for (int j = 0; j < J; ++j) b[j] = load(w + kLanes * j);
    for (int r = 0; r < R; ++r) {
      const V a = splat(x[r * stride + k]);
      for (int j = 0; j < J; ++j) c[r][j] = fma(a, b[j], c[r][j]);
    }
  }
}

template <int R, typename In, typename Out>
void tile(const Product& p, const In* panel, int64_t column, int64_t row) {
  constexpr int pair = sizeof(In) == sizeof(bf16) ? 2 : 1;
  for (int v = 0; v < kPanel / kLanes; v += kTileVectors) {
    V c[R][kTileVectors];
    for (auto& of_row : c)
      for (V& sum : of_row) sum = zero();
    accumulate<R, kTileVectors>(c, p.x.row<In>(row), p.x.stride, panel + kLanes * v * pair, p.depth);
    for (int j = 0; j < kTileVectors; ++j) {
      const int64_t at = column + kLanes * (v + j), count = p.columns - at;
      if (count <= 0) return;
      for (int r = 0; r < R; ++r) {
        const V value = p.bias == nullptr ? c[r][j] : add(c[r][j], load(p.bias + at, count));
        store(p.out.row<Out>(row + r) + at, value, count);
      }
    }
  }
}

template <typename In, typename Out>
void multiply(const Product& p, int64_t first_panel, int64_t last_panel, int64_t begin, int64_t end) {
  for (int64_t i = first_panel; i < last_panel; ++i) {
    const In* panel = static_cast<const In*>(p.packed) + i * kPanel * p.depth;
    const int64_t column = i * kPanel;
    int64_t row = begin;
    for (; row + kTileRows <= end; row += kTileRows) tile<kTileRows, In, Out>(p, panel, column, row);
    switch (end - row) {
      case 5: tile<5, In, Out>(p, panel, column, row); break;
      case 4: tile<4, In, Out>(p, panel, column, row); break;
      case 3: tile<3, In, Out>(p, panel, column, row); break;
      case 2: tile<2, In, Out>(p, panel, column, row); break;
      case 1: tile<1, In, Out>(p, panel, column, row); break;
      default: break;
    }
  }
}

void product(const Product& p, int64_t first_panel, int64_t last_panel, int64_t begin, int64_t end) {
  if (p.x.dtype == DType::kFloat32) {
    multiply<float, float>(p, first_panel, last_panel, begin, end);
  } else if (p.out.dtype == DType::kFloat32) {
    multiply<bf16, float>(p, first_panel, last_panel, begin, end);
  } else {
    multiply<bf16, bf16>(p, first_panel, last_panel, begin, end);
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
// Rows are the query heads of one KV head, for one or several tokens of a sequence. Each row walks the blocks in order
// with a running maximum and sum (Milakov and Gimelshein, arXiv:1805.02867); rows go together only to read a block once.

struct RowState {
  float maximum;
  float total;
};

constexpr int kVectors = kBlock / kLanes;

template <int R>
inline void scores(const bf16* const* q, const bf16* keys, int head_dim, float (*out)[kBlock]) {
  V c[R][kVectors];
  for (auto& of_row : c)
    for (V& sum : of_row) sum = zero();
  for (int d = 0; d < head_dim; d += 2) {
    Pairs k[kVectors];
    for (int j = 0; j < kVectors; ++j) k[j] = load_pairs(keys + (j * head_dim + d) * kLanes);
    for (int r = 0; r < R; ++r) {
      const Pairs a = splat_pair(q[r] + d);
      for (int j = 0; j < kVectors; ++j) c[r][j] = multiply_pairs(a, k[j], c[r][j]);
    }
  }
  for (int r = 0; r < R; ++r)
    for (int j = 0; j < kVectors; ++j) store(out[r] + kLanes * j, c[r][j]);
}

template <int R>
inline void scores(const float* const* q, const float* keys, int head_dim, float (*out)[kBlock]) {
  V c[R][kVectors];
  for (auto& of_row : c)
    for (V& sum : of_row) sum = zero();
  for (int d = 0; d < head_dim; ++d) {
    V k[kVectors];
    for (int j = 0; j < kVectors; ++j) k[j] = load(keys + (j * head_dim + d) * kLanes);
    for (int r = 0; r < R; ++r) {
      const V a = splat(q[r][d]);
      for (int j = 0; j < kVectors; ++j) c[r][j] = fma(a, k[j], c[r][j]);
    }
  }
  for (int r = 0; r < R; ++r)
    for (int j = 0; j < kVectors; ++j) store(out[r] + kLanes * j, c[r][j]);
}

// Turns a block's scores into weights, in place, and returns what the row's sums so far must be multiplied with. Keys
// outside [from, to) are hidden: their weight is 0, whatever their score.
inline float weigh(float* s, float scaling, int from, int to, RowState& state) {
  V part[kVectors];
  V highest = splat(-kInfinity);
  for (int j = 0; j < kVectors; ++j) {
    part[j] = between(mul(load(s + kLanes * j), splat(scaling)), from - kLanes * j, to - kLanes * j, splat(-kInfinity));
    highest = max(highest, part[j]);
  }
  const float maximum = std::max(state.maximum, largest(highest));
  V total = zero();
  for (int j = 0; j < kVectors; ++j) {
    const V weight = exponential(sub(part[j], splat(maximum)));
    store(s + kLanes * j, weight);
    total = add(total, weight);
  }
  alignas(64) float factor[kLanes];
  store(factor, exponential(splat(state.maximum - maximum)));
  state.maximum = maximum;
  state.total = state.total * factor[0] + sum(total);
  return factor[0];
}

// sums = sums · factor + weights · values, for columns [column, column + 16 · J) of R rows.
template <int R, int J>
inline void mix(float (*sums)[kMaxHeadDim], const float* factor, const float (*weights)[kBlock], const bf16* values,
                int head_dim, int column, int held) {
  V c[R][J];
  alignas(64) bf16 rounded[R][kBlock];
  for (int r = 0; r < R; ++r) {
    for (int j = 0; j < kVectors; ++j) store(rounded[r] + kLanes * j, load(weights[r] + kLanes * j), kLanes);
    for (int j = 0; j < J; ++j) c[r][j] = mul(load(sums[r] + column + kLanes * j), splat(factor[r]));
  }
  for (int token = 0; token < held; token += 2) {
    Pairs v[J];
    for (int j = 0; j < J; ++j) {
      const bf16* at = values + token * head_dim + (column + kLanes * j) * 2;
      // A second token that doesn't exist may be anything, NaN included: it is masked.
      v[j] = token + 1 < held ? load_pairs(at) : load_firsts(at);
    }
    for (int r = 0; r < R; ++r) {
      const Pairs a = splat_pair(rounded[r] + token);
      for (int j = 0; j < J; ++j) c[r][j] = multiply_pairs(a, v[j], c[r][j]);
    }
  }
  for (int r = 0; r < R; ++r)
    for (int j = 0; j < J; ++j) store(sums[r] + column + kLanes * j, c[r][j]);
}

template <int R, int J>
inline void mix(float (*sums)[kMaxHeadDim], const float* factor, const float (*weights)[kBlock], const float* values,
                int head_dim, int column, int held) {
  V c[R][J];
  for (int r = 0; r < R; ++r)
    for (int j = 0; j < J; ++j) c[r][j] = mul(load(sums[r] + column + kLanes * j), splat(factor[r]));
  for (int token = 0; token < held; ++token) {
    V v[J];
    for (int j = 0; j < J; ++j) v[j] = load(values + token * head_dim + column + kLanes * j);
    for (int r = 0; r < R; ++r) {
      const V a = splat(weights[r][token]);
      for (int j = 0; j < J; ++j) c[r][j] = fma(a, v[j], c[r][j]);
    }
  }
  for (int r = 0; r < R; ++r)
    for (int j = 0; j < J; ++j) store(sums[r] + column + kLanes * j, c[r][j]);
}

// What a tile's rows have come to, and which keys of the present block each of them sees.
template <typename T>
struct Rows {
  const T* q[kMaxRows];
  int position[kMaxRows], from[kMaxRows], to[kMaxRows];
  RowState state[kMaxRows];
  alignas(64) float sums[kMaxRows][kMaxHeadDim];
};

// Takes R rows from `first` on through one block.
template <int R, typename T>
void through_block(Rows<T>& rows, int first, const T* keys, const T* values, const AttentionJob& job, int held) {
  alignas(64) float s[R][kBlock];
  float factor[R];
  scores<R>(rows.q + first, keys, job.head_dim, s);
  for (int r = 0; r < R; ++r)
    factor[r] = weigh(s[r], job.scale, rows.from[first + r], rows.to[first + r], rows.state[first + r]);
  int column = 0;
  constexpr int wide = kTileVectors;
  for (; column + wide * kLanes <= job.head_dim; column += wide * kLanes)
    mix<R, wide>(rows.sums + first, factor, s, values, job.head_dim, column, held);
  for (; column < job.head_dim; column += kLanes)
    mix<R, 1>(rows.sums + first, factor, s, values, job.head_dim, column, held);
}

template <typename T>
void attend(const AttentionJob& job) {
  const int group = job.q_heads / job.kv_heads, count = group * job.count;
  Rows<T> rows;
  for (int r = 0; r < count; ++r) {
    const int64_t token = job.first + r / group;
    rows.q[r] = job.qkv.row<T>(token) + (job.kv_head * group + r % group) * job.head_dim;
    rows.position[r] = job.positions[token];
    rows.state[r] = {-kInfinity, 0.0f};
    std::memset(rows.sums[r], 0, sizeof(float) * job.head_dim);
  }
  const int last = rows.position[count - 1];
  const int seen_from = job.window > 0 ? std::max(0, rows.position[0] - job.window + 1) : 0;
  for (int b = seen_from / kBlock; b <= last / kBlock; ++b) {
    const int64_t at = (static_cast<int64_t>(job.block_table[b]) * job.kv_heads + job.kv_head) * kBlock * job.head_dim;
    const T *keys = static_cast<const T*>(job.keys) + at, *values = static_cast<const T*>(job.values) + at;
    const int held = std::min(kBlock, last + 1 - b * kBlock);
    for (int r = 0; r < count; ++r) {
      rows.to[r] = std::clamp(rows.position[r] + 1 - b * kBlock, 0, kBlock);
      rows.from[r] = job.window > 0 ? std::clamp(rows.position[r] + 1 - job.window - b * kBlock, 0, kBlock) : 0;
    }
    for (int r = 0; r < count;) {
      int seeing = 0;
      while (seeing < 4 && r + seeing < count && rows.from[r + seeing] < rows.to[r + seeing]) ++seeing;
      switch (seeing) {
        case 4: through_block<4, T>(rows, r, keys, values, job, held); break;
        case 3: through_block<3, T>(rows, r, keys, values, job, held); break;
        case 2: through_block<2, T>(rows, r, keys, values, job, held); break;
        case 1: through_block<1, T>(rows, r, keys, values, job, held); break;
        default: seeing = 1;  // this row sees nothing of the block
      }
      r += seeing;
    }
  }
  for (int r = 0; r < count; ++r) {
    const V total = splat(rows.state[r].total);
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
