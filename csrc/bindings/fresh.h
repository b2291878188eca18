// New arrays that C++ makes and Python owns: on whole lines, or huge pages where they are large.
#pragma once
#include <array>

#include "arrays.h"
#include "buffer.h"

template <class T, size_t N>
nb::ndarray<nb::numpy, T, nb::ndim<N>> fresh(const std::array<size_t, N>& shape) {
  auto memory = std::make_unique<Buffer<T>>();
  size_t n = 1;
  for (size_t s : shape) n *= s;
  T* data = memory->get(n);
  nb::capsule owner(memory.get(), [](void* p) noexcept { delete static_cast<Buffer<T>*>(p); });
  memory.release();
  return {data, N, shape.data(), owner};
}
