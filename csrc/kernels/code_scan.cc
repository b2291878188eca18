// Guessing scores from packed keys by counting bits, and finding the keys that matter by those guesses.
#include <type_traits>

#include "ask.h"
#include "popcount.h"

namespace ISA {
namespace {

// What codes have in common with the planes of a query, by the form of both: counted bits, and what they add up to.
template <size_t P>
struct Signs {  // bits that differ, the planes being those of a number
  static constexpr size_t kPlanes = P;
  template <class Count>
  static auto meet(typename Count::W k, typename Count::W q) {
    return Count::either(k, q);
  }
  template <class Count>
  static auto sum(const typename Count::W* c) {
    auto out = c[P - 1];
    for (size_t p = P - 1; p-- > 0;) out = Count::add(c[p], Count::add(out, out));
    return out;
  }
};
template <size_t P>
struct Bitmaps {  // bits in both; of two planes one is for and one against
  static constexpr size_t kPlanes = P;
  template <class Count>
  static auto meet(typename Count::W k, typename Count::W q) {
    return Count::both(k, q);
  }
  template <class Count>
  static auto sum(const typename Count::W* c) {
    if constexpr (P == 1)
      return c[0];
    else
      return Count::sub(c[0], c[1]);
  }
};

// Of kLanes keys, whose words lie kCodeGroup apart. Words: how many, where that is known beforehand, so that everything
// stays in registers; 0: as many as `words` says.
template <class Count, class Form, size_t Words>
[[gnu::always_inline]] inline V common(const uint64_t* code, const uint64_t* planes, size_t words) {
  constexpr size_t kParts = kLanes / Count::kWords, kPlanes = Form::kPlanes;
  typename Count::W parts[kParts];
  if (Words) words = Words;
#pragma GCC unroll 4
  for (size_t i = 0; i < kParts; ++i) {
    typename Count::W sums[kPlanes];
#pragma GCC unroll 4
    for (size_t w = 0; w < words; ++w) {
      const auto k = Count::load(code + w * kCodeGroup + i * Count::kWords);
      for (size_t p = 0; p < kPlanes; ++p) {
        const auto ones = Count::count(Form::template meet<Count>(k, Count::set1(planes[p * words + w])));
        sums[p] = w == 0 ? ones : Count::add(sums[p], ones);
      }
    }
    parts[i] = Form::template sum<Count>(sums);
  }
  return Count::numbers(parts);
}

constexpr size_t kVectors = kCodeGroup / kLanes;

// Guesses of the scores that query h gives the v-th kLanes keys of a group.
template <class Count, class Form, size_t Words>
[[gnu::always_inline]] inline V guess(const Codes& c, const CodeQuery& q, size_t group, size_t v, size_t h) {
  const V n = common<Count, Form, Words>(c.bits + group * c.words * kCodeGroup + v * kLanes,
                                         q.planes + h * Form::kPlanes * c.words, c.words);
  const V scale = load_bf16(c.scales + group * kCodeGroup + v * kLanes);
  return fma(scale, fma(n, set1(q.factor[h]), set1(q.offset[h])), set1(q.blocks[h * q.stride + group / kCodeStep]));
}

// Codes that are read soon. They lie in order, but the CPU does not read on by itself beyond a page.
constexpr size_t kSoon = 24;  // groups
ASKS void ask_codes(const Codes& c, size_t group) {
  ask(c.bits + (group + kSoon) * c.words * kCodeGroup, c.words * kCodeGroup * sizeof(uint64_t));
  if (group % 2 == 0) ask(c.scales + (group + 2 * kSoon) * kCodeGroup, 1);
}

// Keys of a group before position `from`: a bit each.
uint32_t before(size_t group, size_t from) {
  const size_t first = first_of(group);
  uint32_t bits = 0;
  for (size_t i = 0; i < kCodeGroup; ++i) bits |= static_cast<uint32_t>(first + i * kCodeStep < from) << i;
  return bits;
}

// Adds the keys of a group that a bit in `hit` stands for. Without a branch where the level can: how many there are is
// as good as random.
size_t list_hits(uint32_t hit, size_t group, const float* importance, const CodeHits& hits, size_t count) {
  const size_t first = first_of(group);
#ifdef __AVX512F__
  const __m512i steps = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
  const __m512i at = _mm512_add_epi32(_mm512_slli_epi32(steps, 2), _mm512_set1_epi32(static_cast<int>(first)));
  static_assert(kCodeStep == 4, "positions are shifted by two bits");
  const auto mask = static_cast<__mmask16>(hit);
  _mm512_storeu_si512(hits.at + count, _mm512_maskz_compress_epi32(mask, at));
  _mm512_storeu_ps(hits.importance + count, _mm512_maskz_compress_ps(mask, _mm512_load_ps(importance)));
  return count + static_cast<size_t>(__builtin_popcount(hit));
#else
  for (; hit; hit &= hit - 1, ++count) {
    const auto i = static_cast<size_t>(__builtin_ctz(hit));
    hits.at[count] = static_cast<uint32_t>(first + i * kCodeStep);
    hits.importance[count] = importance[i];
  }
  return count;
#endif
}

template <class Count, class Form, size_t Words>
size_t scan(const Codes& c, const CodeQuery& q, float bound, size_t from, size_t b0, size_t b1, const CodeHits& hits) {
  const V least = set1(std::nextafter(bound, -INFINITY));  // what is above it is at least the bound
  size_t count = 0;
  for (size_t group = b0 * kCodeStep; group < b1 * kCodeStep; ++group) {
    alignas(64) float importance[kCodeGroup];
    uint32_t hit = 0;
    ask_codes(c, group);
    for (size_t v = 0; v < kVectors; ++v) {
      V best = guess<Count, Form, Words>(c, q, group, v, 0);
      for (size_t h = 1; h < q.g; ++h) best = max(guess<Count, Form, Words>(c, q, group, v, h), best);
      store(importance + v * kLanes, best);
      hit |= bits_above(best, least) << (v * kLanes);
    }
    if (group / kCodeStep * kCodeKeys < from) hit &= ~before(group, from);
    count = list_hits(hit, group, importance, hits, count);
  }
  return count;
}

template <size_t N>
using Number = std::integral_constant<size_t, N>;

// f(Form) for what codes are.
template <class F>
void with_form(const CodeForm& form, F&& f) {
  if (form.code == Code::overlap) return f(Bitmaps<1>());
  if (form.code != Code::signs) return f(Bitmaps<2>());
  switch (form.bits) {
    case 1: return f(Signs<1>());
    case 2: return f(Signs<2>());
    case 3: return f(Signs<3>());
    default: return f(Signs<kMostPlanes>());
  }
}

// f(Count, Form, Words) for how bits are counted, what codes are, and words a key.
template <class F>
void with_shape(Popcount how, const CodeForm& form, size_t words, F&& f) {
  with_popcount(how, [&](auto count) {
    with_form(form, [&](auto of) {
      words == 1 ? f(count, of, Number<1>()) : words == 2 ? f(count, of, Number<2>()) : f(count, of, Number<0>());
    });
  });
}

}  // namespace

void code_guess(Popcount how, const Codes& c, const CodeQuery& q, size_t group, float* out, size_t stride) {
  with_shape(how, q.form, c.words, [&](auto count, auto form, auto words) {
    for (size_t h = 0; h < q.g; ++h)
      for (size_t v = 0; v < kVectors; ++v)
        store(out + h * stride + v * kLanes, guess<decltype(count), decltype(form), words()>(c, q, group, v, h));
  });
}

size_t code_scan(Popcount how, const Codes& c, const CodeQuery& q, float bound, size_t from, size_t b0, size_t b1,
                 const CodeHits& hits) {
  size_t found = 0;
  with_shape(how, q.form, c.words, [&](auto count, auto form, auto words) {
    found = scan<decltype(count), decltype(form), words()>(c, q, bound, from, b0, b1, hits);
  });
  return found;
}

float log_mass(const float* s, size_t n) {
  V most = set1(-INFINITY), total = zero();
  float rest[kLanes];
  for (size_t i = 0; i < kLanes; ++i) rest[i] = i < n % kLanes ? s[n / kLanes * kLanes + i] : -INFINITY;
  for (size_t i = 0; i + kLanes <= n; i += kLanes) most = max(load(s + i), most);
  const float high = top(max(load(rest), most));
  if (high == -INFINITY) return high;
  for (size_t i = 0; i + kLanes <= n; i += kLanes) total = add(total, exp(sub(load(s + i), set1(high))));
  return high + std::log(sum(add(total, exp(sub(load(rest), set1(high))))));
}

}  // namespace ISA
