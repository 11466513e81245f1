// Runs a model's program (`kernels/program.py`) for one ragged batch: the whole step in one call.
//
// All members of the team go through the list of ops together. With few rows each does its share of the columns of an op,
// and a barrier ends it. With many each takes rows of its own from op to op, which then stay in its core's caches, and
// waits for the others only after attention, before what reads keys of theirs, and where the rows of logits begin. Which
// member does what never changes a bit (see kernels.h).

#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstring>
#include <exception>
#include <limits>
#include <memory>
#include <new>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

#include "division.h"
#include "kernels.h"
#include "sanitizers.h"
#include "team.h"

#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23  // since Linux 5.14
#endif

namespace batonq {

namespace {

enum Op : int32_t {
  kEmbed = 1,
  kRmsNorm = 2,
  kHeadNorm = 3,
  kLinear = 4,
  kRopeStore = 5,
  kAttention = 6,
  kActivationMul = 7,
  kAdd = 8,
  kSelectRows = 9,
  kLmHead = 10,
  kLinearAdd = 11,
  kLinearActivationMul = 12,
};

int64_t round_up(int64_t value, int64_t to) { return (value + to - 1) / to * to; }

// Anonymous memory, zeroed, on huge pages where the kernel has them.
class Memory {
 public:
  Memory() = default;
  explicit Memory(size_t size) : size_(size) {
    if (size == 0) return;
    void* mapped = mmap(nullptr, size + kGuard, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (mapped == MAP_FAILED) throw std::bad_alloc();
    data_ = mapped;
    madvise(data_, size, MADV_HUGEPAGE);
    use(size);
  }
  Memory(Memory&& other) noexcept : data_(std::exchange(other.data_, nullptr)), size_(std::exchange(other.size_, 0)) {}
  Memory& operator=(Memory&& other) noexcept {
    std::swap(data_, other.data_);
    std::swap(size_, other.size_);
    return *this;
  }
  ~Memory() {
    if (data_ == nullptr) return;
    allow(data_, size_ + kGuard);
    munmap(data_, size_ + kGuard);
  }
  // From now on only the first `used` bytes hold anything.
  void use(size_t used) const {
    if (data_ == nullptr) return;
    allow(data_, used);
    forbid(data() + used, size_ + kGuard - used);
  }
  char* data() const { return static_cast<char*>(data_); }
  size_t size() const { return size_; }

 private:
  void* data_ = nullptr;
  size_t size_ = 0;
};

// Has the kernel make a mapping's pages before they are needed, as long as cores have little else to do: a page of 2 MiB
// that is made in the middle of a step takes it a millisecond or more. Where the kernel can't (before 5.14), or there is
// no thread to be had, pages come as they are written to.
class Populator {
 public:
  Populator() = default;
  ~Populator() {
    stop_ = true;
    if (thread_.joinable()) thread_.join();
  }

  // Mappings of `pieces` pieces of `size` bytes each, of which the first bytes of all are needed first.
  void start(std::vector<const Memory*> mappings, int64_t pieces, int64_t size) {
    try {
      thread_ = std::thread([this, mappings = std::move(mappings), pieces, size] { run(mappings, pieces, size); });
    } catch (const std::system_error&) {
      return;
    }
  }

 private:
  static constexpr int64_t kStep = 2 << 20;

  // Not of the idle class: while it makes a page, others may have to wait for the map of the memory.
  void run(const std::vector<const Memory*>& mappings, int64_t pieces, int64_t size) const {
    setpriority(PRIO_PROCESS, static_cast<id_t>(syscall(SYS_gettid)), 19);
    for (int64_t at = 0; at < size; at += kStep)
      for (int64_t piece = 0; piece < pieces; ++piece)
        for (const Memory* mapping : mappings)
          if (stop_ || !populate(mapping->data() + piece * size + at, std::min(kStep, size - at))) return;
  }

  static bool populate(char* begin, int64_t size) {
    const uintptr_t page = 4096, from = reinterpret_cast<uintptr_t>(begin) / page * page;
    const uintptr_t to = (reinterpret_cast<uintptr_t>(begin) + size + page - 1) / page * page;
    return madvise(reinterpret_cast<void*>(from), to - from, MADV_POPULATE_WRITE) == 0;
  }

  std::atomic<bool> stop_{false};
  std::thread thread_;
};

struct Buffer {
  bool logits_rows;
  int64_t width;
  DType dtype;
  Memory memory;
  int64_t stride() const { return round_up(width, kStride); }
};

// `depth` is `columns` rounded up to what one multiplication takes.
struct Weight {
  const void* data = nullptr;
  int64_t rows = 0, columns = 0, depth = 0;
};

// Of the last `greedy` rows of logits only the largest is wanted, and its column.
struct BatchView {
  int64_t tokens, sequences, logits, greedy, table_width;
  const int32_t *token_ids, *positions, *query_start, *store_from, *block_tables, *logits_rows;
  float* out;
  int32_t* largest_ids;
  float* largest;

  int64_t whole() const { return logits - greedy; }
};

// The largest of the logits that it is offered, and its column, the lowest among equals. NaN if there is one.
struct Largest {
  float value = -std::numeric_limits<float>::infinity();
  int32_t column = -1;

