// The arithmetic for one instruction set: what `interpreter.cpp` calls for each op.
//
// Exactness: every output element has one chain of accumulation in a fixed order, whatever the number of rows, so a row's
// bits depend neither on its neighbours nor on how rows and columns are dealt out to threads.
#pragma once

#include <atomic>
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
  int64_t piece, pieces;        // a piece is a block's keys (even) or its values
  int64_t size, done;           // bytes of a piece, and how many of the present one have been asked for

  // Address of up to `bytes` that come next, which become exactly as many; null when there are none.
  const char* take(int64_t& bytes) {
    if (piece >= pieces) return nullptr;
    const char* at = (piece % 2 == 0 ? keys : values) + blocks[piece / 2] + done;
    bytes = bytes < size - done ? bytes : size - done;
    done += bytes;
    if (done == size) ++piece, done = 0;
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

// The LM head's weights once more, rotated and in digits of 8 bits: enough to tell of most columns that their logit isn't
// the largest of a row. `kernels/screen.py` makes it and says how it is laid out.
struct Screen {
  int64_t columns, width, depth;  // of the weights; `depth` is the width rounded up to what one multiplication takes
  int64_t outer;                  // the odd part of the width
  const int8_t* digits;           // [panel][depth / 4][64][4]
  const int32_t* start;           // of each column: the sum that its dot products begin with
  const float *scale, *error, *norm;  // of each column: of its digits; what they miss of it; its own
  const float *signs, *mix;       // of the rotation: [width], [outer][outer]
};

// A row's digits stand for it but for an error: column j's logit, in units of the row's scale, is within
// reach · error[j] + slack · norm[j] of what the digits give.
struct ScreenedRow {
  float reach, slack;
  bool usable;  // else nothing is known about its logits
};

// Columns of a row whose logit may be its largest, with what it is at most.
struct Candidates {
  static constexpr int64_t kCapacity = 2048;
  int64_t count;
  bool full;  // there were more
  int32_t columns[kCapacity];
  float most[kCapacity];
};

// Only where the instruction set has dot products of 8-bit integers.
struct ScreenKernels {
  // Digits of a row of activations, biased by 128. `scratch` has room for twice the width.
  ScreenedRow (*quantize)(const Screen& screen, const void* x, DType dtype, float* scratch, uint8_t* digits);
  // Adds the candidates of each row among the columns of panels [first, last). `least` is what the largest logit of each
  // row is at least, as far as any member has seen. Unusable rows are passed over.
  void (*scan)(const Screen& screen, const uint8_t* digits, const ScreenedRow* rows, int64_t count, int64_t first,
               int64_t last, std::atomic<float>* least, Candidates* found);
  // The logits of some columns of a row, to the bit as `product` gives them. `packed` as in Product.
  void (*logits)(const void* x, DType dtype, const void* packed, int64_t depth, const int32_t* columns, int64_t count,
                 float* out);
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
  const ScreenKernels* screen;  // or null
};

// The kernels of an instruction set by name, or null if this CPU or operating system doesn't have it.
const Kernels* find_kernels(const char* name);
// The name of the best one here; null if there is none.
const char* best_isa();

}  // namespace batonq
