// Array arguments as Python passes them, and the shape checks that keep a wrong call from touching wrong memory.
#pragma once
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/map.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <string>

namespace nb = nanobind;

template <class T, int N>
using Array = nb::ndarray<T, nb::numpy, nb::ndim<N>, nb::c_contig, nb::device::cpu>;
// Rows of floats that may lie apart, as in a slice of a wider matrix.
template <class T>
using Rows = nb::ndarray<T, nb::numpy, nb::ndim<2>, nb::device::cpu>;

// An array argument, taken as it is: what a kernel writes into a converted copy would be lost.
inline auto array(const char* name) { return nb::arg(name).noconvert(); }

inline void need(bool ok, const char* what) {
  if (!ok) throw nb::value_error(what);
}
template <class T>
size_t row_stride(const Rows<T>& a) {
  if (a.size() == 0) return a.shape(1);  // nothing to step over: the strides may be anything
  need(a.shape(1) == 1 || a.stride(1) == 1, "rows must be contiguous");
  if (a.shape(0) == 1) return a.shape(1);
  need(a.stride(0) >= static_cast<int64_t>(a.shape(1)), "rows must not overlap");
  return static_cast<size_t>(a.stride(0));
}

void bind_linear(nb::module_& m);
void bind_halves(nb::module_& m);
void bind_tiles(nb::module_& m);
void bind_proc(nb::module_& m);
void bind_hashed(nb::module_& m);
void bind_factors(nb::module_& m);
void bind_attention(nb::module_& m);
void bind_rows(nb::module_& m);
void bind_block(nb::module_& m);
void bind_slots(nb::module_& m);
void bind_kwta(nb::module_& m);
void bind_neurons(nb::module_& m);
void bind_keys(nb::module_& m);
void bind_pack_keys(nb::module_& m);
void bind_pack_mlp(nb::module_& m);
void bind_event(nb::module_& m);
