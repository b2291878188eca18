// A whole model: embedding, layers, final norm, head.
#pragma once
#include <vector>

#include "block.h"

enum class Words { f32, f16, bf16 };

// Rows of d values as 16-bit words; f32 has two for each.
struct Embedding {
  const uint16_t* words;
  Words kind;
  size_t rows, d;
};

struct Decoder {
  Embedding embedding;
  const float* positions;  // (rows, d) or null; row 0 is position 0
  Norm norm;
  Linear head;
  std::vector<const Attention*> attentions;
  std::vector<const Mlp*> mlps;
};
// Tokens that follow the first `past` of a text.
struct TextTokens {
  const int64_t* tokens;
  size_t count, past;
  std::vector<const Cache*> caches;        // per layer
  const std::vector<LayerState*>* states;  // per layer; null: dense
};
// Final hidden states (rows, d), and scores (rows, head.w->oc) unless null; rows: all texts' tokens, one after another.
// Several texts: exact.
BytesRead decode(const Decoder& d, const std::vector<TextTokens>& texts, const Angles& angles, Many many, float* hidden,
                 float* logits);
