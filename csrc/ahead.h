// Prefetching for the kernels that wait for memory.
#pragma once
#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "kernels.h"

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

// Rows of which the line at `at` is asked for while something else is read.
struct Soon {
  const uint8_t* const* row;
  size_t rows, at;
};

// Where in a list the first channel lies that is not before `channel`.
inline size_t first_from(const Channels& c, size_t channel) {
  size_t at = 0;
  for (size_t left = c.count; left > 0;) {
    const size_t half = left / 2, next = at + half;
    const bool before = c.list[next] < channel;
    at = before ? next + 1 : at, left = before ? left - half - 1 : half;
  }
  return at;
}

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
  // Pair after pair, `at` bytes into each row. Steps are hidden from the compiler, which would else keep how far every
  // row lies from the first: more than it has registers.
  struct Walk {
    const uint8_t* row;
    size_t stride;
    Walk(const RowsAt& rows, size_t at) : row(rows.base + at), stride(rows.stride) {}
    const uint8_t* operator[](size_t r) const { return row + r * stride; }
    void go_on() {
      row += 2 * stride;
      asm("" : "+r"(row));
    }
  };
};
// Rows that lie anywhere, pair after pair. Where their addresses are is hidden from the compiler, which would keep all
// of them in registers, of which there are too few, and so in vector registers.
struct WalkOfAddresses {
  const uint8_t* const* row;
  size_t at;
  WalkOfAddresses(const uint8_t* const* row_, size_t at_) : row(row_), at(at_) { asm("" : "+r"(row)); }
  const uint8_t* operator[](size_t r) const { return row[r] + at; }
  void go_on() { row += 2; }
};
template <size_t N>
struct RowsAt<Listed, N> {
  const uint8_t* row[N];
  RowsAt(const uint8_t* data, size_t stride, size_t first, Listed pick, size_t i, size_t n) {
    for (size_t r = 0; r < n; ++r) row[r] = data + pick(i + r) * stride + first;
    if (n % 2 != 0 && n < N) row[n] = row[n - 1];  // whole pairs; what it is multiplied by is zero
  }
  const uint8_t* operator[](size_t r) const { return row[r]; }
  struct Walk : WalkOfAddresses {
    Walk(const RowsAt& rows, size_t at) : WalkOfAddresses(rows.row, at) {}
  };
};

// Rows in the order they are read: up to the end-th channel's, and then those from the then-th on of `count` in all. N
// side by side at any place in that order, up to kFarthest after those that are read. Where the order ends they may be
// none of the matrix: they are only asked for.
constexpr size_t kFarthest = 128;
template <class Pick, size_t N>
class InOrder;
template <size_t N>
class InOrder<All, N> {
 public:
  using Rows = RowsAt<All, N>;
  InOrder(const void* data, size_t stride, All, size_t end, size_t then, size_t)
      : data_(static_cast<const uint8_t*>(data)), stride_(stride), end_(end), then_(then) {}
  void find(size_t, size_t) {}
  Rows at(size_t i, size_t first) const {
    return Rows(data_, stride_, first, All(), i < end_ ? i : then_ + (i - end_), N);
  }

 private:
  const uint8_t* data_;
  size_t stride_, end_, then_;
};
// Of a list they are found for many channels at once: for each by itself it takes as long as some of the products.
struct FoundRows {
  const uint8_t* const* row;
  size_t first;
  const uint8_t* operator[](size_t r) const { return row[r] + first; }
  struct Walk : WalkOfAddresses {
    Walk(const FoundRows& rows, size_t at) : WalkOfAddresses(rows.row, rows.first + at) {}
  };
};
template <size_t N>
class InOrder<Listed, N> {
 public:
  using Rows = FoundRows;
  InOrder(const void* data, size_t stride, Listed pick, size_t end, size_t then, size_t count)
      : data_(static_cast<const uint8_t*>(data)),
        stride_(stride),
        list_(pick.list),
        end_(end),
        then_(then),
        count_(count) {}
  // Before at(i) for i in [from, from + n) and up to kFarthest after those: n <= kMost.
  void find(size_t from, size_t n) {
    n += kFarthest + N;
    const size_t here = upto(end_ - from, n), later = upto(count_ > then_ ? count_ - then_ : 0, n - here);
    for (size_t j = 0; j < here; ++j) row_[j] = data_ + list_[from + j] * stride_;
    for (size_t j = 0; j < later; ++j) row_[here + j] = data_ + list_[then_ + j] * stride_;
    for (size_t j = here + later; j < n; ++j) row_[j] = row_[j - 1];
    from_ = from;
  }
  Rows at(size_t i, size_t first) const { return {row_ + (i - from_), first}; }

