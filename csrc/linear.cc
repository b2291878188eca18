// Splits a linear map over the pool by outputs: each output is summed by one thread in channel order, so results do not
// depend on the number of threads.
#include "linear.h"

#include <atomic>
#include <cstring>

#include "pool.h"

namespace {

struct Table {
  decltype(Kernels::matvec_f32) matvec;
  decltype(Kernels::matmul_f32) matmul;
  decltype(Kernels::pack_f32) pack;
};
Table table(Quant q) {
  const Kernels& k = kernels();
  switch (q) {
    case Quant::f32: return {k.matvec_f32, k.matmul_f32, k.pack_f32};
    case Quant::bf16: return {k.matvec_bf16, k.matmul_bf16, k.pack_bf16};
    case Quant::int8: return {k.matvec_int8, k.matmul_int8, k.pack_int8};
    default: return {k.matvec_int4, k.matmul_int4, k.pack_int4};
  }
}

void start(const float* bias, float* y, size_t o0, size_t o1) {
  if (bias)
    std::memcpy(y + o0, bias + o0, (o1 - o0) * sizeof(float));
  else
    std::memset(y + o0, 0, (o1 - o0) * sizeof(float));
}

}  // namespace

size_t apply(const Mat& w, const float* bias, const float* x, size_t tokens, float* y, bool add) {
  if (tokens == 0) return 0;
  const Table k = table(w.quant);
  const size_t blocks = w.oc / kPad;
  // One token: a share of the outputs each, long rows. Many: more, smaller tasks, so that threads finish together.
  const size_t want = tokens == 1 ? threads() : 4 * threads(), tasks = blocks < want ? blocks : want;
  parallel(tasks, [&](size_t task, size_t thread) {
    const size_t o0 = task * blocks / tasks * kPad, o1 = (task + 1) * blocks / tasks * kPad;
    if (!add)
      for (size_t t = 0; t < tokens; ++t) start(bias, y + t * w.oc, o0, o1);
    else if (bias)
      for (size_t t = 0; t < tokens; ++t)
        for (size_t o = o0; o < o1; ++o) y[t * w.oc + o] += bias[o];
    if (tokens == 1)
      k.matvec(w, x, y, o0, o1);
    else
      k.matmul(w, x, tokens, y, o0, o1, scratch(thread, kScratch));
  });
  return w.bytes();
}

bool pack(const float* rows, size_t n, const Mat& w, size_t o0) {
  const auto kernel = table(w.quant).pack;
  std::atomic<bool> ok{true};
  constexpr size_t kChannels = 64;
  parallel((w.ic + kChannels - 1) / kChannels, [&](size_t task, size_t) {
    const size_t c0 = task * kChannels, c1 = c0 + kChannels < w.ic ? c0 + kChannels : w.ic;
    if (!kernel(rows, n, w, o0, c0, c1)) ok = false;
  });
  return ok;
}
