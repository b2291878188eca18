// Thread pool. Every thread has a seat, one line of memory that says what there is to do and which tasks are its own:
// where two CPUs share no cache a hand-over costs what its lines take from one to the other, so it is one line there
// and one line back.
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
  void (*fn)(void*, size_t, size_t, size_t) = nullptr;  // ctx, task, the first task of the thread's run, thread
  void* ctx = nullptr;
};

constexpr size_t kMostTasks = 1 << 24;

// Tasks [next, end) that are not taken yet, and the epoch they are of. Whoever takes one compares the whole word, so
// nobody takes a task of an epoch that is over; and while one is left the job does not change.
struct Left {
  uint64_t word;
  Left(uint64_t w) : word(w) {}
  Left(uint64_t epoch, uint64_t next, uint64_t end) : word(epoch << 48 | next << 24 | end) {}
  uint64_t epoch() const { return word >> 48; }
  uint64_t next() const { return word >> 24 & (kMostTasks - 1); }
  uint64_t end() const { return word & (kMostTasks - 1); }
  bool none() const { return next() >= end(); }
};
struct alignas(64) Seat {
  std::atomic<uint64_t> left{0};
  std::atomic<decltype(Job::fn)> fn{nullptr};
  std::atomic<void*> ctx{nullptr};
  std::atomic<uint64_t> first{0};  // task of the thread's own run
  std::atomic<bool> runs{false};

  // One task of the epoch, the first or the last that is left. False: there is none.
  bool take(uint64_t epoch, bool from_front, size_t& task) {
    uint64_t now = left.load(std::memory_order_acquire);
    do {
      const Left l(now);
      if (l.epoch() != epoch || l.none()) return false;
      task = from_front ? l.next() : l.end() - 1;
    } while (!left.compare_exchange_weak(now, from_front ? now + (1ull << 24) : now - 1, std::memory_order_acq_rel,
                                         std::memory_order_acquire));
    return true;
  }
};

class Pool {
 public:
  explicit Pool(size_t n) : threads_(n), buffers_(n), seats_(n) {
    for (size_t i = 1; i < n; ++i) workers_.emplace_back([this, i] { work(i); });
  }
  ~Pool() {
    stop_ = true;
    publish(Job{}, 0, true);
    wake();
    for (auto& w : workers_) w.join();
  }
  size_t size() const { return threads_; }

  // runs: each thread has its own part of the tasks and others take the last of it; else all take the first one left.
  void run(Job job, size_t tasks, bool runs) {
    const uint64_t epoch = publish(job, tasks, runs);
    if (sleepers_.load(std::memory_order_relaxed) > 0) wake();
    work_on(epoch, 0, runs);
    // Whoever went to sleep meanwhile, without having seen the seats, has been counted by now.
    std::atomic_thread_fence(std::memory_order_seq_cst);
    if (done_.load(std::memory_order_acquire) != published_ && sleepers_.load(std::memory_order_relaxed) > 0) wake();
    while (done_.load(std::memory_order_acquire) != published_) RELAX();
  }

  float* scratch(size_t thread, size_t n) { return buffers_[thread].get(n); }

 private:
  // Nobody has a task of the last epoch, so nobody reads what it left in the seats.
  uint64_t publish(Job job, size_t tasks, bool runs) {
    epoch_ = (epoch_ + 1) & 0xffff;
    published_ += tasks;
    const size_t n = runs ? std::min(threads_, std::max<size_t>(tasks, 1)) : 1;
    // The caller, who begins first, has the one more that there may be.
    const auto start = [&](size_t t) { return t < n ? (t * tasks + n - 1) / n : tasks; };
    // In this order: whoever sees its own seat sees the first one too, where tasks lie that all take from.
    for (size_t t = 0; t < threads_; ++t) {
      Seat& seat = seats_[t];
      const size_t first = start(t), end = start(t + 1);
      seat.fn.store(job.fn, std::memory_order_relaxed);
      seat.ctx.store(job.ctx, std::memory_order_relaxed);
      seat.first.store(first, std::memory_order_relaxed);
      seat.runs.store(runs, std::memory_order_relaxed);
      seat.left.store(Left(epoch_, first, end).word, std::memory_order_release);
    }
    return epoch_;
  }

