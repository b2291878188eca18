// Blocks that moved are computed, the others give their last result with the weight of its age.
#include "modes/event_blocks.h"

#include <algorithm>
#include <cmath>
#include <numeric>

// Blocks that moved most, and those that are too old.
std::vector<bool> EventBlocks::chosen(const BlockResults& state, const float* x, size_t most) const {
  const size_t blocks = rule.blocks();
  std::vector<bool> out(blocks, state.x.empty());
  if (state.x.empty()) return out;
  std::vector<float> move(blocks, 0.f);
  for (size_t i = 0; i < n; ++i) move[i / rule.block] += (x[i] - state.x[i]) * (x[i] - state.x[i]);
  for (float& m : move) m = std::sqrt(m);
  const float mean = std::accumulate(move.begin(), move.end(), 0.f) / static_cast<float>(blocks);
  std::vector<uint32_t> order(blocks);
  std::iota(order.begin(), order.end(), 0u);
  std::stable_sort(order.begin(), order.end(), [&](uint32_t a, uint32_t b) { return move[a] > move[b]; });
  for (size_t i = 0; i < std::min(most, blocks); ++i) out[order[i]] = move[order[i]] >= rule.theta * mean;
  for (size_t b = 0; b < blocks; ++b)
    if (state.age[b] >= rule.age_max) out[b] = true;
  return out;
}

size_t EventBlocks::one(BlockResults& state, const Mat& w, const float* x, size_t most) {
  const std::vector<bool> now = chosen(state, x, most);
  const size_t blocks = rule.blocks(), oc = w.oc;
  state.y.resize(blocks * oc), state.age.resize(blocks, 0);
  std::vector<uint32_t> list(rule.block);
  size_t bytes = 0, sent = 0;
  for (size_t b = 0; b < blocks; ++b) {
    ++state.age[b];
    if (!now[b]) continue;
    const size_t first = b * rule.block, count = std::min(rule.block, n - first);
    std::iota(list.begin(), list.end(), static_cast<uint32_t>(first));
    bytes += apply_some(w, {list.data(), count}, nullptr, x, state.y.data() + b * oc, false);
    state.age[b] = 0, sent += count;
  }
  state.x.assign(x, x + n);
  ++counts.steps, counts.channels += n, counts.sent += sent;
  counts.bytes_read += bytes, counts.bytes_skipped += w.bytes() - bytes;
  return bytes;
}

// The weighted sum of all blocks times blocks / sum of weights: dividing by the sum alone would make it an average.
void EventBlocks::join(const BlockResults& state, const Linear& l, float* y, bool add) const {
  const size_t blocks = rule.blocks(), oc = l.w->oc;
  std::vector<float> weight(blocks);
  float sum = 0;
  for (size_t b = 0; b < blocks; ++b) {
    const float age = static_cast<float>(state.age[b]);
    weight[b] = state.age[b] == 0 ? 1.f : rule.beta * std::exp(-rule.lambda * age);
    sum += weight[b];
  }
  const float scale = static_cast<float>(blocks) / std::max(sum, 1e-6f);
  for (size_t o = 0; o < oc; ++o) {
    float total = 0;
    for (size_t b = 0; b < blocks; ++b) total += weight[b] * state.y[b * oc + o];
    y[o] = (add ? y[o] : 0.f) + scale * total + (l.bias ? l.bias[o] : 0.f);
  }
}

size_t EventBlocks::run(const Linear& l, const float* x, size_t tokens, float* y, bool add, const Pass& pass) {
  const size_t most = rule.most[pacer ? pacer->level(layer) : 0];
  BlockResults& state = this->state<BlockResults>(pass, l.place);
  size_t bytes = 0;
  for (size_t t = 0; t < tokens; ++t) {
    if (state.next != pass.past + t) state.x.clear();
    bytes += one(state, l.weights(pass), x + t * n, most);
    join(state, l, y + t * l.w->oc, add);
    state.next = pass.past + t + 1;
  }
  return bytes;
}
