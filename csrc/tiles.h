// int8 weights of which the upper halves lie in tiles: all channels by those, but some whole. Split over the pool by
// outputs.
#pragma once
#include "linear.h"

// Fills them.
void tile(const Tiles& t);

// The channels of a token that are read whole. Every thread asks for itself, each gets the same.
struct FineChoice {
  virtual size_t fine(uint32_t* list) const = 0;  // ascending, into list (ic); how many

 protected:
  ~FineChoice() = default;
};
// A token as kernels take it, made by the calling thread in memory of its own.
TileInput tile_input(const Tiles& t, const FineChoice& choice, const float* x);
// One token. fine: how many channels were read whole. Returns the bytes of weights that were read.
size_t apply_tiles(const Tiles& t, const FineChoice& choice, const float* bias, const float* x, float* y, bool add,
                   size_t& fine);
