// The one thread pool: workers spin for a moment between regions, then sleep. The caller works too.
#pragma once
#include <cstddef>
#include <type_traits>

// fn(ctx, task, thread) for every task in [0, tasks); thread < threads(). Tasks are claimed one at a time, so a result
// must not depend on which thread computed it. Callers from several Python threads take turns.
void parallel(size_t tasks, void (*fn)(void* ctx, size_t task, size_t thread), void* ctx);

// The same where neighbouring tasks want one thread, which then reads on where it was reading: each thread has a run of
// them, always the same one, and one that is done takes the last of another's. fn(ctx, task, from, thread): the thread
// has done the tasks [from, task) of its run, in order; from = task where it is another's.
void parallel_runs(size_t tasks, void (*fn)(void* ctx, size_t task, size_t from, size_t thread), void* ctx);

template <class F>
void called(void* ctx, size_t task, size_t thread) {
  (*static_cast<std::remove_reference_t<F>*>(ctx))(task, thread);
}
template <class F>
void parallel(size_t tasks, F&& f) {
  parallel(tasks, called<F>, &f);
}
template <class F>
void called_in_runs(void* ctx, size_t task, size_t from, size_t thread) {
  (*static_cast<std::remove_reference_t<F>*>(ctx))(task, from, thread);
}
template <class F>
void parallel_runs(size_t tasks, F&& f) {
  parallel_runs(tasks, called_in_runs<F>, &f);
}

size_t threads();
void set_threads(size_t n);  // n >= 1

// A buffer of at least n floats that belongs to the thread; only for use inside a task.
float* scratch(size_t thread, size_t n);

// f(first, count) over rows, a few at a time; where there are no more, by the calling thread alone. What a thread has
// made of its rows it finds in its cache: they are the same ones at the next step.
template <class F>
void by_rows(size_t rows, F&& f) {
  constexpr size_t kRows = 8;
  if (rows > 0 && rows <= kRows) return f(size_t{0}, rows);
  parallel_runs((rows + kRows - 1) / kRows, [&](size_t task, size_t, size_t) {
    const size_t first = task * kRows;
    f(first, rows - first < kRows ? rows - first : kRows);
  });
}
