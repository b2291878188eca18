// Linear maps split over the thread pool.
#pragma once
#include "kernels.h"

// y (tokens, oc) = bias, or y itself where add, plus x (tokens, ic) W. Returns the bytes of W that were read.
size_t apply(const Mat& w, const float* bias, const float* x, size_t tokens, float* y, bool add, Many many);
// The same for tokens of several texts: each gets the bits that it gets alone, and a few at a time share the reading.
size_t apply_rows(const Mat& w, const float* bias, const float* x, size_t rows, float* y, bool add);
// The same for one token and some of the channels.
size_t apply_some(const Mat& w, const Channels& c, const float* bias, const float* x, float* y, bool add);
// The same for all or some of the channels, and outputs [o0, o1) only, multiples of kPad: into y[o0, o1). These
// are the bits that the whole matrix gives.
size_t apply_part(const Mat& w, const Channels& c, const float* bias, const float* x, float* y, size_t o0, size_t o1);
// int8 weights in two halves of four bits each, so that one half of a channel is one run of bytes that can be left out.
struct Halves {
  Mat whole, upper, lower;
};
void halve(const Mat& w, const Halves& h);
// One token, outputs [o0, o1): the upper halves of the channels `kept`, a list, and the lower ones too of `fine`, some
// of those.
size_t apply_halves(const Halves& h, const Channels& kept, const Channels& fine, const float* bias, const float* x,
                    float* y, bool add, size_t o0, size_t o1);
// What one token uses of a map: all or some of the channels; where there are halves, of `fine` ones among them both.
struct Used {
  Channels kept;
  const Halves* halves = nullptr;
  Channels fine{nullptr, 0};
};
// Channels have two sides, which two threads read at once: where the second begins. It is a little smaller than the
// first, since the thread that has it begins later.
inline size_t second_side(size_t n) { return (n / 2 + n / 32) / 16 * 16; }
// What one token uses of each side, in lists. Two threads may ask at the same time, each for the side that it reads.
struct SideChoice {
  virtual Used side(size_t side) const = 0;

 protected:
  ~SideChoice() = default;
};
// All outputs from those, where a channel is one row of w, or of its halves of four bits. used: what was chosen.
size_t apply_chosen(const Mat& w, const Halves* halves, const SideChoice& choice, const float* bias, const float* x,
                    float* y, bool add, Used (&used)[2]);
// Outputs [o0, o1) from what is used, split over the pool, or by the calling thread inside a task of its own. alone: w
// is no product of factors, and sums are added up in one run, so that bits may differ from the others'.
size_t apply_used(const Mat& w, const Used& used, const float* bias, const float* x, float* y, size_t o0, size_t o1);
void apply_alone(const Mat& w, const Used& used, const float* bias, const float* x, float* y, size_t o0, size_t o1);
size_t used_bytes(const Mat& w, const Used& used, size_t o0, size_t o1);
// Several tokens and the upper halves of int8 weights.
size_t apply_coarse(const Mat& w, const float* bias, const float* x, size_t tokens, float* y, bool add, Many many);
// y[j] = sum of x[i] W[i][j], x (d), for the neurons j of an ascending list, nothing else of y is written;
// list null: all of them.
size_t neurons(const NeuronRows& w, const uint32_t* list, size_t count, const float* x, float* y);
// y[i] = x . row i of int8 weights, x (w.oc), for the i of an ascending list, nothing else of y is written.
size_t row_dots(const Mat& w, const uint32_t* list, size_t count, const float* x, float* y);
// The kernels behind apply_some and neurons, for a task that has several things to do with the outputs it owns.
decltype(Kernels::matvec_f32) matvec_kernel(Quant q);
decltype(Kernels::neurons_f32) neurons_kernel(Quant q);
decltype(Kernels::neuron_range_f32) neuron_range_kernel(Quant q);
// Of each channel's scales the largest magnitude (ic), for Mat::largest.
void largest_scales(const Mat& w, float* out);
// L2 norm of each channel's weights (ic).
void norms(const Mat& w, float* out);
// Output-major rows (n, ic) into outputs [o0, o0 + n). False: a value is not finite.
bool pack(const float* rows, size_t n, const Mat& w, size_t o0);
