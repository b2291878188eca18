// What a task does with its slice of the neurons.
#include "modes/neuron_slices.h"

#include <cmath>
#include <cstring>

#include "buffer.h"

size_t list_of(const uint64_t* bits, size_t n, size_t first, uint32_t* list) {
  size_t count = 0;
  for (size_t j = 0; j < n; j += 64)
    for (uint64_t word = bits[j / 64]; word; word &= word - 1)
      list[count++] = static_cast<uint32_t>(first + j) + static_cast<uint32_t>(__builtin_ctzll(word));
  return count;
}

size_t bits_of(const uint64_t* bits, size_t n) {
  size_t count = 0;
  for (size_t w = 0; w < (n + 63) / 64; ++w) count += static_cast<size_t>(__builtin_popcountll(bits[w]));
  return count;
}

NeuronSlices::NeuronSlices(const Mlp& m_, const NeuronRows& up_, const float* in_)
    : m(m_), up(up_), in(in_), width(slice_width(m_.f)), count((m_.f + width - 1) / width) {
  static thread_local Buffer<float> inputs, values, partial;
  static thread_local Buffer<uint32_t> lists;
  const size_t f = padded(m.f);
  float *to = inputs.get(up.width()), *room = values.get(4 * f);
  std::memcpy(to, in, up.d * sizeof(float));
  std::memset(to + up.d, 0, (up.width() - up.d) * sizeof(float));
  padded_in = to;
  gate = room, act = room + f, value = room + 2 * f, hidden = room + 3 * f;
  list = lists.get(f), sums = partial.get(count * m.down.w->oc);
}

void NeuronSlices::gates(size_t first, size_t last, const Used& used) const {
  const size_t o = m.gate + first;
  apply_alone(*m.up.w, used, m.up.bias, in, gate - m.gate, o, o + padded(last - first));
}

void NeuronSlices::gates(size_t first, size_t last, const NeuronRows& rows, float* scratch) const {
  neuron_range_kernel(rows.quant)(rows, first, last, padded_in, scratch, gate);
  if (const float* b = bias(m.gate))
    for (size_t j = first; j < last; ++j) gate[j] += b[j];
}

size_t NeuronSlices::gates(size_t first, size_t last, const Tiles& tiles, const FineChoice& best) const {
  const TileInput input = tile_input(tiles, best, in);
  const size_t end = padded(last);
  std::memset(gate + first, 0, (end - first) * sizeof(float));
  if (const float* b = bias(m.gate)) std::memcpy(gate + first, b + first, (last - first) * sizeof(float));
  kernels().matvec_tiles(tiles, input, first / kPad, end / kPad, gate);
  return input.whole;
}

bool NeuronSlices::products(size_t slice, size_t active, float* scratch) const {
  const Mat& w = *m.down.w;
  const uint32_t* some = list + first(slice);
  float* sum = sums + slice * w.oc;
  std::memset(sum, 0, w.oc * sizeof(float));
  neurons_kernel(up.quant)(up, some, active, padded_in, scratch, value);
  const float* b = bias(m.value);
  bool finite = true;
  for (size_t i = 0; i < active; ++i) {
    const size_t j = some[i];
    hidden[j] = act[j] * (b ? value[j] + b[j] : value[j]);
    finite &= std::isfinite(hidden[j]);
  }
  matvec_kernel(w.quant)(w, {some, active}, hidden, sum, 0, w.oc, 0, active);
  return finite;
}

void NeuronSlices::add_up(float* x) const {
  const size_t oc = m.down.w->oc;
  kernels().add_rows(x, sums, oc, count, oc);
  if (m.down.bias)
    for (size_t o = 0; o < oc; ++o) x[o] += m.down.bias[o];
}
