// Prefetching for the kernels that wait for memory.
#pragma once
#include <cstddef>
#include <cstdint>

namespace ISA {

inline size_t upto(size_t n, size_t most) { return n < most ? n : most; }

// Brings rows that are read next into the second-level cache, line by line in the order they lie in memory: while some
// are read, the following ones arrive. The CPU drops prefetches that come too fast, so as many are asked for as are
// read, and a head start is made where something else is computed.
struct Ahead {
  const uint8_t* row;
  size_t stride, width, c, limit, at = 0;  // rows [c, limit) are still to come
  Ahead(const void* base, size_t stride_, size_t first, size_t width_, size_t c_)
      : row(static_cast<const uint8_t*>(base) + c_ * stride_ + first),
        stride(stride_),
        width(width_),
        c(c_),
        limit(c_) {}
  void skip_to(size_t next) {  // rows before it are read now: too late for them
    if (c < next) row += (next - c) * stride, c = next, at = 0;
  }
  void fetch(size_t lines) {
    for (; lines > 0 && c < limit; --lines) {
      __builtin_prefetch(row + at, 0, 2);
      at += 64;
      if (at >= width) at = 0, row += stride, ++c;
    }
  }
};

}  // namespace ISA
