// The search for one channel's seeds: its chains are searched side by side, then every column's scale is fitted.
#include "proc.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>

#include "buffer.h"
#include "pool.h"

namespace {

constexpr size_t kSeeds = 256;
constexpr float kOutside = 3.5f;  // of a column's spread: weights beyond do not count for it
constexpr float kReach = 160.f;   // in units of the tables; what is further off than they reach is all the same to them

uint16_t to_bf16(float f) {  // to nearest, ties to even
  uint32_t u;
  std::memcpy(&u, &f, 4);
  return static_cast<uint16_t>((u + 0x7fff + ((u >> 16) & 1)) >> 16);
}
float from_bf16(uint16_t h) {
  const uint32_t u = static_cast<uint32_t>(h) << 16;
  float f;
  std::memcpy(&f, &u, 4);
  return f;
}

// Chain r goes through lane r of every column, then through the lane kTurn before it, and so on, back to its beginning.
size_t lane(size_t r, size_t round) { return (r + (kPad / kTurn - round) * kTurn) % kPad; }

// The factor of whole numbers q that is nearest to w, in double precision and so the same everywhere. Weights beyond
// the bound do not count.
float fitted(const float* w, const float* q, size_t n, float bound) {
  double wq = 0, qq = 0;
  for (size_t i = 0; i < n; ++i)
    if (std::fabs(w[i]) <= bound) wq += static_cast<double>(w[i]) * q[i], qq += static_cast<double>(q[i]) * q[i];
  return qq > 0 ? static_cast<float>(wq / qq) : 0.f;
}

// Root mean square without the few weights that stick out: what the tables cannot reach would only widen the rest.
float spread_of(const float* w, size_t n) {
  double bound = INFINITY, spread = 0;
  for (int turn = 0; turn < 2; ++turn, bound = kOutside * spread) {
    double square = 0, count = 0;
    for (size_t i = 0; i < n; ++i)
      if (std::fabs(w[i]) <= bound) square += static_cast<double>(w[i]) * w[i], ++count;
    spread = count > 0 ? std::sqrt(square / count) : 0;
  }
  return static_cast<float>(spread);
}

}  // namespace

SeedTables::SeedTables(const int8_t* tables)
    : now(kMostBlocks * kMostBlocks * kSeeds), before(now.size()), energy(kMostBlocks * kSeeds) {
  for (size_t n = 0; n < kMostBlocks; ++n)
    for (size_t j = 0; j <= n; ++j)
      for (size_t c = 0; c < kSeeds; ++c) {
        const int8_t* t = tables + (n * kMostBlocks + j) * 4 * kTable;
        const size_t at = (n * kMostBlocks + j) * kSeeds + c;
        now[at] = static_cast<float>(t[c & 15] + t[kTable + (c >> 4)]);
        before[at] = static_cast<float>(t[2 * kTable + (c & 15)] + t[3 * kTable + (c >> 4)]);
        energy[n * kSeeds + c] += now[at] * now[at];
      }
}

void search_seeds(const SeedTables& t, const int8_t* tables, float sigma, size_t columns, size_t oc, const float* w,
                  uint8_t* seeds, uint16_t* scales, float* out) {
  const Columns geometry(columns, oc);
  const size_t rounds = kPad / kTurn, steps = rounds * columns, chain = rounds * oc / kPad;
  static thread_local Buffer<float> inverses, targets;
  static thread_local Buffer<uint8_t> sizes, found, back;
  float* inverse = inverses.get(columns);
  for (size_t k = 0; k < columns; ++k) {
    const size_t n = geometry.blocks(k) * kPad;
    const float* from = w + geometry.first(k) * kPad;
    const float spread = spread_of(from, n);
    inverse[k] = spread > 1e-30f ? sigma / spread : 0.f;
  }
  uint8_t* blocks = sizes.get(steps);
  for (size_t s = 0; s < steps; ++s) blocks[s] = static_cast<uint8_t>(geometry.blocks(s % columns));
  float* x = targets.get(kTurn * chain);
  uint8_t* path = found.get(kTurn * steps);
  uint8_t* scratch = back.get(threads() * steps * kSeeds);
  parallel(kTurn, [&](size_t r, size_t thread) {
    float* to = x + r * chain;
    for (size_t round = 0; round < rounds; ++round)
      for (size_t b = 0; b < oc / kPad; ++b)
        *to++ = std::clamp(w[b * kPad + lane(r, round)] * inverse[geometry.of(b)], -kReach, kReach);
    kernels().proc_search(t.codes(), x + r * chain, blocks, steps, path + r * steps, scratch + thread * steps * kSeeds);
    for (size_t round = 0; round < rounds; ++round)
      for (size_t k = 0; k < columns; ++k) seeds[k * kPad + lane(r, round)] = path[r * steps + round * columns + k];
  });
  const uint16_t one = to_bf16(1.f);
  std::fill(scales, scales + columns, one);
  const Proc proc{columns, tables, nullptr, nullptr, nullptr};
  const Mat row{Quant::proc, seeds, scales, 1, oc, &proc};
  for (size_t b = 0; b < oc / kPad; ++b) kernels().proc_unpack(row, 0, b * kPad, out + b * kPad);
  for (size_t k = 0; k < columns; ++k) {
    const size_t at = geometry.first(k) * kPad, n = geometry.blocks(k) * kPad;
    scales[k] = to_bf16(inverse[k] > 0 ? fitted(w + at, out + at, n, kOutside * sigma / inverse[k]) : 0.f);
    for (size_t i = 0; i < n; ++i) out[at + i] *= from_bf16(scales[k]);
  }
}

uint64_t digest(const Mat& w) {
  constexpr size_t kChannels = 16;
  std::atomic<uint64_t> sum{0};
  parallel((w.ic + kChannels - 1) / kChannels, [&](size_t task, size_t) {
    sum += kernels().proc_digest(w, task * kChannels, std::min((task + 1) * kChannels, w.ic));
  });
  return sum;
}

void unpack(const Mat& w, float* out) {
  parallel(w.ic, [&](size_t i, size_t) {
    for (size_t o = 0; o < w.oc; o += kPad) kernels().proc_unpack(w, i, o, out + i * w.oc + o);
  });
}
