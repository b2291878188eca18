// Seeds: found by a search, turned back into weights, and a number that stands for what they give. The same bits at
// every ISA level.
#include "weights.h"

namespace ISA {
namespace {

constexpr size_t kSeeds = 256, kAlike = 64;  // seeds before that differ in their two highest bits only add the same

inline uint32_t bits_of(float f) {
  uint32_t u;
  std::memcpy(&u, &f, 4);
  return u;
}
inline float float_of(uint32_t u) {
  float f;
  std::memcpy(&f, &u, 4);
  return f;
}

// One step of the search: of all seeds c the least cost of a chain that ends with it, and the seed p before it, from
// the costs of chains that end with p. Of N weights x the error is |x - before[p]|^2 - 2 now[c] (x - before[p]) +
// |now[c]|^2. p goes into the lowest bits of a cost, where it hardly moves it, so that the least cost brings its p
// along.
template <size_t N>
void step(const SeedCodes& codes, const float* x, float* cost, uint8_t* from) {
  constexpr size_t kWide = N <= 2 ? 4 : 2;  // vectors of seeds at a time: what is known of them stays in registers
  const float *now = codes.now + (N - 1) * kMostBlocks * kSeeds,
              *before = codes.before + (N - 1) * kMostBlocks * kSeeds;
  float known[kAlike][N + 2];  // of seeds before that add the same the cheapest: cost so far, tag, -2 (x - before)
  size_t live = 0;
  for (size_t same = 0; same < kAlike; ++same) {
    size_t p = same;
    for (size_t other = same + kAlike; other < kSeeds; other += kAlike) p = cost[other] < cost[p] ? other : p;
    if (!(cost[p] < INFINITY)) continue;
    float* k = known[live++];
    k[0] = cost[p], k[1] = float_of(static_cast<uint32_t>(p));
    for (size_t j = 0; j < N; ++j) {
      const float off = x[j] - before[j * kSeeds + p];
      k[0] = k[0] + off * off;
      k[2 + j] = -2.f * off;
    }
  }
  float best[kSeeds];
  for (size_t c = 0; c < kSeeds; c += kWide * kLanes) {
    V weights[N][kWide], least[kWide];
    for (size_t w = 0; w < kWide; ++w) {
      least[w] = set1(INFINITY);
      for (size_t j = 0; j < N; ++j) weights[j][w] = load(now + j * kSeeds + c + w * kLanes);
    }
    for (size_t i = 0; i < live; ++i) {
      const V start = set1(known[i][0]), tag = set1(known[i][1]);
      for (size_t w = 0; w < kWide; ++w) {
        V v = start;
        for (size_t j = 0; j < N; ++j) v = add(v, mul(set1(known[i][2 + j]), weights[j][w]));
        least[w] = min(least[w], with_tag(v, tag));
      }
    }
    for (size_t w = 0; w < kWide; ++w) store(best + c + w * kLanes, least[w]);
  }
  float lowest = INFINITY;
  for (size_t c = 0; c < kSeeds; ++c) {
    from[c] = static_cast<uint8_t>(bits_of(best[c]));
    cost[c] = float_of(bits_of(best[c]) & ~255u) + codes.energy[(N - 1) * kSeeds + c];
    lowest = cost[c] < lowest ? cost[c] : lowest;
  }
  for (size_t c = 0; c < kSeeds; ++c) cost[c] -= lowest;  // so that they stay small, and their lowest bits too
}

// Of a closed chain of `steps` seeds the best stretch of `count` from seed `first` on: between any two seeds, or, where
// `seam` is not kSeeds, from that seed to itself. from: (count, kSeeds) of scratch.
void stretch(const SeedCodes& codes, const float* x, const uint8_t* blocks, size_t steps, size_t first, size_t count,
             size_t seam, uint8_t* out, uint8_t* from) {
  float cost[kSeeds];
  for (size_t p = 0; p < kSeeds; ++p) cost[p] = seam == kSeeds || seam == p ? 0.f : INFINITY;
  size_t at = 0;
  for (size_t s = 0; s < first; ++s) at += blocks[s];
  for (size_t i = 0; i < count; ++i) {
    const size_t s = (first + i) % steps;
    if (s == 0) at = 0;
    switch (blocks[s]) {
      case 1: step<1>(codes, x + at, cost, from + i * kSeeds); break;
      case 2: step<2>(codes, x + at, cost, from + i * kSeeds); break;
      case 3: step<3>(codes, x + at, cost, from + i * kSeeds); break;
      default: step<4>(codes, x + at, cost, from + i * kSeeds); break;
    }
    at += blocks[s];
  }
  size_t seed = seam;
  if (seam == kSeeds) {
    seed = 0;
    for (size_t c = 1; c < kSeeds; ++c)
      if (cost[c] < cost[seed]) seed = c;
  }
  for (size_t i = count; i-- > 0;) {
    out[(first + i) % steps] = static_cast<uint8_t>(seed);
    seed = from[i * kSeeds + seed];
  }
}

inline uint64_t mixed(uint64_t z) {  // splitmix64's finalizer
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
  return z ^ (z >> 31);
}

}  // namespace

// A chain is closed: what comes before its first seed is its last one. Which one that should be is seen in a stretch
// around the two; then the whole chain is searched with it.
void proc_search(const SeedCodes& codes, const float* x, const uint8_t* blocks, size_t steps, uint8_t* out,
                 uint8_t* scratch) {
  constexpr size_t kAround = 16;
  const size_t around = steps < kAround ? steps : kAround;
  stretch(codes, x, blocks, steps, steps - around / 2, around, kSeeds, out, scratch);
  stretch(codes, x, blocks, steps, 0, steps, out[steps - 1], out, scratch);
}

uint64_t proc_digest(const Mat& w, size_t c0, size_t c1) {
  const Columns columns(w.proc->columns, w.oc);
  uint64_t sum = 0;
  for (size_t i = c0; i < c1; ++i) {
    const uint8_t* row = w.data + i * w.row_bytes();
    uint64_t h = mixed(i + 1);
    const auto take = [&](uint64_t word) { h = (h ^ word) * 0x9e3779b97f4a7c15ull, h ^= h >> 29; };
    for (size_t k = 0; k < columns.all; ++k) {
      alignas(64) uint8_t turned[kPad], bytes[kPad];
      const uint8_t* before = seeds_before(row, columns.all, k, turned);
      take(w.scales[i * columns.all + k]);
      for (size_t j = 0; j < columns.blocks(k); ++j) {
        rebuild(row + k * kPad, before, tables_of(*w.proc, columns.blocks(k), j), bytes);
        for (size_t b = 0; b < kPad; b += 8) {
          uint64_t word;
          std::memcpy(&word, bytes + b, 8);
          take(word);
        }
      }
    }
    if (w.proc->starts)
      for (size_t d = w.proc->starts[i]; d < w.proc->starts[i + 1]; ++d)
        take(static_cast<uint64_t>(w.proc->at[d]) << 16 | w.proc->deltas[d]);
    sum += mixed(h);
  }
  return sum;
}

void proc_unpack(const Mat& w, size_t i, size_t o, float* out) { unpack_row<ProcRow>(w, i, o, out); }

}  // namespace ISA
