// A team of threads that runs one function on all its members at once, with barriers inside.
//
// Waiting is a brief spin, then a futex: with a core each, nobody sleeps between two ops; where cores are oversubscribed
// the kernel is told who waits, so that the one who works gets the core.
#pragma once

#include <linux/futex.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <cstdint>
#include <functional>
#include <thread>
#include <vector>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace batonq {

inline void relax() {
#if defined(__x86_64__)
  _mm_pause();
#endif
}

// A word that threads wait on until it changes, on a line of its own.
class alignas(64) Signal {
 public:
  uint32_t value() const { return word_.load(std::memory_order_acquire); }

  void advance() {
    word_.fetch_add(1, std::memory_order_acq_rel);
    if (sleepers_.load(std::memory_order_acquire) > 0) futex(FUTEX_WAKE_PRIVATE, INT32_MAX);
  }

  void await_change(uint32_t seen, int spins) {
    for (int i = 0; i < spins; ++i) {
      if (value() != seen) return;
      relax();
    }
    sleepers_.fetch_add(1, std::memory_order_acq_rel);
    while (value() == seen) futex(FUTEX_WAIT_PRIVATE, seen);
    sleepers_.fetch_sub(1, std::memory_order_acq_rel);
  }

 private:
  long futex(int operation, uint32_t operand) {
    return syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word_), operation, operand, nullptr, nullptr, 0);
  }

  std::atomic<uint32_t> word_{0};
  std::atomic<int32_t> sleepers_{0};
};

class Team {
 public:
  explicit Team(int size) : size_(size), spins_(size > cores() ? 0 : kSpins) {
    for (int rank = 1; rank < size; ++rank) threads_.emplace_back([this, rank] { serve(rank); });
  }

  ~Team() {
    ending_ = true;
    start_.advance();
    for (auto& thread : threads_) thread.join();
  }

  int size() const { return size_; }

  // Runs work(rank) on every member, the caller being rank 0, and returns when all are done.
  void run(const std::function<void(int)>& work) {
    work_ = &work;
    start_.advance();
    work(0);
    barrier();
  }

  // Returns when the signal is no longer what was seen.
  void await_change(Signal& signal, uint32_t seen) const { signal.await_change(seen, spins_); }

  // Returns when every member has called it.
  void barrier() {
    barrier([] {});
  }

  // Likewise; the last to arrive calls `between` before anybody goes on.
  template <typename Between>
  void barrier(const Between& between) {
    const uint32_t generation = released_.value();
    if (arrived_.fetch_add(1, std::memory_order_acq_rel) + 1 == size_) {
      between();
      arrived_.store(0, std::memory_order_relaxed);
      released_.advance();
    } else {
      released_.await_change(generation, spins_);
    }
  }

 private:
  // About 20 microseconds. With fewer cores than members, who spins keeps one from the core.
  static constexpr int kSpins = 1000;

  static int cores() {
    cpu_set_t set;
    return sched_getaffinity(0, sizeof set, &set) == 0 ? CPU_COUNT(&set) : 1;
  }

  void serve(int rank) {
    uint32_t seen = 0;
    while (true) {
      start_.await_change(seen, spins_);
      ++seen;
      if (ending_) return;
      (*work_)(rank);
      barrier();
    }
  }

  const int size_, spins_;
  const std::function<void(int)>* work_ = nullptr;
  std::atomic<bool> ending_{false};
  Signal start_, released_;
  std::atomic<int> arrived_{0};
  std::vector<std::thread> threads_;
};

}  // namespace batonq
