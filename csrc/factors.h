// Linear maps whose weights are products of smaller ones.
#pragma once
#include "kernels.h"

// As `apply` in linear.h. A step whose result is not finite makes the whole result so, whatever comes after it.
size_t apply_factors(const Mat& w, const float* bias, const float* x, size_t tokens, float* y, bool add, Many many);
// Of one token, with the channels that are not listed taken as zero; all steps are read.
size_t apply_factors_some(const Mat& w, const Channels& c, const float* bias, const float* x, float* y, bool add);
// Of one token, outputs [o0, o1) into y[o0, o1); all steps are read.
size_t apply_factors_part(const Mat& w, const Channels& c, const float* bias, const float* x, float* y, size_t o0,
                          size_t o1);
// L2 norm of each channel's weights (ic).
void factors_norms(const Mat& w, float* out);
