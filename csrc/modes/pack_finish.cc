// The second half of a head's token: the best of the keys found, their exact scores and values, and what stands for the
// rest.
#include <algorithm>
#include <cmath>
#include <cstring>

#include "modes/pack_scan.h"

namespace scanning {

// What all runs of a head found, in one place.
Found Scan::gather(const Head& h) const {
  static thread_local Buffer<uint32_t> places;
  static thread_local Buffer<float> importances;
  const Found *first = &found[h.index * runs], *last = first + runs;
  size_t room = 1;
  for (const Found* run = first; run < last; ++run) room += run->count;
  Found all{places.get(room), importances.get(room), 0};
  for (const Found* run = first; run < last; ++run) {
    std::memcpy(all.at + all.count, run->at, run->count * sizeof(uint32_t));
    std::memcpy(all.importance + all.count, run->importance, run->count * sizeof(float));
    all.count += run->count;
  }
  return all;
}

// Lists the most important of the keys found, as many as are wanted.
Least Scan::choose(Head& h, const Found& all) const {
  static thread_local Buffer<float> numbers;
  static thread_local Buffer<uint32_t> scratch, winners;
  uint32_t* list = h.list + h.fixed;
  h.count = h.fixed + std::min(all.count, wanted);
  if (all.count <= wanted) {
    std::memcpy(list, all.at, all.count * sizeof(uint32_t));
    return {h.above(h.bound), 0};
  }
  float* positive = numbers.get(all.count);
  for (size_t i = 0; i < all.count; ++i) positive[i] = h.above(all.importance[i]);
  uint32_t *won = winners.get(all.count), *score = scratch.get(all.count);  // positive numbers as integers
  const size_t n = kernels().select_near(positive, nullptr, all.count, wanted, h.above(h.bound), score, won);
  h.count = h.fixed + n;
  uint32_t least = UINT32_MAX, equal = 0, read = 0;
  for (size_t i = 0; i < n; ++i) list[i] = all.at[won[i]], least = std::min(least, score[won[i]]);
  for (size_t i = 0; i < all.count; ++i) equal += score[i] == least;
  for (size_t i = 0; i < n; ++i) read += score[won[i]] == least;
  float above;
  std::memcpy(&above, &least, sizeof above);
  return {above, 1 - static_cast<double>(read) / equal};
}

// The document's forms may take a part of a score from the guess.
void Scan::mix(const Head& h) const {
  static thread_local Buffer<float> guesses;
  float* of_group = guesses.get(g * kCodeGroup);
  for (size_t i = h.fixed; i < h.count; ++i) {
    const size_t block = h.list[i] / kCodeKeys, key = h.list[i] % kCodeKeys;
    kernels().code_guess(rule.popcount, packed(h), query(h), block * kCodeStep + key % kCodeStep, of_group, kCodeGroup);
    for (size_t k = 0; k < g; ++k) {
      float& score = h.scores[k * stride + i];
      score = rule.mix * score + (1 - rule.mix) * (of_group[k * kCodeGroup + key / kCodeStep] + h.norm[k]);
    }
  }
}

// Logarithms of the weight of the keys that are not read (g): the sample's, less those that were important enough.
void Scan::rest_of(const Head& h, const Least& least, float* logs) const {
  static thread_local Buffer<float> left;
  const Sample& s = h.sample;
  float* others = left.get(s.count);
  const float part = static_cast<float>(std::log(least.left));  // of keys that are as important as the last one read
  for (size_t k = 0; k < g; ++k) {
    for (size_t i = 0; i < s.count; ++i) {
      const float above = h.above(s.importance[i]);
      const float left_of = above < least.above ? 0.f : above > least.above ? -INFINITY : part;
      others[i] = s.scores[k * s.count + i] + left_of;
    }
    logs[k] = kernels().log_mass(others, s.count) + s.each;
  }
}

// Reads fewer values: those of the keys that hold a share p of every head's weight. The others join the rest.
void Scan::enough(Head& h, float* logs) const {
  static thread_local Buffer<float> weights;
  static thread_local Buffer<uint32_t> ranks;
  const size_t n = h.count;
  float *w = weights.get(g * n), *held = logs;
  uint32_t* order = ranks.get(n);
  std::vector<double> total(g), so_far(g, 0);
  for (size_t k = 0; k < g; ++k) {
    const float high = std::max(kernels().log_mass(h.scores + k * stride, n), held[k]);
    for (size_t i = 0; i < n; ++i) w[k * n + i] = std::exp(h.scores[k * stride + i] - high), total[k] += w[k * n + i];
    total[k] += std::exp(held[k] - high);
    for (size_t i = 0; i < n; ++i) w[k * n + i] /= static_cast<float>(total[k]);
    for (size_t i = 0; i < h.fixed; ++i) so_far[k] += w[k * n + i];
  }
  const auto weight = [&](uint32_t i) {
    float most = 0;
    for (size_t k = 0; k < g; ++k) most = std::max(most, w[k * n + i]);
    return most;
  };
  for (size_t i = 0; i < n; ++i) order[i] = static_cast<uint32_t>(i);
  std::stable_sort(order + h.fixed, order + n, [&](uint32_t a, uint32_t b) { return weight(a) > weight(b); });
  const auto lacks = [&] {
    for (size_t k = 0; k < g; ++k)
      if (so_far[k] < static_cast<double>(rule.p)) return true;
    return false;
  };
  size_t kept = h.fixed;
  for (; kept < n && lacks(); ++kept)
    for (size_t k = 0; k < g; ++k) so_far[k] += w[k * n + order[kept]];
  reorder(h, order, kept, logs);
}

// Keys in this order, of which the first `kept` stay; the weight of the others joins the rest.
void Scan::reorder(Head& h, const uint32_t* order, size_t kept, float* logs) const {
  static thread_local Buffer<float> moved;
  static thread_local Buffer<uint32_t> places;
  const size_t n = h.count;
  float* scores = moved.get(n);
  uint32_t* list = places.get(n);
  for (size_t k = 0; k < g; ++k) {
    float* of_head = h.scores + k * stride;
    for (size_t i = 0; i < n; ++i) scores[i] = of_head[order[i]];
    std::memcpy(of_head, scores, n * sizeof(float));
    const float both[] = {logs[k], kernels().log_mass(of_head + kept, n - kept)};
    logs[k] = kernels().log_mass(both, 2);
  }
  for (size_t i = 0; i < n; ++i) list[i] = h.list[order[i]];
  std::memcpy(h.list, list, n * sizeof(uint32_t));
  h.values = kept;
}

void Scan::finish(Head& h) const {
  static thread_local Buffer<float> parts, rest;
  float *logs = rest.get(g), *two = parts.get(2 * part_size(g, ep));
  const Least least = choose(h, gather(h));
  kernel.scores(keys(h), h.q, g, {h.list + h.fixed, 0, h.count - h.fixed}, h.scores + h.fixed, stride);
  if (rule.mix < 1) mix(h);
  rest_of(h, least, logs);
  h.values = h.count;
  if (rule.p > 0) enough(h, logs);
  kernel.attend(keys(h), h.scores, stride, g, {h.list, 0, h.values}, two);
  if (rule.rest) rest_part(h, logs, two + part_size(g, ep));
  kernels().attend_merge(two, rule.rest ? 2 : 1, g, ep, call.out + h.index * g * call.e, call.e);
}

// The keys that are not read as one more part: their weight, and the mean of the values.
void Scan::rest_part(const Head& h, const float* logs, float* part) const {
  const float *sums = codes.heads[h.index].values.data() + (b1 - 1) * ep,
              *before = b0 ? sums - (b1 - b0) * ep : nullptr;
  const float each = 1.f / static_cast<float>((b1 - b0) * kCodeKeys);
  for (size_t k = 0; k < g; ++k) {
    const bool any = logs[k] > -INFINITY;
    part[k] = logs[k], part[g + k] = any ? 1.f : 0.f;
    for (size_t e = 0; e < ep; ++e)
      part[2 * g + k * ep + e] = any ? each * (sums[e] - (before ? before[e] : 0.f)) : 0.f;
  }
}

}  // namespace scanning