  // All tasks of the epoch that the thread can get, its own first.
  void work_on(uint64_t epoch, size_t thread, bool runs) {
    uint64_t finished = 0;
    for (size_t t = 0; t < (runs ? threads_ : 1); ++t) {
      Seat& seat = seats_[runs ? (thread + t) % threads_ : 0];
      size_t task;
      while (seat.take(epoch, t == 0, task)) {
        // The task was left, so what the seat says is of this epoch.
        const auto fn = seat.fn.load(std::memory_order_relaxed);
        fn(seat.ctx.load(std::memory_order_relaxed), task, t == 0 ? seat.first.load(std::memory_order_relaxed) : task,
           thread);
        ++finished;
      }
    }
    if (finished) done_.fetch_add(finished, std::memory_order_acq_rel);
  }

  uint64_t epoch_of(size_t thread) const { return Left(seats_[thread].left.load(std::memory_order_acquire)).epoch(); }

  void work(size_t thread) {
    uint64_t seen = 0;
    while (true) {
      if (epoch_of(thread) == seen) wait(thread, seen);
      seen = epoch_of(thread);
      if (stop_) return;  // read after the epoch: the last one is published after stop_ is set, so it is never missed
      // What a task captured lies on the caller's stack, from its context upwards: the lines come together.
      const Seat& seat = seats_[thread];
      const char* ctx = static_cast<const char*>(seat.ctx.load(std::memory_order_relaxed));
      for (size_t line = 0; line < kContextLines; ++line) __builtin_prefetch(ctx + 64 * line);
      work_on(seen, thread, seat.runs.load(std::memory_order_relaxed));
    }
  }

  void wait(size_t thread, uint64_t seen) {
    const auto until = std::chrono::steady_clock::now() + kSpin;
    while (std::chrono::steady_clock::now() < until) {
      for (int i = 0; i < 64; ++i) {
        if (epoch_of(thread) != seen) return;
        RELAX();
      }
    }
    std::unique_lock<std::mutex> lock(mutex_);
    sleepers_.fetch_add(1, std::memory_order_seq_cst);
    std::atomic_thread_fence(std::memory_order_seq_cst);
    wake_.wait(lock, [&] { return epoch_of(thread) != seen || stop_; });
    sleepers_.fetch_sub(1, std::memory_order_seq_cst);
  }
  void wake() {
    std::lock_guard<std::mutex> lock(mutex_);
    wake_.notify_all();
  }

  static constexpr size_t kContextLines = 8;
  const size_t threads_;
  std::vector<Buffer<float>> buffers_;
  std::vector<Seat> seats_;
  uint64_t epoch_ = 0, published_ = 0;         // of the caller: the last epoch; tasks of all of them
  alignas(64) std::atomic<uint64_t> done_{0};  // tasks of all epochs
  alignas(64) std::atomic<bool> stop_{false};
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
  if (tasks == 1 || tasks >= kMostTasks || p.size() == 1)
    alone();
  else
    all(p);
}

}  // namespace

void parallel(size_t tasks, void (*fn)(void*, size_t, size_t), void* ctx) {
  const auto alone = [&] {
    for (size_t i = 0; i < tasks; ++i) fn(ctx, i, 0);
  };
  auto one = [&](size_t task, size_t, size_t thread) { fn(ctx, task, thread); };
  in_turn(tasks, alone, [&](Pool& p) { p.run({called_in_runs<decltype(one)>, &one}, tasks, false); });
}
void parallel_runs(size_t tasks, void (*fn)(void*, size_t, size_t, size_t), void* ctx) {
  const auto alone = [&] {
    for (size_t i = 0; i < tasks; ++i) fn(ctx, i, 0, 0);
  };
  in_turn(tasks, alone, [&](Pool& p) { p.run({fn, ctx}, tasks, true); });
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
