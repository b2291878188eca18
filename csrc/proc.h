// Weights from seeds: searched for, rebuilt and summed up, split over the pool.
#pragma once
#include <vector>

#include "kernels.h"

// What seeds give, as the search reads it.
struct SeedTables {
  std::vector<float> now, before, energy;
  explicit SeedTables(const int8_t* tables);
  SeedCodes codes() const { return {now.data(), before.data(), energy.data()}; }
};

// Seeds (columns * kPad), scales (columns, bf16) and what they give (oc) for the weights w (oc) of one channel. sigma:
// the spread of weights, in units of the tables, that the tables are made for.
void search_seeds(const SeedTables& t, const int8_t* tables, float sigma, size_t columns, size_t oc, const float* w,
                  uint8_t* seeds, uint16_t* scales, float* out);
uint64_t digest(const Mat& w);
void unpack(const Mat& w, float* out);  // (ic, oc)
