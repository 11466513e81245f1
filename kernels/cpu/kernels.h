// The arithmetic for one instruction set: what `interpreter.cpp` calls for each op.
//
// Exactness: every output element has one chain of accumulation in a fixed order, whatever the number of rows, so a row's
// bits depend neither on its neighbours nor on how rows and columns are dealt out to threads.
#pragma once

#include <cstddef>
#include <cstdint>

namespace batonq {

using bf16 = uint16_t;

constexpr int kPanel = 64;   // columns of a packed weight panel
constexpr int kColumnGrain = 32;  // columns are dealt out to threads in these
constexpr int kGated = kPanel / 2;  // units of a panel that holds gates and values
constexpr int kBlock = 32;   // tokens of a KV block
constexpr int kStride = 32;  // rows of activations are padded with zeros to a multiple of this
constexpr int kTileRows = 6;  // rows that the kernels take together
constexpr int kMaxHeadDim = 256;
constexpr int kMaxRows = 48;  // query heads times tokens of one attention job

enum class DType : int { kFloat32 = 0, kBFloat16 = 1 };

inline size_t item_size(DType dtype) { return dtype == DType::kFloat32 ? 4 : 2; }

// A matrix of activations; `stride` in elements.
struct Matrix {
  void* data;
  int64_t stride;
  DType dtype;

  template <typename T>
  T* row(int64_t index) const {
    return static_cast<T*>(data) + index * stride;
  }
};

// Keys and values that attention reads next, which a member of the team asks for while it multiplies: a product of many
// rows hardly uses the memory, and attention of decoding tokens hardly anything else. They wait in the last cache then.
struct alignas(64) Errand {
  const char *keys, *values;    // of a layer
  const int64_t* blocks;        // where blocks begin in it, in bytes
  int64_t piece, pieces, step;  // a piece is a block's keys (even) or its values; this member takes each step-th
  int64_t size, done;           // bytes of a piece, and how many of the present one have been asked for

  // Address of up to `bytes` that come next, which become exactly as many; null when there are none.
  const char* take(int64_t& bytes) {
    if (piece >= pieces) return nullptr;
    const char* at = (piece % 2 == 0 ? keys : values) + blocks[piece / 2] + done;
    bytes = bytes < size - done ? bytes : size - done;
    done += bytes;
    if (done == size) piece += step, done = 0;
    return at;
  }
};

// What becomes of x · wᵀ + bias: it is out, it is added to out, or out = silu(first half) · second half. Either way it is
// rounded to the dtype of `out` first, so that the bits are those of two ops.
enum class Into : int { kStore, kAdd, kGate };

// A product, for packed columns [first, last), which begin at a multiple of kColumnGrain (kGate: of kPanel), and rows
// [begin, end). Packed: bf16 [panel][depth/2][64][2], fp32 [panel][depth][64]; depth and columns are padded with zeros.
// For kGate a panel holds kGated columns of the first half, then those of the second half for the same units.
struct Product {
  Matrix x;
  Matrix out;
  const void* packed;
  const float* bias;
  int64_t depth;
  int64_t columns;  // of out
  Into into;
  Errand* errand;  // or null
};

// Rows [first, first + count) of `qkv` and `out`, queries of one sequence, against its blocks, for KV heads [kv_head, kv_head +
// heads). More than one head only for one token, with up to kTileRows query heads each, kMaxRows in all.
struct AttentionJob {
  Matrix qkv;
  Matrix out;
  // Of this layer. Keys: [block][kv_head][2][head_dim/2][16][2] in bf16, [block][kv_head][2][head_dim][16] in fp32.
  const void* keys;
  // Values: [block][kv_head][16][head_dim][2] (pairs of tokens) in bf16, [block][kv_head][32][head_dim] in fp32.
  const void* values;
  const int32_t* block_table;
  // Keys that are read after this job.
  const void* ahead;
  const int32_t* positions;  // of the rows
  int64_t first;
  int count;
  int kv_head;
  int heads;
  int q_heads;
  int kv_heads;
  int head_dim;
  int window;
  float scale;
};

// The ops on rows, for one dtype of activations.
struct RowKernels {
  void (*rms_norm)(const void* x, const float* weight, void* out, int64_t width, float eps);
  void (*silu_mul)(const void* gate, const void* up, void* out, int64_t width);
  void (*add)(const void* x, const void* y, void* out, int64_t width);
  // In place: the halves a, b of a head become a·cos - b·sin and b·cos + a·sin.
  void (*rotate)(void* head, const float* cos, const float* sin, int64_t half);
  void (*attend)(const AttentionJob& job);
};

// Everything for one instruction set.
struct Kernels {
  const char* name;
  void (*product)(const Product& p, int64_t first, int64_t last, int64_t begin, int64_t end);
  RowKernels rows[2];  // by DType
};

// The kernels of an instruction set by name, or null if this CPU or operating system doesn't have it.
const Kernels* find_kernels(const char* name);
// The name of the best one here; null if there is none.
const char* best_isa();

}  // namespace batonq