 private:
  static constexpr size_t kMost = 256;
  const uint8_t* data_;
  size_t stride_;
  const uint32_t* list_;
  size_t end_, then_, count_, from_ = 0;
  const uint8_t* row_[kMost + kFarthest + N];
};

// Bytes of rows that follow each other which are asked for beyond the next ones.
inline size_t lead_bytes() { return near_rows ? 8 << 10 : 32 << 10; }

// Of rows that are read `together` and asked for column by column, `lead` bytes and more before they are read: how many
// rows ahead. Short ones by several passes.
inline size_t rows_apart(size_t together, size_t row_bytes, size_t lead) {
  const size_t pass = together * row_bytes;
  return upto(together * ((lead + pass - 1) / pass), kFarthest);
}

// Bytes by which rows of a list are asked for ahead; as many at its beginning nobody has asked for. And scales: much
// further and they are thrown out again before they are read.
constexpr size_t kListLead = 8 << 10, kScalesLead = 4 << 10;

// Brings rows that are read next into the cache, line by line in the order they lie in memory: while some are read, the
// following ones arrive. The CPU drops prefetches that come too fast, so as many are asked for as are read, and a head
// start is made where something else is computed.
template <class Pick>
class Ahead {
 public:
  Ahead(const void* data, size_t stride, size_t first, size_t width, Pick pick, size_t i)
      : base_(static_cast<const uint8_t*>(data) + first),
        stride_(stride),
        width_(width),
        pick_(pick),
        i_(i),
        limit_(i) {}
  // Rows before `next` are read now: too late for them. Those up to `limit` may be asked for.
  void move(size_t next, size_t limit) {
    limit_ = limit;
    if (whole()) {
      const uint8_t *from = base_ + next * stride_, *end = base_ + limit * stride_;
      if (row_ < from) row_ = from;
      left_ = row_ < end ? lines(static_cast<size_t>(end - row_)) : 0;
    } else if (i_ < next || left_ == 0) {
      if (i_ < next) i_ = next;
      open();
    }
  }
  void fetch(size_t lines) {
    while (lines > 0 && left_ > 0) {
      const size_t n = upto(lines, left_);
      if (near_rows)
        for (size_t l = 0; l < n; ++l) __builtin_prefetch(row_ + 64 * l, 0, 3);
      else
        for (size_t l = 0; l < n; ++l) __builtin_prefetch(row_ + 64 * l, 0, 2);
      row_ += 64 * n, left_ -= n, lines -= n;
      if (left_ == 0 && !whole()) ++i_, open();
    }
  }
  // The run of lines that is being asked for, which may be gone on with elsewhere.
  struct Run {
    const uint8_t* at;
    size_t left;
  };
  Run run() const { return {row_, left_}; }
  void go_on(const Run& run) { row_ = run.at, left_ = run.left; }

 private:
  // Whether nothing lies between the rows: they are one run of lines. Else each is.
  bool whole() const { return std::is_same_v<Pick, All> && width_ == stride_; }
  static size_t lines(size_t bytes) { return (bytes + 63) / 64; }
  void open() {
    left_ = i_ < limit_ ? lines(width_) : 0;
    if (left_ > 0) row_ = base_ + pick_(i_) * stride_;
  }
  const uint8_t* base_;
  size_t stride_, width_;
  Pick pick_;
  size_t i_, limit_;              // rows of the channels [i, limit) are still to come
  const uint8_t* row_ = nullptr;  // where the run that is being asked for goes on
  size_t left_ = 0;               // lines of it
};

}  // namespace ISA
