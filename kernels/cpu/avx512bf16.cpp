// The kernels for avx512bf16.
#define BATONQ_ISA avx512bf16
#define BATONQ_BF16
#include "simd_avx512.h"
#include "arithmetic.h"
#include "screen.h"

namespace batonq {

extern const Kernels k_avx512bf16;
const Kernels k_avx512bf16 = {"avx512bf16", avx512bf16::product, {avx512bf16::row_kernels<float>(), avx512bf16::row_kernels<bf16>()}, &avx512bf16::screen_kernels};

}  // namespace batonq
