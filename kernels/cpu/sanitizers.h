// What sanitizers can't see by themselves (`make sanitize`): memory that a masked instruction touches, and bytes of a
// mapping that hold nothing. Without a sanitizer nothing of this is compiled.
#pragma once

#include <cstddef>

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
extern "C" void __asan_loadN(const void* p, size_t bytes);
extern "C" void __asan_storeN(void* p, size_t bytes);
#elif defined(__SANITIZE_THREAD__)
extern "C" void __tsan_read_range(const void* p, size_t bytes);
extern "C" void __tsan_write_range(void* p, size_t bytes);
#endif

namespace batonq {

#if defined(__SANITIZE_ADDRESS__)

constexpr size_t kGuard = 4096;  // bytes behind each mapping that nobody may touch

inline void reads(const void* p, size_t bytes) { __asan_loadN(p, bytes); }
inline void writes(void* p, size_t bytes) { __asan_storeN(p, bytes); }
inline void forbid(void* p, size_t bytes) { __asan_poison_memory_region(p, bytes); }
inline void allow(void* p, size_t bytes) { __asan_unpoison_memory_region(p, bytes); }

#else

constexpr size_t kGuard = 0;

#if defined(__SANITIZE_THREAD__)
inline void reads(const void* p, size_t bytes) { __tsan_read_range(p, bytes); }
inline void writes(void* p, size_t bytes) { __tsan_write_range(p, bytes); }
#else
inline void reads(const void*, size_t) {}
inline void writes(void*, size_t) {}
#endif
inline void forbid(void*, size_t) {}
inline void allow(void*, size_t) {}

#endif

}  // namespace batonq
