// Sums of a tile, nibble by nibble.
#pragma once
#include "simd.h"

namespace ISA {

// n channels, whole blocks of 64, beside their scales as bytes in the order of a tile; their sum.
inline int32_t fold_tile(const uint16_t* scales, const float* units, size_t n, uint32_t* fours) {
  int32_t sum = 0;
  std::memset(fours, 0, n);
  for (size_t i = 0; i < n; ++i) {
    const int32_t x = static_cast<int32_t>(std::nearbyint(units[i] * bf16_to_f32(scales[i])));
    fours[i / 64 * 16 + i % 16] |= (static_cast<uint32_t>(x) & 255) << i % 64 / 16 * 8;
    sum += x;
  }
  return sum;
}

// Nibbles of `count` fours of channels times their bytes, sixteenfold: of 64 outputs. count: a multiple of 16.
inline void sum_tile(const uint8_t* data, const uint32_t* fours, size_t count, const Soon&, float* sums) {
  int32_t all[64] = {0};
  for (size_t q = 0; q < count; ++q)
    for (size_t m = 0; m < 2; ++m, data += 64)
      for (size_t l = 0; l < 16; ++l)
        for (size_t j = 0; j < 4; ++j) {
          const int32_t x = static_cast<int8_t>(fours[q] >> 8 * j), byte = data[4 * l + j];
          all[32 * m + l] += (byte & 15) * 16 * x;
          all[32 * m + 16 + l] += (byte & 0xf0) * x;
        }
  for (size_t i = 0; i < 64; ++i) sums[i] = static_cast<float>(all[i]);
}

}  // namespace ISA
