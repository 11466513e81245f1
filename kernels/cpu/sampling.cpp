// The sampler of `kernels/sampling.py` and the log probabilities of `kernels/logprobs.py`, behind the C ABI: rows of
// logits are dealt out to the team, and nothing of a row depends on the others.
//
// No row is sorted. A pass finds the largest logit, and that of each block of 64; from these follow bounds below which
// no token can be kept or win, so that exact arithmetic is needed for few.

#include "sampling.h"

#include <algorithm>
#include <atomic>
#include <cfloat>
#include <cmath>
#include <functional>
#include <memory>
#include <new>
#include <numeric>
#include <vector>

#include "kernels.h"
#include "team.h"

namespace batonq {

// Per row of the logits, as `SamplingBatch`.
struct SamplingArrays {
  const double *temperature, *top_p, *min_p;
  const int64_t *top_k, *position;
  const uint64_t* seed;
};

// Per row, as `Adjustment`: what concerns row r lies at [start[r], start[r + 1]) of an array. `masked` says whether
// `allowed` counts. All ids are within the vocabulary.
struct AdjustmentArrays {
  const int64_t *allowed_start, *banned_start, *bias_start, *history_start;
  const bool* masked;
  const int32_t *allowed, *banned, *bias_ids, *history_ids, *history_counts;
  const double *bias, *repetition_penalty, *presence_penalty, *frequency_penalty;
};

// What is asked of each row of `token_logprobs`, and what is found: `width` alternatives of each have a place.
struct LogprobArrays {
  const int64_t* rows;
  const int32_t *token_ids, *num_top;
  int64_t width;
  float *largest, *logprobs, *top_logprobs;
  int32_t *ranks, *top_ids;
};

namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr double kMassUnit = 1.0 / (int64_t{1} << kMassBits);

// What is asked of one row.
struct Filter {
  double temperature, top_p, min_p;
  int64_t top_k;
  Noise noise;
};

// The last token of a prefix of the order, and the prefix's sum of masses (or count).
struct Border {
  float value;
  int64_t index;  // among the candidates
  int64_t sum;
};

constexpr Border kAll = {-kInfinity, 0, 0};

double gumbel(uint32_t word) { return -std::log(-std::log((word + 0.5) * 0x1p-32)); }

// The best sum of z and noise so far.
class Best {
 public:
  void offer(int32_t id, double z, uint32_t word) {
    const double sum = z + gumbel(word);
    if (sum < sum_ || (sum == sum_ && id >= id_)) return;
    id_ = id;
    if (sum == sum_) return;
    sum_ = sum;
    unit_ = std::exp(-sum) * kMassUnit * (1 + 1e-9);
  }

  // No smaller word can win for a token of this mass: u < exp(-exp(z - sum)) loses, and that is at least 1 - exp(z - sum).
  // One is taken off for the rounding of sums, which is smaller by far. 2³² or more: none can.
  double least_word(int64_t mass) const { return 0x1p32 * (1 - (mass + 1) * unit_) - 1; }

  int32_t id() const { return id_; }

 private:
  double sum_ = -std::numeric_limits<double>::infinity(), unit_ = 0;
  int32_t id_ = 0;
};

// Draws from one row at a time, in memory that it keeps: one for each member of the team.
class RowSampler {
 public:
  explicit RowSampler(const SamplingKernels& kernels) : kernels_(kernels) {}

  // Throws std::bad_alloc.
  void reserve(int64_t vocabulary) {
    if (vocabulary <= capacity_) return;
    const size_t room = vocabulary + kRowBlock;
    adjusted_.reset(new float[room]);
    maxima_.reset(new float[room]);
    values_.reset(new float[room]);
    ids_.reset(new int32_t[room]);
    members_.reset(new int32_t[room]);
    words_.reset(new uint32_t[room]);
    rough_.reset(new float[room]);
    near_values_.reset(new float[room]);
    z_.reset(new double[room]);
    mass_.reset(new int64_t[room]);
    capacity_ = vocabulary;
  }

