// All layers in one call: between two halves of a layer Python would find its own code thrown out of the cache by the
// weights, and cost as much as a small matvec.
#include "decoder.h"

#include <cstring>

#include "buffer.h"
#include "linear.h"

namespace {

float from_bits(uint32_t bits) {
  float f;
  std::memcpy(&f, &bits, sizeof f);
  return f;
}
float from_bf16(uint16_t h) { return from_bits(static_cast<uint32_t>(h) << 16); }
// The exponent is moved by a multiplication, which makes subnormal numbers right too.
float from_f16(uint16_t h) {
  const uint32_t rest = static_cast<uint32_t>(h & 0x7fff) << 13;
  const bool special = (h & 0x7c00) == 0x7c00;  // infinite or not a number
  const float size = special ? from_bits(rest | 0x7f800000) : from_bits(rest) * 0x1p112f;
  return h & 0x8000 ? -size : size;
}

void embed(const Embedding& e, size_t token, float* out) {
  const uint16_t* row = e.words + token * e.d * (e.kind == Words::f32 ? 2 : 1);
  switch (e.kind) {
    case Words::f32: std::memcpy(out, row, e.d * sizeof(float)); return;
    case Words::f16:
      for (size_t i = 0; i < e.d; ++i) out[i] = from_f16(row[i]);
      return;
    case Words::bf16:
      for (size_t i = 0; i < e.d; ++i) out[i] = from_bf16(row[i]);
  }
}

}  // namespace

BytesRead decode(const Decoder& d, const std::vector<TextTokens>& texts, const Angles& angles, Many many, float* hidden,
                 float* logits) {
  static thread_local Buffer<float> stream;
  static thread_local std::vector<TextRows> rows;
  const size_t width = d.norm.d, stride = padded(width);
  size_t count = 0;
  for (const TextTokens& text : texts) count += text.count;
  float *x = stream.get(count * stride), *row = x;
  for (const TextTokens& text : texts)
    for (size_t t = 0; t < text.count; ++t, row += stride) {
      embed(d.embedding, static_cast<size_t>(text.tokens[t]), row);
      if (d.positions)
        for (size_t i = 0; i < width; ++i) row[i] += d.positions[(text.past + t) * width + i];
      std::memset(row + width, 0, (stride - width) * sizeof(float));
    }
  BytesRead read{0, 0};
  for (size_t i = 0; i < d.mlps.size(); ++i) {
    rows.clear();
    for (const TextTokens& text : texts)
      rows.push_back({text.count, text.caches[i], {many, text.past, text.states ? (*text.states)[i] : nullptr}});
    const BytesRead part = attention(*d.attentions[i], x, rows, angles);
    read.weights += part.weights + mlp(*d.mlps[i], x, rows);
    read.cache += part.cache;
  }
  normed(d.norm, x, stride, count, hidden, width);
  if (!logits) return read;
  rows.clear();
  for (const TextTokens& text : texts) {
    LayerState* last = text.states && !text.states->empty() ? text.states->back() : nullptr;
    rows.push_back({text.count, nullptr, {Many::floats, text.past, last}});
  }
  read.weights += apply(d.head, hidden, rows, logits, false);
  return read;
}