  void offer(int32_t at, float logit) {
    const bool first = column < 0, tie = logit == value && at < column;
    if (first || tie || logit > value || logit != logit) value = logit, column = at;
  }
};

float as_float(int32_t word) {
  float value;
  std::memcpy(&value, &word, 4);
  return value;
}

}  // namespace

class Interpreter {
  using Clock = std::chrono::steady_clock;

 public:
  Interpreter(Team& team, const Kernels& kernels, const int32_t* words, int64_t count)
      : kernels_(kernels), team_(team), division_(team.size()), errands_(team.size()), stored_(team.size()) {
    const int32_t* at = words;
    kv_heads_ = at[0], head_dim_ = at[1], layers_ = at[2], dtype_ = static_cast<DType>(at[3]), output_ = at[4];
    vocabulary_ = at[5];
    const int buffers = at[6], weights = at[7];
    at += 8;
    for (int i = 0; i < buffers; ++i, at += 3) {
      buffers_.push_back({at[0] == 1, at[1], static_cast<DType>(at[2]), Memory()});
    }
    weights_.resize(weights);
    for (; at < words + count; at += 1 + at[0]) ops_.emplace_back(at + 1, at + 1 + at[0]);
    for (size_t i = 0; i < ops_.size(); ++i)
      if (ops_[i][0] == kAttention) add_attention(i);
    next_ = std::vector<std::atomic<int64_t>>(ops_.size());
    taken_ = std::vector<Counter>(attentions_.size() * team.size());
  }

  void allocate_cache(int64_t blocks) {
    block_bytes_ = static_cast<int64_t>(kv_heads_) * kBlock * head_dim_ * item_size(dtype_);
    layer_bytes_ = block_bytes_ * blocks;
    keys_ = Memory(layer_bytes_ * layers_);
    values_ = Memory(layer_bytes_ * layers_);
    writer_.assign(blocks, -1);
    populator_.start({&keys_, &values_}, layers_, layer_bytes_);
  }

  // Borrowed: a matrix in panels (kernels.h) of the program's dtype, or floats that are read as they are.
  void set_weight(int index, const void* data, int64_t rows, int64_t columns) {
    weights_[index] = {data, rows, columns, dtype_ == DType::kBFloat16 ? round_up(columns, 2) : columns};
  }

  // Borrowed, as `kernels/screen.py` makes it for a weight of this shape.
  void set_screen(const void* data, int64_t rows, int64_t columns) {
    Screen& s = screen_;
    s.columns = rows, s.width = columns, s.depth = round_up(columns, 4);
    for (s.outer = columns; s.outer % 2 == 0; s.outer /= 2) continue;
    const int64_t padded = round_up(rows, kPanel);
    s.digits = static_cast<const int8_t*>(data);
    s.start = reinterpret_cast<const int32_t*>(s.digits + padded * s.depth);
    s.scale = reinterpret_cast<const float*>(s.start + padded);
    s.error = s.scale + padded, s.norm = s.error + padded, s.signs = s.norm + padded, s.mix = s.signs + columns;
  }

  void cache(void** keys, void** values, int64_t* size) const {
    *keys = keys_.data();
    *values = values_.data();
    *size = layer_bytes_ * layers_;
  }

  void forward(const BatchView& batch) {
    batch_ = &batch;
    for (Buffer& buffer : buffers_) {
      const bool output = &buffer == &buffers_[output_];  // whole rows go to `out`
      const int64_t rows = output ? batch.greedy : buffer.logits_rows ? batch.logits : batch.tokens;
      const size_t size = rows * buffer.stride() * item_size(buffer.dtype);
      if (buffer.memory.size() < size) buffer.memory = Memory(size + size / 2);
      buffer.memory.use(size);
    }
    sequence_of_.resize(batch.tokens);
    for (int64_t s = 0; s < batch.sequences; ++s)
      std::fill(sequence_of_.begin() + batch.query_start[s], sequence_of_.begin() + batch.query_start[s + 1], s);
    logits_positions_.resize(batch.logits);
    for (int64_t l = 0; l < batch.logits; ++l) logits_positions_[l] = batch.positions[batch.logits_rows[l]];
    for (Reading& reading : readings_) plan(reading);
    for (auto& next : next_) next = 0;
    for (Counter& taken : taken_) taken.value = 0;
    make_room_for_screening();
    by_rows_ = batch.tokens >= kRowsEach * team_.size();
    division_.begin(batch.tokens, by_rows_);
    shares_stores_ = by_rows_ && stores_for_others();
    team_.run([&](int rank) {
      Clock::time_point begin = Clock::now(), apart = begin;
      send(rank, 0);
      for (size_t i = 0; i < ops_.size(); ++i) {
        step(i, rank);
        meet(i, rank, apart);
        if (profiling_ && rank == 0) {
          const Clock::time_point end = Clock::now();
          seconds_[i] += std::chrono::duration<double>(end - std::exchange(begin, end)).count();
        }
      }
    });
  }

  // Gives the seconds that the first member has spent on each op since the last call, with the wait that followed, and goes
  // on to measure or not.
  void profile(bool on, double* seconds) {
    seconds_.resize(ops_.size());
    std::copy(seconds_.begin(), seconds_.end(), seconds);
    std::fill(seconds_.begin(), seconds_.end(), 0.0);
    profiling_ = on;
  }

