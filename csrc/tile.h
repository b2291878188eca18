// The inner tile of every matrix product: C (m, n) += A (m, k) B (k, n), sums in registers. n: a multiple of kLanes.
#pragma once
#include "simd.h"

namespace ISA {

template <size_t M, size_t NV>
inline void tile(const float* a, size_t lda, const float* b, size_t ldb, float* c, size_t ldc, size_t k) {
  V acc[M][NV];
  for (size_t m = 0; m < M; ++m)
    for (size_t v = 0; v < NV; ++v) acc[m][v] = load(c + m * ldc + v * kLanes);
  for (size_t i = 0; i < k; ++i) {
    V row[NV];
    for (size_t v = 0; v < NV; ++v) row[v] = load(b + i * ldb + v * kLanes);
    for (size_t m = 0; m < M; ++m) {
      const V x = set1(a[m * lda + i]);
      for (size_t v = 0; v < NV; ++v) acc[m][v] = fma(x, row[v], acc[m][v]);
    }
  }
  for (size_t m = 0; m < M; ++m)
    for (size_t v = 0; v < NV; ++v) store(c + m * ldc + v * kLanes, acc[m][v]);
}

template <size_t NV>
inline void tile_rows(size_t m, const float* a, size_t lda, const float* b, size_t ldb, float* c, size_t ldc,
                      size_t k) {
  for (; m >= kTileM; m -= kTileM, a += kTileM * lda, c += kTileM * ldc) tile<kTileM, NV>(a, lda, b, ldb, c, ldc, k);
  static_assert(kTileM <= 6, "the remainders below go to 5");
  switch (m) {
    case 5: return tile<5, NV>(a, lda, b, ldb, c, ldc, k);
    case 4: return tile<4, NV>(a, lda, b, ldb, c, ldc, k);
    case 3: return tile<3, NV>(a, lda, b, ldb, c, ldc, k);
    case 2: return tile<2, NV>(a, lda, b, ldb, c, ldc, k);
    case 1: return tile<1, NV>(a, lda, b, ldb, c, ldc, k);
    default: return;
  }
}

inline void product(size_t m, size_t n, size_t k, const float* a, size_t lda, const float* b, size_t ldb, float* c,
                    size_t ldc) {
  size_t j = 0;
  for (; j + kTileV * kLanes <= n; j += kTileV * kLanes) tile_rows<kTileV>(m, a, lda, b + j, ldb, c + j, ldc, k);
  for (; j < n; j += kLanes) tile_rows<1>(m, a, lda, b + j, ldb, c + j, ldc, k);
}

}  // namespace ISA
