// Packing a gate once, and the candidates of a token.
#include "modes/gate_guess.h"

#include <algorithm>
#include <cstring>

#include "buffer.h"
#include "pool.h"

namespace {

float bf16(uint16_t h) {
  const uint32_t bits = static_cast<uint32_t>(h) << 16;
  float f;
  std::memcpy(&f, &bits, sizeof f);
  return f;
}

// The weight that neuron j gives input i.
float weight(const NeuronRows& w, size_t j, size_t i) {
  const uint8_t* row = w.data + j * w.row_bytes();
  if (w.quant == Quant::f32) return reinterpret_cast<const float*>(row)[i];
  if (w.quant == Quant::bf16) return bf16(reinterpret_cast<const uint16_t*>(row)[i]);
  const float scale = bf16(w.scales[j / group_size(w.quant) * w.width() + i]);
  if (w.quant == Quant::int8) return scale * (static_cast<float>(row[i]) - 128.f);
  constexpr size_t kHalf = kGroupInt4 / 2;  // low nibbles are the first half of a group
  const uint8_t byte = row[i / kGroupInt4 * kHalf + i % kHalf];
  return scale * (static_cast<float>(i % kGroupInt4 < kHalf ? byte & 15 : byte >> 4) - 8.f);
}

// Neuron j of a block's words: positive ones at `bits`, kCodeNeurons words from there the negative ones. The mean
// magnitude of what is left.
float code_row(const NeuronRows& w, size_t j, float share, uint64_t* bits) {
  double mean = 0, sum = 0;
  size_t count = 0;
  for (size_t i = 0; i < w.d; ++i) mean += std::fabs(weight(w, j, i));
  const float bound = share * static_cast<float>(mean / static_cast<double>(w.d));
  for (size_t i = 0; i < w.d; ++i) {
    const float v = weight(w, j, i);
    if (!(std::fabs(v) > bound)) continue;
    bits[(i / 64 * 2 + (v < 0)) * kCodeNeurons] |= uint64_t{1} << (i % 64);
    sum += std::fabs(v), ++count;
  }
  return count ? static_cast<float>(sum / static_cast<double>(count)) : 0.f;
}

}  // namespace

void code_gate(const NeuronRows& gate, float share, uint64_t* bits, float* scales) {
  const GateCodes c{bits, scales, gate.d, gate.f};
  const size_t each = c.words() * 2 * kCodeNeurons;
  parallel(c.blocks(), [&](size_t b, size_t) {
    std::memset(bits + b * each, 0, each * sizeof(uint64_t));
    for (size_t j = b * kCodeNeurons; j < std::min((b + 1) * kCodeNeurons, gate.f); ++j)
      scales[j] = code_row(gate, j, share, bits + b * each + j % kCodeNeurons);
  });
}

void GateGuess::candidates(const Input& x, const float* bias, Act act, size_t first, size_t last, uint64_t* out) const {
  static thread_local Buffer<int32_t> numbers;
  static thread_local Buffer<float> values;
  static thread_local Buffer<uint32_t> lists;
  const size_t n = last - first, block = first / kCodeNeurons, blocks = (n + kCodeNeurons - 1) / kCodeNeurons;
  int32_t* counts = numbers.get(blocks * kCodeNeurons);
  float* guess = values.get(n);
  kernels().gate_counts(popcount, codes, x.planes, block, block + blocks, counts);
  for (size_t j = 0; j < n; ++j) guess[j] = x.step * codes.scales[first + j] * static_cast<float>(counts[j]);
  if (offset)
    for (size_t j = 0; j < n; ++j) guess[j] += offset[first + j];
  if (bias)
    for (size_t j = 0; j < n; ++j) guess[j] += bias[first + j];
  if (keep == 0) {
    PackSums sums;
    uint64_t below[kPad];  // of no use
    for (size_t j = 0; j < n; ++j) guess[j] += slack;
    for (size_t j = 0; j < n; j += kPad * 64)
      kernels().pack_bits(guess + j, std::min(n - j, kPad * 64), 0.f, out + j / 64, below, &sums);
    return;
  }
  uint32_t *score = lists.get(2 * n), *list = score + n;
  kernels().act(act, guess, nullptr, n, guess);
  const size_t k = std::min(n, static_cast<size_t>(std::ceil(keep * static_cast<float>(n))));
  std::memset(out, 0, (n + 63) / 64 * sizeof(uint64_t));
  for (size_t i = kernels().select_top(guess, nullptr, n, k, score, list); i-- > 0;)
    out[list[i] / 64] |= uint64_t{1} << (list[i] % 64);
}