 private:
  Matrix matrix(int index) {
    Buffer& buffer = buffers_[index];
    if (index == output_) return {batch_->out, vocabulary_, buffer.dtype};  // of whole rows
    return {buffer.memory.data(), buffer.stride(), buffer.dtype};
  }

  const float* floats(int index) const { return static_cast<const float*>(weights_[index].data); }

  // Waits for the others, if the next op needs anything of theirs. `apart` is since when members have gone alone.
  void meet(size_t index, int rank, Clock::time_point& apart) {
    if (!by_rows_) return team_.barrier();
    const bool in_rows = takes_own_rows(index);
    if (in_rows && leaves_own_rows(index) && index + 1 < ops_.size() && takes_own_rows(index + 1)) return;
    if (in_rows) division_.note(rank, std::chrono::duration<double>(Clock::now() - apart).count());
    if (ops_[index][0] == kRopeStore) {
      stored_[rank].advance();
      if (!shares_stores_ && attends_own_rows(index + 1)) return;
    }
    team_.barrier([&] { division_.learn(); });
    apart = Clock::now();
  }

  // Whether a member needs nothing for an op but the rows of tokens that are its own.
  bool takes_own_rows(size_t index) const {
    const int32_t* op = ops_[index].data();
    switch (op[0]) {
      case kEmbed:
      case kRopeStore: return true;
      case kRmsNorm:
      case kHeadNorm:
      case kLinear:
      case kLinearAdd:
      case kLinearActivationMul:
      case kActivationMul:
      case kAdd: return !buffers_[op[1]].logits_rows;
      default: return false;
    }
  }

  // Whether it makes nothing else: keys and values are everybody's.
  bool leaves_own_rows(size_t index) const { return ops_[index][0] != kRopeStore; }

  // Whether it is attention of all tokens' rows, which itself waits for the keys that it needs.
  bool attends_own_rows(size_t index) const {
    return index < ops_.size() && ops_[index][0] == kAttention && !buffers_[ops_[index][1]].logits_rows;
  }

  // Whether a sequence reads a block that another one stores into in this very step.
  bool stores_for_others() {
    const auto each = [&](bool stored_only, const auto& visit) {
      for (int64_t s = 0; s < batch_->sequences; ++s) {
        const int64_t first = batch_->query_start[s], last = batch_->query_start[s + 1] - 1;
        if (last < first) continue;
        const int32_t* table = batch_->block_tables + s * batch_->table_width;
        const int64_t from = stored_only ? std::max(batch_->positions[first], batch_->store_from[s]) : 0;
        if (from > batch_->positions[last]) continue;
        for (int64_t b = from / kBlock; b <= batch_->positions[last] / kBlock; ++b) visit(s, writer_[table[b]]);
      }
    };
    bool found = false;
    each(true, [](int64_t s, int64_t& writer) { writer = s; });
    each(false, [&](int64_t s, int64_t& writer) { found |= writer >= 0 && writer != s; });
    each(true, [](int64_t, int64_t& writer) { writer = -1; });
    return found;
  }

  Share share(int64_t count, int rank) const {
    return {count * rank / team_.size(), count * (rank + 1) / team_.size()};
  }

  void step(size_t index, int rank) {
    const int32_t* op = ops_[index].data();
    switch (op[0]) {
      case kEmbed: return embed(op, rank);
      case kRmsNorm: return rms_norm(op, rank);
      case kHeadNorm: return head_norm(op, rank);
      case kLinear: return linear(Into::kStore, op, rank, next_[index]);
      case kLinearAdd: return linear(Into::kAdd, op, rank, next_[index]);
      case kLinearActivationMul: return linear(Into::kGate, op, rank, next_[index]);
      case kLmHead: return lm_head(op, rank, next_[index]);
      case kRopeStore: return rope_store(op, rank);
      case kAttention: return attention(index, rank);
      case kActivationMul: return activation_mul(op, rank);
      case kAdd: return add(op, rank);
      case kSelectRows: return select_rows(op, rank);
    }
  }

  // A member's rows of tokens, or of logits; or of what a buffer holds.
  Share own_rows(bool of_logits, int rank) const {
    return of_logits ? share(batch_->logits, rank) : division_.rows(rank);
  }
  Share own_rows_of(int buffer, int rank) const { return own_rows(buffers_[buffer].logits_rows, rank); }

  int64_t rows_of(int buffer) const { return buffers_[buffer].logits_rows ? batch_->logits : batch_->tokens; }

  void embed(const int32_t* op, int rank) {
    const Weight& weight = weights_[op[1]];
    const Matrix out = matrix(op[2]);
    const Share rows = division_.rows(rank);
    for (int64_t t = rows.begin; t < rows.end; ++t) {
      const int64_t id = batch_->token_ids[t], panel = id / kPanel, lane = id % kPanel;
      if (dtype_ == DType::kBFloat16) {
        const bf16* from = static_cast<const bf16*>(weight.data) + panel * kPanel * weight.depth + lane * 2;
        for (int64_t k = 0; k < weight.columns; ++k) out.row<bf16>(t)[k] = from[(k / 2) * 2 * kPanel + k % 2];
      } else {
        const float* from = floats(op[1]) + panel * kPanel * weight.depth + lane;
        for (int64_t k = 0; k < weight.columns; ++k) out.row<float>(t)[k] = from[k * kPanel];
      }
    }
  }

