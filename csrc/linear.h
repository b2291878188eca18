// Linear maps split over the thread pool.
#pragma once
#include "kernels.h"

// y (tokens, oc) = bias, or y itself where add, plus x (tokens, ic) W. Returns the bytes of W that were read.
size_t apply(const Mat& w, const float* bias, const float* x, size_t tokens, float* y, bool add, Many many);
// The same for one token and some of the channels.
size_t apply_some(const Mat& w, const Channels& c, const float* bias, const float* x, float* y, bool add);
// Output-major rows (n, ic) into outputs [o0, o0 + n). False: a value is not finite.
bool pack(const float* rows, size_t n, const Mat& w, size_t o0);
