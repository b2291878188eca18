// A prompt's tokens as products of bytes: activations are rounded once for a map, weights while they are read.
#pragma once
#include "block.h"

// Whether so many tokens are multiplied as bytes.
bool in_bytes(const Mat& w, size_t tokens, Many many);
void apply_bytes(const Mat& w, const float* bias, const float* x, size_t tokens, float* y, bool add);
// x (tokens, down.oc) += down(act(gate) * up), or down(act(up)). What a group of neurons gives is rounded as soon as it
// is there, and never written down before; the bits are those of one map after the other.
void mlp_bytes(const Mlp& m, const float* in, size_t tokens, float* x);
