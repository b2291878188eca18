// The inner product of bytes with AMX: sixteen tokens, sixteen outputs and 64 channels an instruction. The sums are
// the integers that VNNI gives (byte_tiles.h), and so the same bits.
#pragma once
#include "panel_bytes.h"

namespace ISA {
#ifdef __AMX_INT8__

constexpr size_t kTileRows = 16, kTileBytes = 64;
static_assert(kVectors == 4 && kByteGroup == 2 * kTileBytes && kTogether % kTileRows == 0, "what is written out below");

// How large a thread's tiles are. In assembly: GCC 12 takes the intrinsics for ones that know eight bytes of it, and
// leaves out what is written of the others.
struct alignas(64) Shape {
  uint8_t palette = 0, start = 0, unused[14] = {0};  // palette 0: there are no tiles
  uint16_t row_bytes[16] = {0};
  uint8_t rows[16] = {0};
  void load() const { asm volatile("ldtilecfg %0" : : "m"(*this)); }
  void store() { asm volatile("sttilecfg %0" : "=m"(*this)); }
};

// While it lives the thread has tiles 0 to 3 for sums and 4, 5 for x, with a row a token, and 6, 7 for weights. Then it
// has what it had before: others in the process may have shaped theirs once and for all.
class Tiles {
 public:
  Tiles() {
    before_.store();
    rows(kTileRows);
  }
  ~Tiles() { before_.load(); }
  Tiles(const Tiles&) = delete;
  Tiles& operator=(const Tiles&) = delete;
  void rows(size_t tokens) const {
    Shape shape;
    shape.palette = 1;
    for (size_t t = 0; t < 8; ++t) {
      shape.row_bytes[t] = kTileBytes;
      shape.rows[t] = static_cast<uint8_t>(t < 6 ? tokens : kTileRows);
    }
    shape.load();
  }

 private:
  Shape before_;
};

using Sums = int32_t[kVectors][kTileRows][kLanes];

// One group, as many tokens as tiles have rows. beside(i): what the CPU does while the i-th of eight products is made.
template <class Beside>
INLINE inline void dot_group(const uint8_t* w, const int8_t* x, Sums& sums, Beside&& beside) {
  constexpr size_t kRow = kStep * kPad, kHalf = kTileRows * kRow;  // of the weights: a row of a tile; 64 channels
  _tile_loadd(4, x, kByteGroup);
  _tile_loadd(5, x + kTileBytes, kByteGroup);
#define OUTPUTS(v)                          \
  _tile_zero(v);                            \
  _tile_loadd(6, w + 64 * v, kRow);         \
  _tile_dpbssd(v, 4, 6);                    \
  beside(2 * v);                            \
  _tile_loadd(7, w + kHalf + 64 * v, kRow); \
  _tile_dpbssd(v, 5, 7);                    \
  beside(2 * v + 1);
  OUTPUTS(0)
  OUTPUTS(1)
  _tile_stored(0, sums[0], 64);
  OUTPUTS(2)
  _tile_stored(1, sums[1], 64);
  OUTPUTS(3)
  _tile_stored(2, sums[2], 64);
  _tile_stored(3, sums[3], 64);
#undef OUTPUTS
  asm volatile("" : : : "memory");  // tiles are written past the compiler's eyes
}

// What sums of a group become, a token after another: they are added to a row of `from`, into a row of `to`.
struct Finish {
  const float *scale, *x_scale, *from;
  float* to;
  size_t from_stride, to_stride;
  INLINE void token(const Sums& sums, size_t m) {
    const V unit = set1(*x_scale++);
    each<kVectors>([&](auto v) INLINE {
      const V factor = mul(load(scale + v * kLanes), unit), sum = _mm512_cvtepi32_ps(_mm512_load_si512(sums[v][m]));
      store(to + v * kLanes, fma(sum, factor, load(from + v * kLanes)));
    });
    from += from_stride, to += to_stride;
  }
};

// While the tiles of some tokens are multiplied the sums of those before become floats, two beside each product.
inline void multiply(const Tiles& tiles, const PanelSums& p) {
  alignas(64) float y[kTogether][kPad];
  alignas(64) Sums sums[2];
  const size_t groups = p.groups();
  size_t done = 0, left = 0;  // units of up to 16 tokens; tokens of the last one
  Finish last{};
  for (size_t g = 0; g < groups; ++g)
    for (size_t m = 0; m < p.n; m += left, ++done) {
      Sums &now = sums[done % 2], &before = sums[1 - done % 2];
      const size_t n = p.n - m < kTileRows ? p.n - m : kTileRows;
      const int8_t* x = p.values(g) + m * kByteGroup;
      if (n != kTileRows) tiles.rows(n);
      if (left == kTileRows) {
        dot_group(p.panel[g].w, x, now,
                  [&](size_t i) INLINE { last.token(before, 2 * i), last.token(before, 2 * i + 1); });
      } else {
        for (size_t i = 0; i < left; ++i) last.token(before, i);
        dot_group(p.panel[g].w, x, now, [](size_t) INLINE {});
      }
      if (n != kTileRows) tiles.rows(kTileRows);
      const bool first = g == 0, end = g + 1 == groups;
      last = {p.panel[g].scale, p.scales(g) + m,      first ? p.start : y[m], end ? p.to + m * p.stride : y[m],
              first ? 0 : kPad, end ? p.stride : kPad};
      left = n;
    }
  for (size_t i = 0; i < left; ++i) last.token(sums[1 - done % 2], i);
}

#endif
}  // namespace ISA
