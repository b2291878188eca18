// A part of the work is some tiles and, of the channels that are read whole, their weights of the same outputs: nothing
// is left to be added up.
#include "tiles.h"

#include <algorithm>
#include <cstring>

#include "buffer.h"
#include "pool.h"

namespace {

constexpr size_t kFours = 16;  // of a block of channels
constexpr size_t kBlock = 4 * kFours;

// As many for each thread, which takes those of another one that is late.
size_t parts_of(const Tiles& t) {
  constexpr size_t kLeast = 32 << 10, kPart = 64 << 10, kMost = 4;  // bytes worth another thread, and of a part; parts
  if (t.bytes() < kLeast) return 1;
  const size_t each = std::clamp<size_t>(t.bytes() / threads() / kPart, 1, kMost);
  return std::min(each * threads(), t.count());
}

}  // namespace

void tile(const Tiles& t) {
  const Mat& w = *t.whole;
  const size_t width = t.width();
  parallel(t.count(), [&](size_t task, size_t) {
    const size_t o = t.first + task * kPad;
    uint8_t* to = t.data + task * width * kPad / 2;
    for (size_t c = 0; c < width; ++c) {
      const bool here = c < w.ic;
      t.scales[task * width + c] = here ? w.scales[c * w.groups() + o / kGroupInt8] : 0;
      const uint8_t* row = w.data + (here ? c : 0) * w.row_bytes() + o;
      uint8_t* four = to + (c / kBlock * kFours + c % kFours) * 2 * kPad + c % kBlock / kFours;
      for (size_t m = 0; m < 2; ++m)
        for (size_t l = 0; l < 16; ++l) {
          const uint8_t first = row[32 * m + l], second = row[32 * m + 16 + l];
          four[64 * m + 4 * l] = here ? static_cast<uint8_t>(first >> 4 | (second & 0xf0)) : 0;
        }
    }
  });
}

TileInput tile_input(const Tiles& t, const FineChoice& choice, const float* x) {
  static thread_local Buffer<float> units, whole;
  static thread_local Buffer<uint32_t> lists;
  static thread_local Buffer<const uint8_t*> addresses;
  uint32_t* list = lists.get(t.ic);
  const Channels fine{list, choice.fine(list)};
  float *to = units.get(t.width()), *own = whole.get(t.ic);
  const uint8_t** rows = addresses.get(t.ic);
  for (size_t i = 0; i < fine.count; ++i)
    rows[i] = t.whole->data + list[i] * t.whole->row_bytes() + t.first, own[i] = x[list[i]];
  return {to, kernels().tile_units(x, t.largest, t.ic, fine, to), fine.count, list, own, rows};
}

size_t apply_tiles(const Tiles& t, const FineChoice& choice, const float* bias, const float* x, float* y, bool add,
                   size_t& fine) {
  const size_t parts = parts_of(t);
  parallel_runs(parts, [&](size_t part, size_t begun, size_t) {
    static thread_local TileInput in;
    if (begun == part) in = tile_input(t, choice, x);
    const size_t t0 = t.count() * part / parts, t1 = t.count() * (part + 1) / parts, o0 = t0 * kPad, o1 = t1 * kPad;
    if (!add) std::memset(y + o0, 0, (o1 - o0) * sizeof(float));
    for (size_t o = o0; bias && o < o1; ++o) y[o] += bias[o];
    kernels().matvec_tiles(t, in, t0, t1, y);
    if (part == 0) fine = in.whole;
  });
  return t.bytes() + fine * t.whole->part_bytes(t.oc);
}
