// The kernels for avx2.
#define BATONQ_ISA avx2
#include "simd_avx2.h"
#include "arithmetic.h"

namespace batonq {

extern const Kernels k_avx2;
const Kernels k_avx2 = {"avx2", avx2::product, {avx2::row_kernels<float>(), avx2::row_kernels<bf16>()}, nullptr};

}  // namespace batonq
