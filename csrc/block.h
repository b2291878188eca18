// The two halves of a decoder layer, each in one call: what Python would do between the kernels costs more than they do
// on a small model.
#pragma once
#include <span>

#include "slots.h"

struct Norm {
  const float *w, *b;  // (d); b null: RMS norm
  float eps;
  size_t d;
};
void normed(const Norm& norm, const float* x, size_t stride, size_t rows, float* out, size_t ostride);

struct Linear {
  const Mat* w;
  const float* bias;  // (oc) or null
  Place place;
  Input* input = nullptr;        // null: dense
  WeightSlot* others = nullptr;  // null: w
  const Mat& weights(const Pass& pass) const { return taken(others, pass) ? *others->w : *w; }
};

// Rows that belong to one text, and how they go through a layer. Several texts go together as exact passes:
// kSharedTokens rows at a time share the reading of weights, and each text gets the bits it would get alone.
struct TextRows {
  size_t tokens;
  const Cache* cache;
  Pass pass;
};
using Texts = std::span<const TextRows>;

size_t apply(const Linear& l, const float* x, size_t tokens, float* y, bool add, const Pass& pass);
// All texts at once where they read the same weights whole, else one by one.
size_t apply(const Linear& l, const float* x, Texts texts, float* y, bool add);

struct Attention {
  Norm norm;
  Linear qkv, o;
  size_t q, k, v;  // where each starts in a row of qkv
  size_t heads, kv_heads, e;
  const float *q_norm, *k_norm;  // (e) or null: RMS norm of each head
  size_t window;                 // 0 = all keys
  AttendSlot* slot;
};
struct Angles {
  const float *cos, *sin;  // (tokens, half)
  size_t half;             // 0: no rotary embedding
};
// x (rows, o.oc) += attention of every text's positions [past, past + tokens), whose keys and values are stored on the
// way. Angles: a row for each row of x.
BytesRead attention(const Attention& a, float* x, Texts texts, const Angles& angles);

struct Mlp {
  Norm norm;
  Linear up, down;
  bool gated;
  size_t gate, value;  // where each starts in a row of up
  size_t f;
  Act act;
  MlpSlot* slot;
  Mlp with_others() const;  // with the weights that stand in for its own: a slot sees only those
};
// x (tokens, down.oc) += down(act(gate) * up), or down(act(up)); mlp_dense after the norm.
size_t mlp(const Mlp& m, float* x, Texts texts);
size_t mlp_dense(const Mlp& m, const float* in, size_t tokens, float* x, const Pass& pass);