  void rms_norm(const int32_t* op, int rank) {
    const Matrix x = matrix(op[1]), out = matrix(op[3]);
    const Share rows = own_rows_of(op[1], rank);
    for (int64_t t = rows.begin; t < rows.end; ++t)
      rows_for(x).rms_norm(at(x, t, 0), floats(op[2]), at(out, t, 0), buffers_[op[1]].width, as_float(op[4]));
  }

  char* at(const Matrix& m, int64_t row, int64_t column) const {
    return static_cast<char*>(m.data) + (row * m.stride + column) * item_size(m.dtype);
  }

  const RowKernels& rows_for(const Matrix& m) const { return kernels_.rows[static_cast<int>(m.dtype)]; }

  void head_norm(const int32_t* op, int rank) {
    const Matrix qkv = matrix(op[1]);
    const Share rows = division_.rows(rank);
    for (int64_t t = rows.begin; t < rows.end; ++t)
      for (int h = op[3]; h < op[3] + op[4]; ++h) {
        char* head = at(qkv, t, static_cast<int64_t>(h) * head_dim_);
        rows_for(qkv).rms_norm(head, floats(op[2]), head, head_dim_, as_float(op[5]));
      }
  }

  void linear(Into into, const int32_t* op, int rank, std::atomic<int64_t>& next) {
    const int64_t rows = rows_of(op[1]);
    const Weight& weight = weights_[op[2]];
    const Product p{matrix(op[1]), matrix(op[4]), weight.data, op[3] < 0 ? nullptr : floats(op[3]), weight.depth,
                    buffers_[op[4]].width, into, rows < kErrandRows ? nullptr : &errands_[rank]};
    if (!by_rows_ || buffers_[op[1]].logits_rows) return product(p, 0, rows, rank, next);
    const Share own = division_.rows(rank);
    kernels_.product(p, 0, packed_columns(p), own.begin, own.end);
  }

  static int64_t packed_columns(const Product& p) {
    return p.into == Into::kGate ? round_up(p.columns, kGated) / kGated * kPanel : p.columns;
  }

  // Rows [begin, end) of a product. Most columns are dealt out beforehand; the rest go to whoever is free, since no core
  // is as fast as another all the time, and a barrier waits for the last.
  void product(const Product& p, int64_t begin, int64_t end, int rank, std::atomic<int64_t>& next) {
    if (begin >= end) return;
    const int64_t columns = packed_columns(p), grain = p.into == Into::kGate ? kPanel : kColumnGrain;
    deal(round_up(columns, grain) / grain, rank, next, [&](int64_t first, int64_t last) {
      kernels_.product(p, first * grain, std::min(columns, last * grain), begin, end);
    });
  }

  template <typename Take>
  void deal(int64_t units, int rank, std::atomic<int64_t>& next, const Take& take) {
    const int64_t size = team_.size(), own = units * 3 / 4 / size, shared = own * size, rest = units - shared;
    if (own > 0) take(own * rank, own * (rank + 1));
    const int64_t step = std::max<int64_t>(1, rest / (8 * size));
    for (int64_t u = next.fetch_add(step); u < rest; u = next.fetch_add(step))
      take(shared + u, shared + std::min(rest, u + step));
  }

  // ── the LM head ──────────────────────────────────────────────────────────────────────────────────────────────────
  //
  // Whole rows of logits, and of the rows behind them the largest, among a few candidates that the screen finds.

  void lm_head(const int32_t* op, int rank, std::atomic<int64_t>& next) {
    const Weight& weight = weights_[op[2]];
    const Product p{matrix(op[1]), matrix(op[3]), weight.data, nullptr, weight.depth, vocabulary_, Into::kStore, nullptr};
    product(p, 0, batch_->whole(), rank, next);
    if (batch_->greedy > 0) find_largest(p, rank);
  }

  void make_room_for_screening() {
    next_panel_ = next_column_ = next_row_ = 0;
    if (batch_->greedy == 0) return;
    digits_.resize(batch_->greedy * screen_.depth);
    screened_.resize(batch_->greedy);
    scratch_.resize(team_.size() * 2 * screen_.width);
    if (batch_->greedy > most_greedy_) {
      candidates_.reset(new Candidates[batch_->greedy * team_.size()]);
      least_.reset(new std::atomic<float>[batch_->greedy]);
      most_greedy_ = batch_->greedy;
    }
    for (int64_t r = 0; r < batch_->greedy; ++r) least_[r] = -std::numeric_limits<float>::infinity();
  }

