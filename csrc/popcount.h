// Ways to count bits. Each is a policy: W holds kWords words of 64 bits, count(W) has a word's number of ones in its
// place. All give the same numbers; which ones a level has depends on what it was compiled for.
#pragma once
#include "kernels.h"
#include "simd.h"

namespace ISA {

// One word at a time; the ways below only count differently.
struct OneWord {
  using W = uint64_t;
  static constexpr size_t kWords = 1;
  static W load(const uint64_t* p) { return *p; }
  static W set1(uint64_t w) { return w; }
  static W both(W a, W b) { return a & b; }
  static W either(W a, W b) { return a ^ b; }  // but not both
  static W add(W a, W b) { return a + b; }
  static W sub(W a, W b) { return a - b; }
  static void store(int32_t* p, W w) { *p = static_cast<int32_t>(w); }  // the low halves
  // kLanes counts, which may be negative, as floats.
  static V numbers(const W* w) {
    float out[kLanes];
    for (size_t i = 0; i < kLanes; ++i) out[i] = static_cast<float>(static_cast<int64_t>(w[i]));
    return ISA::load(out);
  }
};

// Clears the lowest bit until none is left: as many steps as there are ones. Compilers know this loop and would put an
// instruction that counts in its place; what they cannot see through is left as it is.
struct Kernighan : OneWord {
  static W count(W w) {
    W n = 0;
    for (; w; w &= w - 1, ++n) asm("" : "+r"(w));
    return n;
  }
};

#if defined(__POPCNT__) || defined(__aarch64__)
#define RALO_POPCNT 1
struct Popcnt : OneWord {
  static W count(W w) {
#if defined(__POPCNT__)  // written out: left to itself, a compiler may turn it into one of the other ways
    W n;
    asm("popcntq %1, %0" : "=r"(n) : "r"(w) : "cc");
    return n;
#else
    return static_cast<W>(__builtin_popcountll(w));
#endif
  }
};
#else
#define RALO_POPCNT 0
#endif

#if defined(__AVX512BW__)
struct Wide {  // eight words
  using W = __m512i;
  static constexpr size_t kWords = 8;
  static W load(const uint64_t* p) { return _mm512_loadu_si512(p); }
  static W set1(uint64_t w) { return _mm512_set1_epi64(static_cast<long long>(w)); }
  static W both(W a, W b) { return _mm512_and_si512(a, b); }
  static W either(W a, W b) { return _mm512_xor_si512(a, b); }
  static W add(W a, W b) { return _mm512_add_epi64(a, b); }
  static W sub(W a, W b) { return _mm512_sub_epi64(a, b); }
  static void store(int32_t* p, W w) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtepi64_epi32(w)); }
  static V numbers(const W* w) {
    const W low = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
    return _mm512_cvtepi32_ps(_mm512_permutex2var_epi32(w[0], low, w[1]));
  }
};
// The ones of half a byte are looked up, and the bytes of a word summed.
struct Lut : Wide {
  static W count(W w) {
    const W ones = _mm512_broadcast_i32x4(_mm_setr_epi8(0, 1, 1, 2, 1, 2, 2, 3, 1, 2, 2, 3, 2, 3, 3, 4));
    const W low = _mm512_set1_epi8(15);
    const W a = _mm512_shuffle_epi8(ones, _mm512_and_si512(w, low));
    const W b = _mm512_shuffle_epi8(ones, _mm512_and_si512(_mm512_srli_epi16(w, 4), low));
    return _mm512_sad_epu8(_mm512_add_epi8(a, b), _mm512_setzero_si512());
  }
};
#elif defined(__AVX2__)
struct Wide {  // four words
  using W = __m256i;
  static constexpr size_t kWords = 4;
  static W load(const uint64_t* p) { return _mm256_loadu_si256(reinterpret_cast<const W*>(p)); }
  static W set1(uint64_t w) { return _mm256_set1_epi64x(static_cast<long long>(w)); }
  static W both(W a, W b) { return _mm256_and_si256(a, b); }
  static W either(W a, W b) { return _mm256_xor_si256(a, b); }
  static W add(W a, W b) { return _mm256_add_epi64(a, b); }
  static W sub(W a, W b) { return _mm256_sub_epi64(a, b); }
  static void store(int32_t* p, W w) {
    const W even = _mm256_permutevar8x32_epi32(w, _mm256_setr_epi32(0, 2, 4, 6, 0, 2, 4, 6));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm256_castsi256_si128(even));
  }
  static V numbers(const W* w) {
    const __m256 low = _mm256_shuffle_ps(_mm256_castsi256_ps(w[0]), _mm256_castsi256_ps(w[1]), 0x88);
    return _mm256_cvtepi32_ps(_mm256_permute4x64_epi64(_mm256_castps_si256(low), 0xd8));
  }
};
struct Lut : Wide {
  static W count(W w) {
    const W ones = _mm256_broadcastsi128_si256(_mm_setr_epi8(0, 1, 1, 2, 1, 2, 2, 3, 1, 2, 2, 3, 2, 3, 3, 4));
    const W low = _mm256_set1_epi8(15);
    const W a = _mm256_shuffle_epi8(ones, _mm256_and_si256(w, low));
    const W b = _mm256_shuffle_epi8(ones, _mm256_and_si256(_mm256_srli_epi16(w, 4), low));
    return _mm256_sad_epu8(_mm256_add_epi8(a, b), _mm256_setzero_si256());
  }
};
#else
struct Lut : OneWord {
  static W count(W w) {
    constexpr uint64_t kOnes = 0x4332322132212110;  // the ones of 15, 14, ... 0, four bits each
    W n = 0;
    for (; w; w >>= 4) n += kOnes >> (w & 15) * 4 & 15;
    return n;
  }
};
#endif

#if defined(__AVX512VPOPCNTDQ__)
#define RALO_VPOPCNTDQ 1
struct Vpopcntdq : Wide {
  static W count(W w) { return _mm512_popcnt_epi64(w); }
};
#else
#define RALO_VPOPCNTDQ 0
#endif

// Calls f with the policy. Whoever asks for one this level lacks was refused before (has_popcount).
template <class F>
void with_popcount(Popcount how, F&& f) {
  switch (how) {
#if RALO_VPOPCNTDQ
    case Popcount::vpopcntdq: return f(Vpopcntdq());
#endif
#if RALO_POPCNT
    case Popcount::popcnt: return f(Popcnt());
#endif
    case Popcount::kernighan: return f(Kernighan());
    default: return f(Lut());
  }
}

}  // namespace ISA