  // The row after its adjustment.
  const float* adjust(const float* logits, int64_t vocabulary, const AdjustmentArrays& a, int64_t r) {
    float* row = adjusted_.get();
    if (a.masked[r]) {
      std::fill(row, row + vocabulary, -kInfinity);
      for (int64_t i = a.allowed_start[r]; i < a.allowed_start[r + 1]; ++i) row[a.allowed[i]] = logits[a.allowed[i]];
    } else {
      std::memcpy(row, logits, vocabulary * sizeof(float));
    }
    for (int64_t i = a.banned_start[r]; i < a.banned_start[r + 1]; ++i) row[a.banned[i]] = -kInfinity;
    for (int64_t i = a.bias_start[r]; i < a.bias_start[r + 1]; ++i) {
      float& x = row[a.bias_ids[i]];
      x = static_cast<float>(static_cast<double>(x) + a.bias[i]);
    }
    for (int64_t i = a.history_start[r]; i < a.history_start[r + 1]; ++i) {
      float& x = row[a.history_ids[i]];
      double v = x;
      v = v > 0 ? v / a.repetition_penalty[r] : v * a.repetition_penalty[r];
      v -= a.frequency_penalty[r] * a.history_counts[i];
      if (a.history_counts[i] > 0) v -= a.presence_penalty[r];
      x = static_cast<float>(v);
    }
    return row;
  }

  // Reads a row; returns its largest logit, or NaN. What follows needs that to be finite.
  float read(const float* logits, int64_t vocabulary) {
    set_row(row_, logits, vocabulary);
    return largest_ = kernels_.largest(row_, maxima_.get());
  }

  int32_t draw(const Filter& filter) {
    const int32_t first = first_largest();
    if (filter.temperature == 0) return first;
    temperature_ = filter.temperature;
    least_z_ = filter.min_p > 0 ? std::log(filter.min_p) : -std::numeric_limits<double>::infinity();
    const bool few = filter.top_k > 0 && filter.top_k < row_.count;
    Best best;  // begins with the head of the order, which is always kept
    kernels_.words(filter.noise, pad(first), 1, words_.get());
    best.offer(first, 0.0, words_[0]);
    if (!few && filter.top_p >= 1) {
      draw_from_all(filter.noise, best);
    } else {
      if (few) keep_first(filter.top_k);
      draw_from_candidates(filter.noise, filter.top_p < 1 ? nucleus(filter.top_p, few) : kAll, best);
    }
    return best.id();
  }

  // The log probability of `token` in the row, its rank, and the first `count` tokens of the order with theirs.
  void token_logprobs(int32_t token, int64_t count, float* logprob, int32_t* rank, int32_t* top_ids, float* top_logprobs) {
    temperature_ = 1;
    const double log_total = std::log(static_cast<double>(total_mass()) * kMassUnit);
    const auto of = [&](float x) {
      return static_cast<float>((static_cast<double>(x) - static_cast<double>(largest_)) - log_total);
    };
    const float value = row_.values[token];
    *logprob = of(value);
    *rank = static_cast<int32_t>(1 + kernels_.count_ahead(row_, value, token));
    if (count == 0) return;
    collect(lower_bound_of(count, -kInfinity));
    int32_t* order = members_.get();
    std::iota(order, order + count_, 0);
    std::partial_sort(order, order + count, order + count_, [&](int32_t a, int32_t b) { return is_before(a, b); });
    for (int64_t i = 0; i < count; ++i) {
      top_ids[i] = ids_[order[i]];
      top_logprobs[i] = of(values_[order[i]]);
    }
  }

 private:
  // One id, padded.
  const int32_t* pad(int32_t id) {
    std::fill(ids_.get(), ids_.get() + 16, id);
    return ids_.get();
  }

  int32_t first_largest() const {
    int64_t block = 0;
    while (maxima_[block] != largest_) ++block;
    const float* p = block_of(row_, block);
    int i = 0;
    while (p[i] != largest_) ++i;
    return static_cast<int32_t>(block * kRowBlock + i);
  }

  bool is_before(int32_t a, int32_t b) const { return values_[a] > values_[b] || (values_[a] == values_[b] && a < b); }

  // At least `count` logits are this large: that many blocks hold one; `otherwise` if there are not as many blocks.
  float lower_bound_of(int64_t count, float otherwise) {
    if (count > row_.blocks) return otherwise;
    float* maxima = values_.get();
    std::copy(maxima_.get(), maxima_.get() + row_.blocks, maxima);
    std::nth_element(maxima, maxima + count - 1, maxima + row_.blocks, std::greater<float>());
    return std::max(maxima[count - 1], otherwise);
  }

  void collect(float least) {
    bound_ = least;
    count_ = kernels_.collect(row_, maxima_.get(), least, ids_.get(), values_.get());
  }

