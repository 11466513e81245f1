// The sampler's kernels for avx2.
#define BATONQ_ISA sampling_avx2
#include "sampling_simd_avx2.h"
#include "sampling_arithmetic.h"

namespace batonq {

const SamplingKernels k_sampling_avx2 = {
    "avx2",
    sampling_avx2::largest,
    sampling_avx2::rough_total,
    sampling_avx2::rough_exps,
    sampling_avx2::rough_sum,
    sampling_avx2::collect,
    sampling_avx2::masses,
    sampling_avx2::buckets,
    sampling_avx2::count_ahead,
    sampling_avx2::words,
    sampling_avx2::block_words,
};

}  // namespace batonq