  void find_largest(const Product& p, int rank) {
    screen_rows(p.x, rank);
    const Share unknown = unknown_rows();
    for (int64_t r = next_row_++; r < batch_->greedy; r = next_row_++)
      if (r < unknown.begin || r >= unknown.end) answer(r, largest_of_candidates(p, r));
    if (unknown.begin >= unknown.end) return;
    Product whole = p;
    whole.x.data = at(p.x, batch_->whole(), 0), whole.out.data = buffers_[output_].memory.data();
    product(whole, unknown.begin, unknown.end, rank, next_column_);
    team_.barrier();
    const Share rows = share(unknown.end - unknown.begin, rank);
    for (int64_t r = unknown.begin + rows.begin; r < unknown.begin + rows.end; ++r) {
      const float* logits = whole.out.row<float>(r);
      Largest largest;
      for (int64_t i = 0; i < vocabulary_; ++i) largest.offer(i, logits[i]);
      answer(r, largest);
    }
  }

  void answer(int64_t row, const Largest& largest) {
    batch_->largest_ids[row] = largest.column;
    batch_->largest[row] = largest.value;
  }

  void screen_rows(const Matrix& x, int rank) {
    Candidates* found = candidates_.get() + rank * batch_->greedy;
    for (int64_t r = 0; r < batch_->greedy; ++r) found[r].count = 0, found[r].full = false;
    const Share rows = share(batch_->greedy, rank);
    for (int64_t r = rows.begin; r < rows.end; ++r)
      screened_[r] = kernels_.screen->quantize(screen_, at(x, batch_->whole() + r, 0), x.dtype,
                                               scratch_.data() + rank * 2 * screen_.width,
                                               digits_.data() + r * screen_.depth);
    team_.barrier();
    deal(round_up(screen_.columns, kPanel) / kPanel, rank, next_panel_, [&](int64_t first, int64_t last) {
      kernels_.screen->scan(screen_, digits_.data(), screened_.data(), batch_->greedy, first, last, least_.get(), found);
    });
    team_.barrier();
  }

  // The rows of which the screen can't tell enough, and those between them.
  Share unknown_rows() const {
    Share unknown = {batch_->greedy, 0};
    for (int64_t r = 0; r < batch_->greedy; ++r) {
      bool known = screened_[r].usable;
      for (int member = 0; member < team_.size(); ++member) known &= !candidates(member, r).full;
      if (known) continue;
      unknown = {std::min(unknown.begin, r), r + 1};
    }
    return unknown;
  }

  const Candidates& candidates(int member, int64_t row) const { return candidates_[member * batch_->greedy + row]; }

  Largest largest_of_candidates(const Product& p, int64_t row) const {
    constexpr int kTogether = 64;
    int32_t columns[kTogether];
    float logits[kTogether];
    int count = 0;
    Largest largest;
    const auto compute = [&] {
      kernels_.screen->logits(at(p.x, batch_->whole() + row, 0), p.x.dtype, p.packed, p.depth, columns, count, logits);
      for (int i = 0; i < count; ++i) largest.offer(columns[i], logits[i]);
      count = 0;
    };
    const float least = least_[row];
    for (int member = 0; member < team_.size(); ++member) {
      const Candidates& found = candidates(member, row);
      for (int64_t i = 0; i < found.count; ++i) {
        if (found.most[i] < least) continue;
        columns[count++] = found.columns[i];
        if (count == kTogether) compute();
      }
    }
    if (count > 0) compute();
    return largest;
  }

  void rope_store(const int32_t* op, int rank) {
    const Matrix qkv = matrix(op[1]);
    const int layer = op[4], q_heads = op[5], half = head_dim_ / 2;
    const Share rows = division_.rows(rank);
    for (int64_t t = rows.begin; t < rows.end; ++t) {
      const int64_t position = batch_->positions[t];
      if (t + 1 < rows.end) fetch_slot(layer, t + 1);
      for (int h = 0; h < q_heads + kv_heads_; ++h)
        rows_for(qkv).rotate(at(qkv, t, static_cast<int64_t>(h) * head_dim_), floats(op[2]) + position * half,
                             floats(op[3]) + position * half, half);
      if (position < batch_->store_from[sequence_of_[t]]) continue;
      for (int h = 0; h < kv_heads_; ++h) {
        const int64_t base = offset_of(layer, t, h);
        const char* k = at(qkv, t, static_cast<int64_t>(q_heads + h) * head_dim_);
        const char* v = at(qkv, t, static_cast<int64_t>(q_heads + kv_heads_ + h) * head_dim_);
        if (dtype_ == DType::kBFloat16) {
          store_pairs(k, v, base, position % kBlock);
        } else {
          store_floats(k, v, base, position % kBlock);
        }
      }
    }
  }

  // Offset of a block of keys, or of values, for one head.
  int64_t offset_of(int layer, int64_t sequence, int64_t position, int head) const {
    const int64_t block = batch_->block_tables[sequence * batch_->table_width + position / kBlock];
    return layer * layer_bytes_ + block * block_bytes_ + block_bytes_ / kv_heads_ * head;
  }
  int64_t offset_of(int layer, int64_t token, int head) const {
    return offset_of(layer, sequence_of_[token], batch_->positions[token], head);
  }