  void compute_masses() {
    kernels_.masses(values_.get(), count_, largest_, temperature_, z_.get(), mass_.get());
  }

  int64_t total_mass() const {
    alignas(64) double z[kRowBlock];
    alignas(64) int64_t mass[kRowBlock];
    int64_t total = 0;
    for (int64_t i = 0; i < row_.blocks; ++i) {
      kernels_.masses(block_of(row_, i), kRowBlock, largest_, temperature_, z, mass);
      total = std::accumulate(mass, mass + kRowBlock, total);
    }
    return total;
  }

  // Candidates become the first `count` tokens of the order. Those at -inf are never drawn, so they may be missing.
  void keep_first(int64_t count) {
    collect(lower_bound_of(count, -FLT_MAX));
    compute_masses();
    Border border;
    if (find_border([](int64_t) { return int64_t{1}; }, [&](int64_t sum) { return sum >= count; }, &border)) cut(border);
  }

  // The border of the nucleus: of the candidates if `few`, else of the row, of which candidates are made as needed.
  Border nucleus(double top_p, bool few) {
    const auto mass = [&](int64_t i) { return mass_[i]; };
    const auto reaches = [&](double total) {
      return [=](int64_t sum) { return static_cast<double>(sum) >= top_p * total; };
    };
    Border border = kAll;
    if (few) {
      const int64_t total = std::accumulate(mass_.get(), mass_.get() + count_, int64_t{0});
      find_border(mass, reaches(static_cast<double>(total)), &border);
      return border;
    }
    const bool rough = temperature_ >= kLeastRoughTemperature && temperature_ <= kMostRoughTemperature &&
                       1 - top_p > 16 * kRoughError;
    const double estimate = rough ? kernels_.rough_total(row_, largest_, static_cast<float>(1 / temperature_)) : 1.0;
    // What lies below has together less than half of what the nucleus may lack, so the border is among the candidates.
    collect_from(temperature_ * std::log((1 - top_p) * 0.5 * estimate / static_cast<double>(row_.count)));
    if (rough) collect_enough(top_p * estimate * (1 + 4 * kRoughError));
    compute_masses();
    if (rough) {
      // Every mass has lost less than one. If the border is the same for the least possible total and the most, it is it.
      const double least = estimate * (1 - kRoughError) / kMassUnit - static_cast<double>(row_.count);
      const double most = estimate * (1 + kRoughError) / kMassUnit;
      if (find_border(mass, reaches(least), &border) && reaches(most)(border.sum)) return border;
    }
    find_border(mass, reaches(static_cast<double>(total_mass())), &border);
    return border;
  }

  // Candidates are the tokens whose logit is at least the largest plus `below`, and finite.
  void collect_from(double below) {
    collect(std::max(static_cast<float>(largest_ + below), -FLT_MAX));
  }

  // Leaves out what is not needed for candidates to have this rough sum.
  void collect_enough(double sum) {
    kernels_.rough_exps(values_.get(), count_, largest_, static_cast<float>(1 / temperature_), rough_.get());
    double low = -40, high = 0;  // bounds of z between which the least that is needed lies
    for (int i = 0; i < 12; ++i) {
      const double middle = (low + high) / 2;
      const bool enough = kernels_.rough_sum(rough_.get(), count_, static_cast<float>(std::exp(middle))) >= sum;
      (enough ? low : high) = middle;
    }
    // The rounding of single precision moves z by less than what is taken off.
    if (low > -40) collect_from(temperature_ * (low - 1e-4));
  }

  // The shortest prefix of the candidates' order whose sum of weights is `reached`; false if none is.
  template <typename Weight, typename Reached>
  bool find_border(const Weight& weight, const Reached& reached, Border* border) {
    // Those near the border: at first all, and how they are spread is only guessed.
    const float* values = values_.get();
    const int32_t* members = nullptr;
    int64_t count = count_, before = 0, had = 0;
    float low = bound_ > -FLT_MAX ? bound_ : *std::min_element(maxima_.get(), maxima_.get() + row_.blocks);
    float high = largest_;
    while (true) {
      if (!narrow(values, members, low, high, weight, reached, &count, &before)) return false;
      values = near_values_.get();
      members = members_.get();
      const auto [smallest, greatest] = std::minmax_element(values, values + count);
      low = *smallest;
      high = *greatest;
      if (low == high) break;  // in the order already, which is that of ids
      if (count <= 32 || count == had) {  // few, or values too close to be told apart by buckets
        std::sort(members_.get(), members_.get() + count, [&](int32_t a, int32_t b) { return is_before(a, b); });
        break;
      }
      had = count;
    }
    for (int64_t j = 0; j < count; ++j) {
      before += weight(members[j]);
      if (!reached(before)) continue;
      *border = {values_[members[j]], members[j], before};
      return true;
    }
    return false;
  }

