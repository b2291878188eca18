// Upper halves of int8 weights in tiles, one token: a stream of lines and little to compute, so what limits it is
// reading them. x beside a tile's scales is one byte; sums are whole numbers, the same ones at every level.
#include "ahead.h"
#include "weights.h"
#if defined(__AVX512VNNI__)
#include "tiles_vnni.h"
#elif defined(__AVX2__)
#include "tiles_avx2.h"
#else
#include "tiles_plain.h"
#endif

namespace ISA {
namespace {

constexpr size_t kChunk = 4096;  // channels whose bytes are made at once
static_assert(kChunk * 255 * 127 < 1ull << 31, "sums fit 32 bits");
constexpr float kMiddle = 120.f;  // a weight is 16 u + 8 - 128

// Channels that are read whole, 64 outputs from the o-th on.
void add_whole(const TileInput& in, const uint16_t* scales, size_t o, float* out) {
  constexpr size_t kVectors = kPad / kLanes;
  V sums[kVectors];
  for (size_t v = 0; v < kVectors; ++v) sums[v] = load(out + v * kLanes);
  for (size_t i = 0; i < in.whole; ++i) {
    const V x = set1(in.x[i] * bf16_to_f32(scales[in.list[i]]));
    for (size_t v = 0; v < kVectors; ++v) sums[v] = fma(load_u8(in.rows[i] + o + v * kLanes), x, sums[v]);
  }
  for (size_t v = 0; v < kVectors; ++v) store(out + v * kLanes, sums[v]);
}

}  // namespace

float tile_units(const float* x, const float* largest, size_t ic, const Channels& without, float* units) {
  std::memcpy(units, x, ic * sizeof(float));
  std::memset(units + ic, 0, (padded(ic) - ic) * sizeof(float));
  for (size_t i = 0; i < without.count; ++i) units[without.list[i]] = 0.f;
  V most = zero(), finite = zero();
  size_t i = 0;
  for (; i + kLanes <= ic; i += kLanes) {
    const V v = mul(magnitude(load(units + i)), load(largest + i));
    most = max(most, v), finite = fma(v, zero(), finite);  // a NaN where a value is not finite
  }
  float size = top(most), wrong = sum(finite);
  for (; i < ic; ++i) {
    const float v = std::fabs(units[i]) * largest[i];
    size = v > size ? v : size, wrong += v * 0.f;
  }
  const V inverse = set1(size > 1e-30f ? 127.f / size : 0.f);  // below, the quotient may overflow: as good as zero
  for (i = 0; i < padded(ic); i += kLanes) store(units + i, mul(load(units + i), inverse));
  return size / 127.f + wrong;
}

void matvec_tiles(const Tiles& t, const TileInput& in, size_t t0, size_t t1, float* y) {
  alignas(64) uint32_t fours[kChunk / 4];
  alignas(64) float sums[kPad];
  const size_t width = t.width();
  for (size_t i = 0; i < in.whole && t0 < t1; ++i) __builtin_prefetch(in.rows[i] + t0 * kPad, 0, 0);
  for (size_t tile = t0; tile < t1; ++tile) {
    const uint8_t* data = t.data + tile * width * kPad / 2;
    const uint16_t* scales = t.scales + tile * width;
    float* out = y + tile * kPad;
    for (size_t c = 0; c < width; c += kChunk) {
      const size_t n = upto(width - c, kChunk), asked = in.whole * c / width;
      const Soon soon{in.rows + asked, in.whole * (c + n) / width - asked, (tile + 1) * kPad};
      const V offset = set1(kMiddle * static_cast<float>(fold_tile(scales + c, in.units + c, n, fours)));
      sum_tile(data + c * kPad / 2, fours, n / 4, soon, sums);
      for (size_t o = 0; o < kPad; o += kLanes)
        store(out + o, fma(sub(load(sums + o), offset), set1(in.unit), load(out + o)));
    }
    add_whole(in, scales, tile * kPad, out);
  }
}

}  // namespace ISA
