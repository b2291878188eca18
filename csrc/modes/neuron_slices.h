// One token through a gated MLP in one region of the pool: a task owns a slice of the neurons and does gate, up and
// down for them, with sums of its own that are added up afterwards.
#pragma once
#include "block.h"
#include "tiles.h"

// Neurons of a task: by the shape alone, so that results do not depend on the number of threads.
inline size_t slice_width(size_t f) {
  constexpr size_t kLeast = 256, kMost = 16;  // neurons worth a task, and tasks
  const size_t width = padded((f + kMost - 1) / kMost);
  return width < kLeast ? kLeast : width;
}

// Which bits are set, `first` being the first one's number; how many.
size_t list_of(const uint64_t* bits, size_t n, size_t first, uint32_t* list);
size_t bits_of(const uint64_t* bits, size_t n);

struct NeuronSlices {
  const Mlp& m;
  const NeuronRows& up;
  const float *in, *padded_in;
  float *gate, *act, *value, *hidden;  // (f padded)
  uint32_t* list;                      // (f padded): of a slice the neurons that are computed, from its first one on
  float* sums;                         // (count, oc)
  const size_t width, count;           // neurons of a slice; slices

  // In memory that the calling thread keeps.
  NeuronSlices(const Mlp& m_, const NeuronRows& up_, const float* in_);
  size_t first(size_t slice) const { return slice * width; }
  size_t last(size_t slice) const { return slice + 1 == count ? m.f : first(slice + 1); }
  const float* bias(size_t part) const { return m.up.bias ? m.up.bias + part : nullptr; }
  // Gates of the neurons [first, last) of a slice, by input channels from what is used of them, or neuron by neuron.
  void gates(size_t first, size_t last, const Used& used) const;
  void gates(size_t first, size_t last, const NeuronRows& rows, float* scratch) const;
  // The same by upper halves, and of the `best` channels by whole weights; how many those are.
  size_t gates(size_t first, size_t last, const Tiles& tiles, const FineChoice& best) const;
  // Up, product and down of the `active` neurons that its list has. False: a product is not finite.
  bool products(size_t slice, size_t active, float* scratch) const;
  // x (oc) += what all slices give.
  void add_up(float* x) const;
};