  // Of `count` members (null: all candidates) with these values, those in the bucket of the border become the members;
  // `before` becomes the weight of all that come before them. False if the border is not among them.
  template <typename Weight, typename Reached>
  bool narrow(const float* values, const int32_t* members, float low, float high, const Weight& weight,
              const Reached& reached, int64_t* count, int64_t* before) {
    const auto member = [=](int64_t j) { return members == nullptr ? static_cast<int32_t>(j) : members[j]; };
    const float spread = std::min(high - low, FLT_MAX);
    uint32_t* bucket = words_.get();
    kernels_.buckets(values, *count, high, spread > 0 ? std::min(255 / spread, FLT_MAX) : 0, bucket);
    int64_t sums[256] = {};
    for (int64_t j = 0; j < *count; ++j) sums[bucket[j]] += weight(member(j));
    uint32_t found = 0;
    while (!reached(*before + sums[found])) {
      *before += sums[found];
      if (++found == 256) return false;
    }
    int64_t kept = 0;
    for (int64_t j = 0; j < *count; ++j) {
      near_values_[kept] = values[j];
      members_[kept] = member(j);
      kept += bucket[j] == found;
    }
    *count = kept;
    return true;
  }

  bool is_within(const Border& border, int64_t i) const {
    return (values_[i] > border.value) | ((values_[i] == border.value) & (i <= border.index));
  }

  void cut(const Border& border) {
    int64_t kept = 0;
    for (int64_t i = 0; i < count_; ++i) {
      const bool keeps = is_within(border, i);
      ids_[kept] = ids_[i];
      values_[kept] = values_[i];
      z_[kept] = z_[i];
      mass_[kept] = mass_[i];
      kept += keeps;
    }
    count_ = kept;
  }

  void draw_from_candidates(const Noise& noise, const Border& border, Best& best) {
    kernels_.words(noise, ids_.get(), count_, words_.get());
    for (int64_t i = 0; i < count_; ++i)
      if (words_[i] >= best.least_word(mass_[i]) && z_[i] >= least_z_ && is_within(border, i))
        best.offer(ids_[i], z_[i], words_[i]);
  }

  // Of a block whose largest logit is too far below the best sum no noise is drawn at all, and of the others it is looked
  // at only where the word would do for the largest.
  void draw_from_all(const Noise& noise, Best& best) {
    values_.swap(maxima_);
    count_ = row_.blocks;
    for (int64_t i = count_; i % 16 != 0; ++i) values_[i] = -kInfinity;
    compute_masses();
    alignas(64) uint32_t words[kRowBlock];
    for (int64_t block = 0; block < row_.blocks; ++block) {
      const double least = best.least_word(mass_[block]);
      if (least >= 0x1p32 || z_[block] < least_z_) continue;
      const auto bound = static_cast<uint32_t>(std::max(least, 0.0));
      const float* p = block_of(row_, block);
      for (uint64_t left = kernels_.block_words(noise, block, bound, words); left != 0; left &= left - 1) {
        const int bit = __builtin_ctzll(left), token = 4 * (bit % 16) + bit / 16;
        const double z = (static_cast<double>(p[token]) - static_cast<double>(largest_)) / temperature_;
        if (z >= least_z_) best.offer(static_cast<int32_t>(block * kRowBlock + token), z, words[bit]);
      }
    }
  }

  const SamplingKernels& kernels_;
  int64_t capacity_ = 0;
  Row row_;
  float largest_ = 0;
  double temperature_ = 1, least_z_ = 0;
  // Of each block, the largest logit.
  std::unique_ptr<float[]> maxima_;
  // Candidates, in order of their ids.
  int64_t count_ = 0;
  float bound_ = 0;  // the least value that a candidate may have
  std::unique_ptr<float[]> values_;
  std::unique_ptr<int32_t[]> ids_;
  std::unique_ptr<double[]> z_;
  std::unique_ptr<int64_t[]> mass_;
  std::unique_ptr<uint32_t[]> words_;
  std::unique_ptr<float[]> rough_;
  // Those near a border.
  std::unique_ptr<int32_t[]> members_;
  std::unique_ptr<float[]> near_values_;
  std::unique_ptr<float[]> adjusted_;
};

}  // namespace

