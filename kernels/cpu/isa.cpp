// Which instruction sets this CPU and operating system have.

#include <cpuid.h>

#include <cstring>
#include <initializer_list>

#include "kernels.h"

namespace batonq {

extern const Kernels k_avx512bf16, k_avx512, k_avx2;

namespace {

// Registers that the operating system saves: XCR0. Without its consent an instruction traps, whatever CPUID says.
uint64_t saved_registers() {
  uint32_t low, high;
  __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  return (static_cast<uint64_t>(high) << 32) | low;
}

struct Features {
  bool avx2 = false, avx512 = false, bf16 = false;

  Features() {
    uint32_t a, b, c, d;
    if (!__get_cpuid(1, &a, &b, &c, &d) || !(c & bit_OSXSAVE)) return;
    const uint64_t saved = saved_registers();
    const bool ymm = (saved & 0x6) == 0x6, zmm = (saved & 0xE6) == 0xE6;
    const bool fma = c & bit_FMA;
    if (!__get_cpuid_count(7, 0, &a, &b, &c, &d)) return;
    avx2 = ymm && fma && (b & bit_AVX2);
    avx512 = avx2 && zmm && (b & bit_AVX512F) && (b & bit_AVX512BW) && (b & bit_AVX512DQ) && (b & bit_AVX512VL);
    const bool vnni = c & (1u << 11);
    if (!__get_cpuid_count(7, 1, &a, &b, &c, &d)) return;
    bf16 = avx512 && vnni && (a & (1u << 5));
  }
};

}  // namespace

const Kernels* find_kernels(const char* name) {
  static const Features has;
  if (has.bf16 && !std::strcmp(name, k_avx512bf16.name)) return &k_avx512bf16;
  if (has.avx512 && !std::strcmp(name, k_avx512.name)) return &k_avx512;
  if (has.avx2 && !std::strcmp(name, k_avx2.name)) return &k_avx2;
  return nullptr;
}

const char* best_isa() {
  for (const Kernels* kernels : {&k_avx512bf16, &k_avx512, &k_avx2})
    if (find_kernels(kernels->name) != nullptr) return kernels->name;
  return nullptr;
}

}  // namespace batonq
