// Upper halves of int8 matrices in tiles, as Python holds them.
#pragma once
#include "objects.h"
#include "tiles.h"

struct TilesObject {
  using Bytes = Array<uint8_t, 2>;
  using Scales = Array<uint16_t, 2>;
  nb::object matrix;  // of which they are
  Bytes data;
  Scales scales;
  Tiles t;
  TilesObject(const Matrix& matrix_, size_t o0, Bytes data_, Scales scales_);
};
