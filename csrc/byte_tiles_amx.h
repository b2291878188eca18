// The inner product of bytes with AMX: sixteen tokens, sixteen outputs and 64 channels an instruction. The sums are
// the integers that VNNI gives (byte_tiles.h), and so the same bits.
#pragma once
#include "panel_bytes.h"

namespace ISA {
#ifdef __AMX_INT8__

constexpr size_t kTileRows = 16, kTileBytes = 64;
static_assert(kVectors == 4 && kByteGroup == 2 * kTileBytes && kDepthGroups == 2, "what is written out below");

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

// One group, as many tokens as tiles have rows.
inline void dot_group(const uint8_t* w, const int8_t* x, Sums& sums) {
  constexpr size_t kRow = kStep * kPad, kHalf = kTileRows * kRow;  // of the weights: a row of a tile; 64 channels
  _tile_loadd(4, x, kByteDepth);
  _tile_loadd(5, x + kTileBytes, kByteDepth);
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  _tile_loadd(6, w, kRow);
  _tile_loadd(7, w + 64, kRow);
  _tile_dpbssd(0, 4, 6);
  _tile_dpbssd(1, 4, 7);
  _tile_loadd(6, w + 128, kRow);
  _tile_loadd(7, w + 192, kRow);
  _tile_dpbssd(2, 4, 6);
  _tile_dpbssd(3, 4, 7);
  _tile_loadd(6, w + kHalf, kRow);
  _tile_loadd(7, w + kHalf + 64, kRow);
  _tile_dpbssd(0, 5, 6);
  _tile_dpbssd(1, 5, 7);
  _tile_loadd(6, w + kHalf + 128, kRow);
  _tile_loadd(7, w + kHalf + 192, kRow);
  _tile_dpbssd(2, 5, 6);
  _tile_dpbssd(3, 5, 7);
  _tile_stored(0, sums[0], 64);
  _tile_stored(1, sums[1], 64);
  _tile_stored(2, sums[2], 64);
  _tile_stored(3, sums[3], 64);
}

// n tokens from token t on, the block's groups: onto their sums y.
template <size_t G>
void tile_groups(const PanelBytes& p, const ByteRows& x, size_t block, size_t t, size_t n, float* y) {
  alignas(64) Sums sums[G];
  const int8_t* values = x.values + (block * x.tokens + t) * kByteDepth;
  const float* x_scales = x.scales + block * kDepthGroups * x.tokens + t;
  each<G>([&](auto g) INLINE { dot_group(p.w[g], values + g * kByteGroup, sums[g]); });
  asm volatile("" : : : "memory");  // tiles are written past the compiler's eyes
  V scale[G][kVectors];
  each<G * kVectors>(
      [&](auto i) INLINE { scale[i / kVectors][i % kVectors] = load(p.scale[i / kVectors] + i % kVectors * kLanes); });
  for (size_t m = 0; m < n; ++m)
    each<kVectors>([&](auto v) INLINE {
      float* to = y + m * kPad + v * kLanes;
      V sum = load(to);
      each<G>([&](auto g) INLINE {
        const V factor = mul(scale[g][v], set1(x_scales[g * x.tokens + m]));
        sum = fma(_mm512_cvtepi32_ps(_mm512_load_si512(sums[g][v][m])), factor, sum);
      });
      store(to, sum);
    });
}

// y (tokens, kPad) += x's block times the panel's.
inline void multiply(const Tiles& tiles, const PanelBytes& p, size_t groups, const ByteRows& x, size_t block,
                     float* y) {
  const auto product = groups == kDepthGroups ? tile_groups<kDepthGroups> : tile_groups<1>;
  size_t t = 0;
  for (; t + kTileRows <= x.tokens; t += kTileRows) product(p, x, block, t, kTileRows, y + t * kPad);
  if (t == x.tokens) return;
  tiles.rows(x.tokens - t);
  product(p, x, block, t, x.tokens - t, y + t * kPad);
  tiles.rows(kTileRows);
}

#endif
}  // namespace ISA
