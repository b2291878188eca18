// Splits a linear map over the pool: one token by outputs and channels, many tokens by outputs. Either way the sums
// behind an output are added in an order that does not depend on the number of threads.
#include "linear.h"

#include <algorithm>
#include <atomic>
#include <cstring>

#include "buffer.h"
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

// How one token's work is cut: rows longer than a panel by outputs, and all by channels, each range with sums of its
// own that are added up afterwards. It depends on the shape alone, so that results do not depend on the number of
// threads.
struct Cut {
  size_t outputs, channels;  // parts
};
Cut cut(const Mat& w, size_t count) {
  constexpr size_t kTask = 128 << 10;  // bytes worth handing to a thread
  const size_t outputs = (w.oc + kPanel - 1) / kPanel;
  const size_t bytes = count * w.channel_bytes();
  size_t channels = 1;
  while (channels * outputs < 64 && bytes / (channels * outputs) > kTask && count / (2 * channels) >= 64) channels *= 2;
  return {outputs, std::min<size_t>(channels, 8)};
}

void apply_one(const Mat& w, const Channels& c, const float* bias, const float* x, float* y, bool add) {
  const auto kernel = table(w.quant).matvec;
  const Cut parts = cut(w, c.count);
  const size_t blocks = w.oc / kPad, n = parts.outputs * parts.channels, tasks = std::min(n, threads());
  static thread_local Buffer<float> others;
  float* sums = others.get((parts.channels - 1) * w.oc);  // (channel parts - 1, oc): the first part's go to y itself
  if (!add) start(bias, y, 0, w.oc);
  const auto channel = [&](size_t part) {
    return part == parts.channels ? c.count : c.count * part / parts.channels / 16 * 16;
  };
  // A thread takes neighbouring parts, so that it reads on where it was reading.
  parallel(tasks, [&](size_t task, size_t) {
    for (size_t part = task * n / tasks; part < (task + 1) * n / tasks; ++part) {
      const size_t o = part / parts.channels, run = part % parts.channels;
      const size_t o0 = blocks * o / parts.outputs * kPad, o1 = blocks * (o + 1) / parts.outputs * kPad;
      float* to = run == 0 ? y : sums + (run - 1) * w.oc;
      if (run > 0) start(nullptr, to, o0, o1);
      kernel(w, c, x, to, o0, o1, channel(run), channel(run + 1));
    }
  });
  kernels().add_rows(y, sums, parts.channels - 1, w.oc);
  if (add && bias)
    for (size_t o = 0; o < w.oc; ++o) y[o] += bias[o];
}

void apply_many(const Mat& w, const float* bias, const float* x, size_t tokens, float* y, bool add) {
  const auto kernel = table(w.quant).matmul;
  const size_t blocks = w.oc / kPad, tasks = std::min(blocks, 4 * threads());
  parallel(tasks, [&](size_t task, size_t thread) {
    const size_t o0 = task * blocks / tasks * kPad, o1 = (task + 1) * blocks / tasks * kPad;
    for (size_t t = 0; t < tokens; ++t) {
      if (!add) start(bias, y + t * w.oc, o0, o1);
      if (add && bias)
        for (size_t o = o0; o < o1; ++o) y[t * w.oc + o] += bias[o];
    }
    kernel(w, x, tokens, y, o0, o1, scratch(thread, kScratch));
  });
}

void apply_bytes(const Mat& w, const float* bias, const float* x, size_t tokens, float* y, bool add) {
  static thread_local Buffer<int8_t> values;
  static thread_local Buffer<float> scales;
  static thread_local Buffer<int32_t> sums;
  const size_t groups = (w.ic + kByteGroup - 1) / kByteGroup, blocks = (w.ic + kByteDepth - 1) / kByteDepth;
  const ByteRows rows{values.get(blocks * tokens * kByteDepth), scales.get(groups * tokens), sums.get(groups * tokens),
                      tokens, w.ic};
  by_rows(tokens, [&](size_t first, size_t n) { kernels().byte_rows(x, first, n, rows); });
  const auto kernel = w.quant == Quant::int8 ? kernels().matmul_bytes_int8 : kernels().matmul_bytes_int4;
  parallel(w.oc / kPad, [&](size_t task, size_t thread) {
    const size_t o0 = task * kPad, o1 = o0 + kPad;
    kernel(w, rows, bias, y, add, o0, o1, scratch(thread, tokens * kPad));
  });
}

}  // namespace

size_t apply(const Mat& w, const float* bias, const float* x, size_t tokens, float* y, bool add, Many many) {
  if (tokens == 0) return 0;
  const bool quantised = w.quant == Quant::int8 || w.quant == Quant::int4;
  if (tokens == 1)
    apply_one(w, {nullptr, w.ic}, bias, x, y, add);
  else if (many == Many::rounded && quantised && kernels().bytes_pay())
    apply_bytes(w, bias, x, tokens, y, add);
  else
    apply_many(w, bias, x, tokens, y, add);
  return w.bytes();
}

size_t apply_some(const Mat& w, const Channels& c, const float* bias, const float* x, float* y, bool add) {
  apply_one(w, c, bias, x, y, add);
  return c.count * w.channel_bytes();
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
