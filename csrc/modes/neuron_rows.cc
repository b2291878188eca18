// Turns a part of an input-channel-major matrix into rows of one neuron each: once, when a model is made ready.
#include <algorithm>
#include <cstring>

#include "modes/neurons.h"
#include "pool.h"

namespace {

constexpr size_t kTile = 64;  // inputs at a time: what is read of them stays in the first-level cache

template <class T>
void move_values(const Mat& w, size_t o, size_t j, size_t i0, size_t i1, const NeuronRows& out) {
  const T* from = reinterpret_cast<const T*>(w.data) + o;
  T* to = reinterpret_cast<T*>(out.data + j * out.row_bytes());
  for (size_t i = i0; i < i1; ++i) to[i] = from[i * w.oc];
}

// Value i of a packed row is in this byte, that many bits up.
size_t byte_of(size_t i) { return i / kGroupInt4 * (kGroupInt4 / 2) + i % (kGroupInt4 / 2); }
unsigned shift_of(size_t i) { return i % kGroupInt4 < kGroupInt4 / 2 ? 0 : 4; }

void move_nibbles(const Mat& w, size_t o, size_t j, size_t i0, size_t i1, const NeuronRows& out) {
  const uint8_t* from = w.data + byte_of(o);
  uint8_t* to = out.data + j * out.row_bytes();
  for (size_t i = i0; i < i1; ++i) {
    const unsigned value = (from[i * w.row_bytes()] >> shift_of(o)) & 15, mask = 15u << shift_of(i);
    uint8_t& byte = to[byte_of(i)];
    byte = static_cast<uint8_t>((byte & ~mask) | (value << shift_of(i)));
  }
}

// Inputs [i0, i1) of neuron j, which is output o of w.
void move(const Mat& w, size_t o, size_t j, size_t i0, size_t i1, const NeuronRows& out) {
  switch (w.quant) {
    case Quant::f32: return move_values<uint32_t>(w, o, j, i0, i1, out);
    case Quant::bf16: return move_values<uint16_t>(w, o, j, i0, i1, out);
    case Quant::int8: return move_values<uint8_t>(w, o, j, i0, i1, out);
    default: return move_nibbles(w, o, j, i0, i1, out);
  }
}

// Groups [g0, g1) of out; what pads the inputs has a scale of zero.
void move_scales(const Mat& w, size_t o0, size_t g0, size_t g1, const NeuronRows& out) {
  const size_t first = o0 / group_size(w.quant), width = out.width();
  for (size_t g = g0; g < g1; ++g)
    for (size_t i = 0; i < width; ++i)
      out.scales[g * width + i] = i < w.ic ? w.scales[i * w.groups() + first + g] : static_cast<uint16_t>(0);
}

}  // namespace

void lay_out(const Mat& w, size_t o0, const NeuronRows& out) {
  const int zero = w.quant == Quant::int8 ? 128 : w.quant == Quant::int4 ? 0x88 : 0;  // a weight of zero as stored
  const size_t blocks = padded(out.f) / kPad, groups = out.groups() / blocks;
  parallel(blocks, [&](size_t block, size_t) {
    const size_t j0 = block * kPad, j1 = std::min(j0 + kPad, out.f);
    std::memset(out.data + j0 * out.row_bytes(), zero, (j1 - j0) * out.row_bytes());
    for (size_t i = 0; i < w.ic; i += kTile)
      for (size_t j = j0; j < j1; ++j) move(w, o0 + j, j, i, std::min(i + kTile, w.ic), out);
    if (groups) move_scales(w, o0, block * groups, (block + 1) * groups, out);
  });
}
