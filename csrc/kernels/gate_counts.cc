// Guessing gates by counting bits: x as a few bits a number, weights as signs.
#include "popcount.h"

namespace ISA {
namespace {

constexpr float kLow = -8, kHigh = 7;  // numbers of kGatePlanes bits
static_assert(kGatePlanes == 4, "the bits below are those of a number from -8 to 7");

V numbers(V x, V inverse) { return min(set1(kHigh), max(set1(kLow), round(mul(x, inverse)))); }

V some(const float* x, size_t n) { return n < kLanes ? load_n(x, n) : load(x); }

// What is lost with a step, squared.
float loss(const float* x, size_t d, float step) {
  const V s = set1(step), inverse = set1(1.f / step);
  V lost = zero();
  for (size_t i = 0; i < d; i += kLanes) {
    const V v = some(x + i, d - i), e = sub(v, mul(s, numbers(v, inverse)));
    lost = fma(e, e, lost);
  }
  return sum(lost);
}

// The step that loses least of a few: the first suits a bell curve, wider ones spare outliers.
float best_step(const float* x, size_t d) {
  V squares = zero();
  for (size_t i = 0; i < d; i += kLanes) squares = fma(some(x + i, d - i), some(x + i, d - i), squares);
  float step = 0.335f * std::sqrt(sum(squares) / static_cast<float>(d)), best = step;
  if (!(step > 1e-30f && step < 1e30f)) return step < 1e30f ? 0.f : step;
  float least = loss(x, d, step);
  for (int k = 0; k < 6; ++k) {
    step *= 1.35f;
    const float lost = loss(x, d, step);
    if (lost < least) least = lost, best = step;
  }
  return best;
}

// Bits of kLanes numbers, the lowest first.
void add_planes(V v, size_t at, uint64_t* planes) {
  const V minus = sub(zero(), v);
  planes[3] |= static_cast<uint64_t>(bits_above(minus, set1(0.5f))) << at;
  v = add(v, keep_above(set1(8), minus, set1(0.5f)));
  for (size_t p = 3; p-- > 0;) {
    const V value = set1(static_cast<float>(1 << p)), bound = sub(value, set1(0.5f));
    planes[p] |= static_cast<uint64_t>(bits_above(v, bound)) << at;
    v = sub(v, keep_above(value, v, bound));
  }
}

// What ones are worth together that were counted in each bit of 4-bit numbers in two's complement.
template <class Count>
typename Count::W signed_sum(const typename Count::W* ones) {
  const auto twice = [](typename Count::W w) { return Count::add(w, w); };
  return Count::add(ones[0], twice(Count::add(ones[1], twice(Count::sub(ones[2], twice(ones[3]))))));
}

template <class Count>
void count(const GateCodes& c, const uint64_t* planes, size_t b0, size_t b1, int32_t* counts) {
  using W = typename Count::W;
  const size_t words = c.words();
  for (size_t b = b0; b < b1; ++b, counts += kCodeNeurons) {
    const uint64_t* code = c.bits + b * words * 2 * kCodeNeurons;
    for (size_t i = 0; i < kCodeNeurons; i += Count::kWords) {
      W sums[kGatePlanes];
      for (W& sum : sums) sum = Count::set1(0);
      for (size_t w = 0; w < words; ++w) {
        const W pos = Count::load(code + w * 2 * kCodeNeurons + i);
        const W neg = Count::load(code + (w * 2 + 1) * kCodeNeurons + i);
        for (size_t p = 0; p < kGatePlanes; ++p) {
          const W plane = Count::set1(planes[w * kGatePlanes + p]);
          const W more = Count::count(Count::both(pos, plane)), less = Count::count(Count::both(neg, plane));
          sums[p] = Count::add(sums[p], Count::sub(more, less));
        }
      }
      Count::store(counts + i, signed_sum<Count>(sums));
    }
  }
}

}  // namespace

float gate_planes(const float* x, size_t d, uint64_t* planes) {
  const float step = best_step(x, d);
  const V inverse = set1(step > 0 ? 1.f / step : 0.f);
  for (size_t i = 0; i < d; i += 64, planes += kGatePlanes) {
    for (size_t p = 0; p < kGatePlanes; ++p) planes[p] = 0;
    for (size_t at = 0; at < 64 && i + at < d; at += kLanes)
      add_planes(numbers(some(x + i + at, d - i - at), inverse), at, planes);
  }
  return step;
}

void gate_counts(Popcount how, const GateCodes& c, const uint64_t* planes, size_t b0, size_t b1, int32_t* counts) {
  with_popcount(how, [&](auto way) { count<decltype(way)>(c, planes, b0, b1, counts); });
}

}  // namespace ISA