class Sampler {
 public:
  Sampler(Team& team, const SamplingKernels& kernels) : team_(team) {
    for (int i = 0; i < team.size(); ++i) samplers_.emplace_back(kernels);
  }

  void sample(const float* logits, int64_t rows, int64_t vocabulary, const SamplingArrays& params,
              const AdjustmentArrays* adjustments, int32_t* tokens, float* largest) {
    deal_out(rows, vocabulary, [&](RowSampler& sampler, int64_t r) {
      const float* row = logits + r * vocabulary;
      if (adjustments != nullptr) row = sampler.adjust(row, vocabulary, *adjustments, r);
      largest[r] = sampler.read(row, vocabulary);
      if (!std::isfinite(largest[r])) return;
      const uint64_t seed = params.seed[r];
      const Noise noise = {static_cast<uint32_t>(params.position[r]), static_cast<uint32_t>(seed),
                           static_cast<uint32_t>(seed >> 32)};
      tokens[r] = sampler.draw({params.temperature[r], params.top_p[r], params.min_p[r], params.top_k[r], noise});
    });
  }

  void token_logprobs(const float* logits, int64_t count, int64_t vocabulary, const LogprobArrays& a) {
    deal_out(count, vocabulary, [&](RowSampler& sampler, int64_t i) {
      a.largest[i] = sampler.read(logits + a.rows[i] * vocabulary, vocabulary);
      if (!std::isfinite(a.largest[i])) return;
      sampler.token_logprobs(a.token_ids[i], a.num_top[i], a.logprobs + i, a.ranks + i, a.top_ids + i * a.width,
                             a.top_logprobs + i * a.width);
    });
  }

 private:
  void deal_out(int64_t rows, int64_t vocabulary, const std::function<void(RowSampler&, int64_t)>& work) {
    for (RowSampler& sampler : samplers_) sampler.reserve(vocabulary);
    std::atomic<int64_t> next{0};
    const std::function<void(int)> serve = [&](int rank) {
      for (int64_t r = next++; r < rows; r = next++) work(samplers_[rank], r);
    };
    if (rows < 2) return serve(0);  // not worth waking anyone
    team_.run(serve);
  }

  Team& team_;
  std::vector<RowSampler> samplers_;
};

const SamplingKernels* find_sampling_kernels(const char* isa) {
  if (find_kernels(isa) == nullptr) return nullptr;
  return std::strcmp(isa, k_sampling_avx2.name) == 0 ? &k_sampling_avx2 : &k_sampling_avx512;
}

}  // namespace batonq

using batonq::Sampler;

#define EXPORT __attribute__((visibility("default")))

extern "C" {

// `team` must outlive what is made here. Null without memory, or without the instruction set.
EXPORT Sampler* batonq_sampler_create(batonq::Team* team, const char* isa) {
  const batonq::SamplingKernels* kernels = batonq::find_sampling_kernels(isa);
  if (kernels == nullptr) return nullptr;
  try {
    return new Sampler(*team, *kernels);
  } catch (const std::bad_alloc&) {
    return nullptr;
  }
}

EXPORT void batonq_sampler_destroy(Sampler* self) { delete self; }

// Draws a token for each row of logits [rows, vocabulary], and says what the largest adjusted logit is (NaN if there is
// one): where it isn't finite there is no token. `adjustments` may be null. False without memory.
EXPORT bool batonq_sample(Sampler* self, const float* logits, int64_t rows, int64_t vocabulary,
                          const batonq::SamplingArrays* params, const batonq::AdjustmentArrays* adjustments,
                          int32_t* tokens, float* largest) {
  try {
    self->sample(logits, rows, vocabulary, *params, adjustments, tokens, largest);
  } catch (const std::bad_alloc&) {
    return false;
  }
  return true;
}

// `count` rows of the logits, as `arrays` say. False without memory.
EXPORT bool batonq_token_logprobs(Sampler* self, const float* logits, int64_t count, int64_t vocabulary,
                                  const batonq::LogprobArrays* arrays) {
  try {
    self->token_logprobs(logits, count, vocabulary, *arrays);
  } catch (const std::bad_alloc&) {
    return false;
  }
  return true;
}
}
