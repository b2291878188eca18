// Products of bytes split over the pool, panel by panel; an MLP group by group of its neurons.
#include "prompts.h"

#include <algorithm>

#include "buffer.h"
#include "pool.h"

namespace {

struct RoundedRoom {
  Buffer<int8_t> values;
  Buffer<float> scales;
  Buffer<int32_t> sums;
  ByteRows rows(size_t tokens, size_t ic) {
    const size_t each = byte_groups(ic) * tokens;
    return {values.get(each * kByteGroup), scales.get(each), sums.get(each), tokens, ic};
  }
};

ByteRows rounded(const float* x, size_t tokens, size_t ic) {
  static thread_local RoundedRoom room;
  const ByteRows rows = room.rows(tokens, ic);
  by_rows(tokens, [&](size_t first, size_t n) { kernels().byte_rows(x + first * ic, ic, first, n, 0, ic, rows); });
  return rows;
}

auto kernel_of(Quant quant) {
  const Kernels& k = kernels();
  return quant == Quant::int8     ? k.matmul_bytes_int8
         : quant == Quant::int4   ? k.matmul_bytes_int4
         : quant == Quant::coarse ? k.matmul_bytes_coarse
                                  : k.matmul_bytes_proc;
}

void multiply(const Mat& w, const ByteRows& rows, const float* bias, float* y, bool add) {
  const auto kernel = kernel_of(w.quant);
  parallel(w.oc / kPad, [&](size_t task, size_t thread) {
    const size_t o = task * kPad;
    kernel(w, rows, bias, y + o, w.oc, add, o, o + kPad, scratch(thread, panel_room(w.ic)));
  });
}

}  // namespace

bool in_bytes(const Mat& w, size_t tokens, Many many) {
  const bool floats = w.factors || w.quant == Quant::f32 || w.quant == Quant::bf16 || w.quant == Quant::hashed;
  return tokens > 1 && many == Many::rounded && !floats && kernels().bytes_pay();
}

void apply_bytes(const Mat& w, const float* bias, const float* x, size_t tokens, float* y, bool add) {
  multiply(w, rounded(x, tokens, w.ic), bias, y, add);
}

void mlp_bytes(const Mlp& m, const float* in, size_t tokens, float* x) {
  static thread_local RoundedRoom hidden_room;
  const Mat& up = *m.up.w;
  const ByteRows rows = rounded(in, tokens, up.ic), hidden = hidden_room.rows(tokens, m.f);
  const auto kernel = kernel_of(up.quant);
  constexpr size_t kStride = 2 * kByteGroup;  // of a token: gates, which become what is rounded, and values
  parallel((m.f + kByteGroup - 1) / kByteGroup, [&](size_t task, size_t thread) {
    const size_t first = task * kByteGroup, n = std::min(kByteGroup, m.f - first);
    float* room = scratch(thread, panel_room(up.ic) + tokens * kStride);
    float *gates = room + panel_room(up.ic), *values = gates + kByteGroup;
    const auto part = [&](size_t start, float* to) {
      const size_t o = start + first;
      kernel(up, rows, m.up.bias, to, kStride, false, o, o + padded(n), room);
    };
    part(m.value, values);
    if (m.gated) part(m.gate, gates);
    for (size_t t = 0; t < tokens; ++t) {
      float *gate = gates + t * kStride, *value = values + t * kStride;
      kernels().act(m.act, m.gated ? gate : value, m.gated ? value : nullptr, n, gate);
    }
    kernels().byte_rows(gates, kStride, 0, tokens, first, first + n, hidden);
  });
  multiply(*m.down.w, hidden, m.down.bias, x, true);
}
