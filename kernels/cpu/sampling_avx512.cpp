// The sampler's kernels for avx512.
#define BATONQ_ISA sampling_avx512
#include "sampling_simd_avx512.h"
#include "sampling_arithmetic.h"

namespace batonq {

const SamplingKernels k_sampling_avx512 = {
    "avx512",
    sampling_avx512::largest,
    sampling_avx512::rough_total,
    sampling_avx512::rough_exps,
    sampling_avx512::rough_sum,
    sampling_avx512::collect,
    sampling_avx512::masses,
    sampling_avx512::buckets,
    sampling_avx512::count_ahead,
    sampling_avx512::words,
    sampling_avx512::block_words,
};

}  // namespace batonq
