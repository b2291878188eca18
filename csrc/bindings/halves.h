// int8 matrices in two halves, as Python holds them.
#pragma once
#include "linear.h"
#include "objects.h"

struct HalvesObject {
  using Bytes = Array<uint8_t, 2>;
  Bytes upper, lower;
  Halves h;
  HalvesObject(const Matrix& matrix, Bytes upper_, Bytes lower_);
};
