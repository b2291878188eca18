// Thread pool: a job is published with an epoch; tasks are claimed by compare-and-swap on (epoch, next task).
#include "pool.h"

#include <pthread.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <new>
#include <thread>
#include <vector>

#include "buffer.h"

#if defined(__x86_64__)
#define RELAX() __builtin_ia32_pause()
#else
#define RELAX() std::this_thread::yield()
#endif

namespace {

constexpr auto kSpin = std::chrono::microseconds(100);  // longer than the Python between two kernels of a step

struct Job {
  void (*fn)(void*, size_t, size_t) = nullptr;
  void* ctx = nullptr;
  uint32_t tasks = 0;
};

// Neighbouring tasks: the next one << 32 | the end. Its own thread takes the first, others the last.
struct alignas(64) Run {
  std::atomic<uint64_t> left{0};
  bool take(bool own, size_t& task) {
    uint64_t l = left.load(std::memory_order_relaxed);
    do {
      if (l >> 32 >= static_cast<uint32_t>(l)) return false;
    } while (!left.compare_exchange_weak(l, own ? l + (1ull << 32) : l - 1, std::memory_order_relaxed));
    task = own ? l >> 32 : static_cast<uint32_t>(l) - 1;
    return true;
  }
};

class Pool {
 public:
  explicit Pool(size_t n) : threads_(n), buffers_(n), runs_(n) {
    for (size_t i = 1; i < n; ++i) workers_.emplace_back([this, i] { work(i); });
  }
  ~Pool() {
    stop_ = true;
    publish(Job{});
    for (auto& w : workers_) w.join();
  }
  size_t size() const { return threads_; }

  void run(Job job) {
    const uint32_t epoch = publish(job);
    while (claim_one(epoch, 0)) {
    }
    while (done_.load(std::memory_order_acquire) < job.tasks) RELAX();
  }

  // A thread that is late finds its run taken by others; which thread calls `own` first does not matter.
  void run_runs(size_t tasks, void (*fn)(void*, size_t, size_t, size_t), void* ctx) {
    const size_t n = std::min(threads_, tasks);
    const auto first = [&](size_t r) { return r * tasks / n; };
    for (size_t r = 0; r < n; ++r) runs_[r].left = first(r) << 32 | first(r + 1);
    auto own = [&](size_t, size_t thread) {
      size_t task;
      while (thread < n && runs_[thread].take(true, task)) fn(ctx, task, first(thread), thread);
      for (size_t r = 1; r <= n; ++r)
        while (runs_[(thread + r) % n].take(false, task)) fn(ctx, task, task, thread);
    };
    run(Job{called<decltype(own)>, &own, static_cast<uint32_t>(n)});
  }

  float* scratch(size_t thread, size_t n) { return buffers_[thread].get(n); }

 private:
  uint32_t publish(Job job) {
    const uint32_t epoch = static_cast<uint32_t>(ticket_.load(std::memory_order_relaxed) >> 32) + 1;
    // Nobody reads job_ now: all tasks of the last epoch are done, and a claim checks the epoch first.
    job_ = job;
    done_.store(0, std::memory_order_relaxed);
    ticket_.store(static_cast<uint64_t>(epoch) << 32 | job.tasks, std::memory_order_seq_cst);
    if (sleepers_.load(std::memory_order_seq_cst) > 0) {
      std::lock_guard<std::mutex> lock(mutex_);
      wake_.notify_all();
    }
    return epoch;
  }

  // Takes one task of the epoch, counted down; false when none is left or the epoch is over.
  bool claim_one(uint32_t epoch, size_t thread) {
    uint64_t t = ticket_.load(std::memory_order_acquire);
    do {
      if (static_cast<uint32_t>(t >> 32) != epoch || static_cast<uint32_t>(t) == 0) return false;
    } while (!ticket_.compare_exchange_weak(t, t - 1, std::memory_order_acq_rel, std::memory_order_acquire));
    const Job job = job_;
    job.fn(job.ctx, job.tasks - static_cast<uint32_t>(t), thread);
    done_.fetch_add(1, std::memory_order_release);
    return true;
  }

  uint32_t epoch() const { return static_cast<uint32_t>(ticket_.load(std::memory_order_seq_cst) >> 32); }

  void work(size_t thread) {
    uint32_t seen = 0;
    while (true) {
      if (epoch() == seen) wait(seen);
      seen = epoch();
      if (stop_) return;  // read after the epoch: the last one is published after stop_ is set, so it is never missed
      while (claim_one(seen, thread)) {
      }
    }
  }

  void wait(uint32_t seen) {
    const auto until = std::chrono::steady_clock::now() + kSpin;
    while (std::chrono::steady_clock::now() < until) {
      for (int i = 0; i < 64; ++i) {
        if (epoch() != seen) return;
        RELAX();
      }
    }
    std::unique_lock<std::mutex> lock(mutex_);
    sleepers_.fetch_add(1, std::memory_order_seq_cst);
    wake_.wait(lock, [&] { return epoch() != seen; });
    sleepers_.fetch_sub(1, std::memory_order_seq_cst);
  }

  const size_t threads_;
  std::vector<Buffer<float>> buffers_;
  std::vector<Run> runs_;
  // One line of memory that goes from core to core, and not two: a thread that sees the ticket has the job too.
  alignas(64) std::atomic<uint64_t> ticket_{0};  // epoch << 32 | tasks not yet claimed
  Job job_;
  alignas(64) std::atomic<uint32_t> done_{0};
  std::atomic<bool> stop_{false};
  std::atomic<int> sleepers_{0};
  std::mutex mutex_;
  std::condition_variable wake_;
  std::vector<std::thread> workers_;
};

std::mutex g_turn;
Pool* g_pool = nullptr;  // left to the process's end: joining threads while an interpreter shuts down can hang
size_t g_threads = 1;

Pool& pool() {
  if (!g_pool) {
    // A forked child has no workers: it makes its own pool.
    static const int once = pthread_atfork(nullptr, nullptr, [] {
      g_pool = nullptr;
      new (&g_turn) std::mutex;
    });
    static_cast<void>(once);
    g_pool = new Pool(g_threads);
  }
  return *g_pool;
}

}  // namespace

namespace {

// alone() on one thread, or all(pool).
template <class Alone, class All>
void in_turn(size_t tasks, Alone&& alone, All&& all) {
  if (tasks == 0) return;
  std::lock_guard<std::mutex> turn(g_turn);
  Pool& p = pool();
  if (tasks == 1 || p.size() == 1)
    alone();
  else
    all(p);
}

}  // namespace

void parallel(size_t tasks, void (*fn)(void*, size_t, size_t), void* ctx) {
  const auto alone = [&] {
    for (size_t i = 0; i < tasks; ++i) fn(ctx, i, 0);
  };
  in_turn(tasks, alone, [&](Pool& p) { p.run(Job{fn, ctx, static_cast<uint32_t>(tasks)}); });
}
void parallel_runs(size_t tasks, void (*fn)(void*, size_t, size_t, size_t), void* ctx) {
  const auto alone = [&] {
    for (size_t i = 0; i < tasks; ++i) fn(ctx, i, 0, 0);
  };
  in_turn(tasks, alone, [&](Pool& p) { p.run_runs(tasks, fn, ctx); });
}

size_t threads() { return g_threads; }

void set_threads(size_t n) {
  std::lock_guard<std::mutex> turn(g_turn);
  if (n == g_threads) return;
  delete g_pool;
  g_pool = nullptr;
  g_threads = n;
}

float* scratch(size_t thread, size_t n) { return pool().scratch(thread, n); }