  // Asks for the lines that the token's key and value will be stored in: one for each pair of columns.
  void fetch_slot(int layer, int64_t t) const {
    const int64_t slot = batch_->positions[t] % kBlock, line = 64;
    const int64_t half = head_dim_ * 16 * item_size(dtype_), row = 2 * head_dim_ * item_size(dtype_);
    for (int h = 0; h < kv_heads_; ++h) {
      const int64_t base = offset_of(layer, t, h);
      const char *keys = keys_.data() + base + slot / 16 * half, *values = values_.data() + base + slot / 2 * row;
      for (int64_t at = 0; at < half; at += line) __builtin_prefetch(keys + at, 1);
      for (int64_t at = 0; at < row; at += line) __builtin_prefetch(values + at, 1);
    }
  }

  void store_pairs(const char* key, const char* value, int64_t base, int64_t slot) {
    const bf16 *k = reinterpret_cast<const bf16*>(key), *v = reinterpret_cast<const bf16*>(value);
    bf16* keys = reinterpret_cast<bf16*>(keys_.data() + base) + (slot / 16) * head_dim_ * 16 + (slot % 16) * 2;
    for (int d = 0; d < head_dim_; d += 2) keys[d * 16] = k[d], keys[d * 16 + 1] = k[d + 1];
    bf16* values = reinterpret_cast<bf16*>(values_.data() + base) + (slot / 2) * head_dim_ * 2 + slot % 2;
    for (int d = 0; d < head_dim_; ++d) values[d * 2] = v[d];
  }

  void store_floats(const char* key, const char* value, int64_t base, int64_t slot) {
    const float *k = reinterpret_cast<const float*>(key), *v = reinterpret_cast<const float*>(value);
    float* keys = reinterpret_cast<float*>(keys_.data() + base) + (slot / 16) * head_dim_ * 16 + slot % 16;
    for (int d = 0; d < head_dim_; ++d) keys[d * 16] = k[d];
    std::memcpy(reinterpret_cast<float*>(values_.data() + base) + slot * head_dim_, v, head_dim_ * sizeof(float));
  }

  // Attention of one or several rows of a sequence, for KV heads [head, head + heads).
  struct Job {
    int64_t sequence, first;
    int count, head, heads;
  };

  // What attention over the rows of one kind, with one window, does in this batch: the same in each layer.
  struct Reading {
    bool logits_rows;
    int window;
    std::vector<Job> jobs;
    std::vector<int64_t> blocks;   // those that are read, in the order of the jobs: where they begin in a layer
    std::vector<int64_t> readers;  // a row that reads each; so a sequence's blocks are shared by those who do its rows
  };

  // An attention op: which one of the program, and what it reads.
  struct Attention {
    size_t op, reading;
  };

  void add_attention(size_t index) {
    const int32_t* op = ops_[index].data();
    const bool logits_rows = buffers_[op[1]].logits_rows;
    const auto same = [&](const Reading& r) { return r.logits_rows == logits_rows && r.window == op[6]; };
    const auto found = std::find_if(readings_.begin(), readings_.end(), same);
    attentions_.push_back({index, static_cast<size_t>(found - readings_.begin())});
    if (found == readings_.end()) readings_.push_back({logits_rows, op[6], {}, {}, {}});
    group_ = std::max(group_, op[4] / kv_heads_);
  }

  // With enough sequences to go round, the heads of a single row stay together, because their keys lie side by side.
  // Rows of logits may lie anywhere in their sequences, so each is on its own.
  void plan(Reading& reading) const {
    reading.jobs.clear();
    reading.blocks.clear();
    reading.readers.clear();
    const int64_t sequences = reading.logits_rows ? batch_->logits : batch_->sequences;
    const bool together = sequences >= 4 * team_.size() && group_ <= kTileRows && group_ * kv_heads_ <= kMaxRows;
    for (int64_t i = 0; i < sequences; ++i) {
      if (reading.logits_rows) {
        plan(reading, sequence_of_[batch_->logits_rows[i]], i, i + 1, logits_positions_.data(), together);
      } else {
        plan(reading, i, batch_->query_start[i], batch_->query_start[i + 1], batch_->positions, together);
      }
    }
  }

  void plan(Reading& reading, int64_t sequence, int64_t begin, int64_t end, const int32_t* positions,
            bool together) const {
    const int64_t tokens = std::min<int64_t>(kTileTokens, kMaxRows / group_);
    if (together && end - begin == 1) {
      reading.jobs.push_back({sequence, begin, 1, 0, kv_heads_});
    } else {
      for (int64_t t = begin; t < end; t += tokens)
        for (int h = 0; h < kv_heads_; ++h)
          reading.jobs.push_back({sequence, t, static_cast<int>(std::min(tokens, end - t)), h, 1});
    }
    if (begin == end) return;
    // Rows of logits of one sequence follow each other, and read nearly the same.
    if (reading.logits_rows && begin > 0 && sequence_of_[batch_->logits_rows[begin - 1]] == sequence) return;
    const int64_t seen_from = reading.window > 0 ? std::max(0, positions[begin] + 1 - reading.window) : 0;
    const int64_t first = seen_from / kBlock, count = positions[end - 1] / kBlock + 1 - first;
    for (int64_t b = 0; b < count; ++b) {
      reading.blocks.push_back(batch_->block_tables[sequence * batch_->table_width + first + b] * block_bytes_);
      reading.readers.push_back(begin + (end - begin) * b / count);
    }
  }

