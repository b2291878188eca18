// Prefetching for the kernels that wait for memory.
#pragma once
#include <cstddef>
#include <cstdint>

namespace ISA {

constexpr size_t upto(size_t n, size_t most) { return n < most ? n : most; }

// Which input channel is the i-th: every one, or those of a list.
struct All {
  size_t operator()(size_t i) const { return i; }
};
struct Listed {
  const uint32_t* list;
  size_t operator()(size_t i) const { return list[i]; }
};

// Rows of N channels from the i-th on, `first` bytes into each.
template <class Pick, size_t N>
struct RowsAt;
template <size_t N>
struct RowsAt<All, N> {
  const uint8_t* base;
  size_t stride;
  RowsAt(const uint8_t* data, size_t stride_, size_t first, All, size_t i, size_t)
      : base(data + i * stride_ + first), stride(stride_) {}
  const uint8_t* operator[](size_t r) const { return base + r * stride; }
};
template <size_t N>
struct RowsAt<Listed, N> {
  const uint8_t* row[N];
  RowsAt(const uint8_t* data, size_t stride, size_t first, Listed pick, size_t i, size_t n) {
    for (size_t r = 0; r < n; ++r) row[r] = data + pick(i + r) * stride + first;
  }
  const uint8_t* operator[](size_t r) const { return row[r]; }
};

// Brings rows that are read next into the second-level cache, line by line in the order they lie in memory: while some
// are read, the following ones arrive. The CPU drops prefetches that come too fast, so as many are asked for as are
// read, and a head start is made where something else is computed.
template <class Pick>
struct Ahead {
  const uint8_t* base;
  size_t stride, width;
  Pick pick;
  size_t i, limit, at = 0;  // rows of the channels [i, limit) are still to come
  const uint8_t* row = nullptr;
  Ahead(const void* data, size_t stride_, size_t first, size_t width_, Pick pick_, size_t i_)
      : base(static_cast<const uint8_t*>(data) + first),
        stride(stride_),
        width(width_),
        pick(pick_),
        i(i_),
        limit(i_) {}
  // Rows before `next` are read now: too late for them. Those up to `limit` may be asked for.
  void move(size_t next, size_t limit_) {
    if (i < next) i = next, at = 0;
    limit = limit_;
    if (i < limit) row = base + pick(i) * stride;
  }
  void fetch(size_t lines) {
    for (; lines > 0 && i < limit; --lines) {
      __builtin_prefetch(row + at, 0, 2);
      at += 64;
      if (at < width) continue;
      at = 0;
      if (++i < limit) row = base + pick(i) * stride;
    }
  }
};

}  // namespace ISA
