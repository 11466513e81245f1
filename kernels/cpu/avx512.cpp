// The kernels for avx512.
#define BATONQ_ISA avx512
#include "simd_avx512.h"
#include "arithmetic.h"

namespace batonq {

extern const Kernels k_avx512;
const Kernels k_avx512 = {"avx512", avx512::product, {avx512::row_kernels<float>(), avx512::row_kernels<bf16>()}, nullptr};

}  // namespace batonq