  // Gives a member the errand for the program's n-th attention, or none if there is no such: the blocks that its own rows
  // read, since a core that is far from the others finds in its last cache only what it has asked for itself.
  void send(int rank, size_t n) {
    errands_[rank] = {};
    if (n >= attentions_.size()) return;
    const Reading& reading = readings_[attentions_[n].reading];
    const Share rows = own_rows(reading.logits_rows, rank);
    const auto begin = reading.readers.begin(), first = std::lower_bound(begin, reading.readers.end(), rows.begin);
    const int64_t count = std::lower_bound(first, reading.readers.end(), rows.end) - first;
    const int64_t layer = ops_[attentions_[n].op][3] * layer_bytes_, limit = kErrandBytes / team_.size() / block_bytes_;
    errands_[rank] = {keys_.data() + layer, values_.data() + layer, reading.blocks.data() + (first - begin),
                      0, std::min(limit, 2 * count), block_bytes_, 0};
  }

  // The jobs that begin in a member's rows.
  Share own_jobs(const Reading& reading, int rank) const {
    const Share rows = own_rows(reading.logits_rows, rank);
    const auto before = [](const Job& job, int64_t row) { return job.first < row; };
    const auto begin = reading.jobs.begin(), first = std::lower_bound(begin, reading.jobs.end(), rows.begin, before);
    return {first - begin, std::lower_bound(first, reading.jobs.end(), rows.end, before) - begin};
  }

  // Whether the rows of its sequence belong to more than one member, of whom `owner` does the job.
  bool is_split(const Job& job, int owner) const {
    const Share own = division_.rows(owner);
    return batch_->query_start[job.sequence] < own.begin || batch_->query_start[job.sequence + 1] > own.end;
  }

  // Returns when a member has stored its keys and values for the attention that `rank` is in.
  void await_stored(int member, int rank) { team_.await_change(stored_[member], stored_[rank].value() - 1); }

  // Each does the jobs of its own rows, and then what others have left: who does it changes nothing. For its own it needs
  // nobody, but where a sequence is divided; that is left for the end, which for who has its second part is the front.
  void attention(size_t index, int rank) {
    const int32_t* op = ops_[index].data();
    const auto self = std::find_if(attentions_.begin(), attentions_.end(), [&](auto& a) { return a.op == index; });
    send(rank, self - attentions_.begin() + 1);
    const Reading& reading = readings_[self->reading];
    const int layer = op[3];
    AttentionJob job{};
    job.qkv = matrix(op[1]), job.out = matrix(op[2]);
    job.keys = keys_.data() + layer * layer_bytes_, job.values = values_.data() + layer * layer_bytes_;
    job.positions = reading.logits_rows ? logits_positions_.data() : batch_->positions;
    job.q_heads = op[4], job.kv_heads = kv_heads_, job.head_dim = head_dim_;
    job.scale = as_float(op[5]), job.window = op[6];
    Counter* const taken = taken_.data() + (self - attentions_.begin()) * team_.size();
    for (int i = 0; i < team_.size(); ++i) {
      const int owner = (rank + i) % team_.size();
      const Share jobs = own_jobs(reading, owner);
      const int64_t count = jobs.end - jobs.begin;
      const bool backwards = count > 0 && !reading.logits_rows &&
                             batch_->query_start[reading.jobs[jobs.begin].sequence] < division_.rows(owner).begin;
      const auto job_at = [&](int64_t n) -> const Job& {
        return reading.jobs[backwards ? jobs.end - 1 - n : jobs.begin + n];
      };
      await_stored(owner, rank);
      for (int64_t n = taken[owner].value++; n < count; n = taken[owner].value++) {
        const Job &now = job_at(n), &next = job_at(std::min(n + 1, count - 1));
        if (!reading.logits_rows && is_split(now, owner))
          for (int member = 0; member < team_.size(); ++member) await_stored(member, rank);
        job.first = now.first, job.count = now.count;
        job.kv_head = now.head, job.heads = now.heads;
        job.block_table = batch_->block_tables + now.sequence * batch_->table_width;
        job.ahead = keys_.data() + offset_of(layer, next.sequence, 0, next.head);
        rows_for(job.qkv).attend(job);
      }
    }
  }

  void activation_mul(const int32_t* op, int rank) {
    const Matrix x = matrix(op[1]), out = matrix(op[2]);
    const int64_t width = buffers_[op[2]].width;
    const Share rows = own_rows_of(op[1], rank);
    for (int64_t t = rows.begin; t < rows.end; ++t)
      rows_for(x).silu_mul(at(x, t, 0), at(x, t, width), at(out, t, 0), width);
  }

  void add(const int32_t* op, int rank) {
    const Matrix x = matrix(op[1]), y = matrix(op[2]), out = matrix(op[3]);
    const Share rows = own_rows_of(op[1], rank);
    for (int64_t t = rows.begin; t < rows.end; ++t)
      rows_for(x).add(at(x, t, 0), at(y, t, 0), at(out, t, 0), buffers_[op[1]].width);
  }

  void select_rows(const int32_t* op, int rank) {
    const Matrix x = matrix(op[1]), out = matrix(op[2]);
    const Share rows = share(batch_->logits, rank);
    for (int64_t l = rows.begin; l < rows.end; ++l)
      std::memcpy(at(out, l, 0), at(x, batch_->logits_rows[l], 0), buffers_[op[2]].width * item_size(x.dtype));
  }

