// Values as bits: which are above a bound, in magnitude or on either side of zero.
#include "popcount.h"

namespace ISA {
namespace {

// Up to 64 values as one word a side, bit i for value i.
struct Word {
  uint64_t pos = 0, neg = 0;
};

template <bool kTernary>
inline void add_lanes(V x, V eps, size_t at, Word& w, V& sum) {
  const V size = magnitude(x);
  w.pos |= static_cast<uint64_t>(bits_above(kTernary ? x : size, eps)) << at;
  if (kTernary) w.neg |= static_cast<uint64_t>(bits_above(sub(zero(), x), eps)) << at;
  sum = add(sum, keep_above(size, size, eps));
}

template <bool kTernary>
void pack(const float* x, size_t n, float eps, uint64_t* pos, uint64_t* neg, PackSums* sums) {
  const V bound = set1(eps);
  V sum_of = zero();
  size_t active = 0;
  for (size_t i = 0; i < n; i += 64) {
    Word w;
    const size_t here = n - i < 64 ? n - i : 64;
    size_t at = 0;
    for (; at + kLanes <= here; at += kLanes) add_lanes<kTernary>(load(x + i + at), bound, at, w, sum_of);
    // What is missing is loaded as zero, which is above no bound.
    if (at < here) add_lanes<kTernary>(load_n(x + i + at, here - at), bound, at, w, sum_of);
    pos[i / 64] = w.pos;
    if (kTernary) neg[i / 64] = w.neg;
    active += static_cast<size_t>(__builtin_popcountll(w.pos) + __builtin_popcountll(w.neg));
  }
  sums->active = active;
  sums->magnitude = sum(sum_of);
}

}  // namespace

bool has_popcount(Popcount how) {
  return how == Popcount::vpopcntdq ? RALO_VPOPCNTDQ : how == Popcount::popcnt ? RALO_POPCNT : true;
}

void pack_bits(const float* x, size_t n, float eps, uint64_t* pos, uint64_t* neg, PackSums* sums) {
  if (neg)
    pack<true>(x, n, eps, pos, neg, sums);
  else
    pack<false>(x, n, eps, pos, nullptr, sums);
}

}  // namespace ISA