  struct alignas(64) Counter {
    std::atomic<int64_t> value{0};
  };

  static constexpr int64_t kTileTokens = 16;
  // With fewer rows for each member, the weights are the more to read, and each reads a part of them.
  static constexpr int64_t kRowsEach = 24;
  // Products of fewer rows need the memory for their own weights.
  static constexpr int64_t kErrandRows = 24;
  // What a last cache surely keeps from one attention to the next, beside the weights that pass through.
  static constexpr int64_t kErrandBytes = 16 << 20;

  const Kernels& kernels_;
  Team& team_;
  int kv_heads_, head_dim_, layers_, output_, vocabulary_;
  DType dtype_;
  std::vector<Buffer> buffers_;
  std::vector<Weight> weights_;
  std::vector<std::vector<int32_t>> ops_;
  int64_t block_bytes_ = 0, layer_bytes_ = 0;
  Memory keys_, values_;
  Populator populator_;  // ends before they do
  const BatchView* batch_ = nullptr;
  std::vector<int64_t> sequence_of_;
  int group_ = 1;  // query heads of a KV head, at most
  std::vector<int32_t> logits_positions_;
  std::vector<Reading> readings_;
  std::vector<Attention> attentions_;
  bool by_rows_ = false;
  Division division_;  // of the tokens' rows
  std::vector<Errand> errands_;             // of each member
  std::vector<std::atomic<int64_t>> next_;  // of each op, what nobody has taken yet
  std::vector<Counter> taken_;              // of each attention and member, its jobs that somebody has taken
  std::vector<Signal> stored_;              // of each member, changes when it has stored a layer's keys and values
  std::vector<int64_t> writer_;             // of each block, the sequence that stores into it; -1 between two steps
  bool shares_stores_ = false;
  Screen screen_{};
  std::vector<uint8_t> digits_;        // of each row
  std::vector<ScreenedRow> screened_;  // each row
  std::vector<float> scratch_;         // of each member
  std::unique_ptr<Candidates[]> candidates_;    // of each member and row
  std::unique_ptr<std::atomic<float>[]> least_;  // of each row
  int64_t most_greedy_ = 0;
  std::atomic<int64_t> next_panel_{0}, next_column_{0}, next_row_{0};
  bool profiling_ = false;
  std::vector<double> seconds_;
};

}  // namespace batonq

using batonq::Interpreter;

#define EXPORT __attribute__((visibility("default")))

// Nothing throws across this border: what can't be done returns null or false.
extern "C" {

// Name of the best instruction set of this machine; null if there is none that the library was made for.
EXPORT const char* batonq_best_isa() { return batonq::best_isa(); }

// `words` is the program as `kernels/cpu_backend.py` writes it; `team` must outlive what is made here. Null without memory,
// or without the instruction set.
EXPORT Interpreter* batonq_create(batonq::Team* team, const char* isa, const int32_t* words, int64_t count,
                                  int64_t blocks) {
  const batonq::Kernels* kernels = batonq::find_kernels(isa);
  if (kernels == nullptr) return nullptr;
  try {
    auto interpreter = std::make_unique<Interpreter>(*team, *kernels, words, count);
    interpreter->allocate_cache(blocks);
    return interpreter.release();
  } catch (const std::exception&) {
    return nullptr;
  }
}

// A weight, packed as `kernels/packed.py` does, which must outlive `self`.
EXPORT void batonq_set_weight(Interpreter* self, int index, const void* data, int64_t rows, int64_t columns) {
  self->set_weight(index, data, rows, columns);
}

// The screen of the LM head's weight, which has this shape; it must outlive `self`. Only where the instruction set screens.
EXPORT void batonq_set_screen(Interpreter* self, const void* data, int64_t rows, int64_t columns) {
  self->set_screen(data, rows, columns);
}

// Arrays as in `kernels/batch.py`; `out` is float32 [logits - greedy, vocabulary], the last two are [greedy]. Without a
// screen there can be no greedy rows.
EXPORT bool batonq_forward(Interpreter* self, int64_t tokens, int64_t sequences, int64_t logits, int64_t greedy,
                           int64_t table_width, const int32_t* token_ids, const int32_t* positions,
                           const int32_t* query_start, const int32_t* store_from, const int32_t* block_tables,
                           const int32_t* logits_rows, float* out, int32_t* largest_ids, float* largest) {
  try {
    self->forward({tokens, sequences, logits, greedy, table_width, token_ids, positions, query_start, store_from,
                   block_tables, logits_rows, out, largest_ids, largest});
  } catch (const std::exception&) {
    return false;
  }
  return true;
}

// First bytes of the keys and values of all layers, and their size, for tests and for moving blocks.
EXPORT void batonq_cache(Interpreter* self, void** keys, void** values, int64_t* size) { self->cache(keys, values, size); }

// Seconds of each op since the last call, as the team's first member sees them, for `benchmarks/kernels.py`; measured from
// now on if `on`.
EXPORT void batonq_profile(Interpreter* self, bool on, double* seconds) { self->profile(on, seconds); }

EXPORT void batonq_destroy(Interpreter* self) { delete self; }
}
