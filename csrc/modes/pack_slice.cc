// One token is one region of the pool: a task owns some neurons and does gate, bitmap, up and down for them, with sums
// of its own that are added up afterwards.
#include <cstring>
#include <limits>
#include <utility>

#include "buffer.h"
#include "modes/pack_mlp.h"
#include "pool.h"

struct PackMlp::Token {
  const Mlp& m;
  const float *in, *padded_in;
  float *gate, *act, *up, *hidden;  // (f padded)
  uint32_t* list;                   // (f padded)
  float* sums;                      // (slices, oc)
  GateGuess::Input packed;
  bool whole, plant;  // all gates are computed, whatever the guess
  const float* bias(size_t part) const { return m.up.bias ? m.up.bias + part : nullptr; }
};
// Neurons [first, last), a task's own.
struct PackMlp::Slice {
  size_t index, first, last;
  size_t candidates = 0, active = 0, checked = 0, missed = 0;
  bool bad = false, planted = false;
};

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

// Gates of the candidates, side by side from t.gate[first] on, their neurons in the list; how many.
size_t PackMlp::some_gates(const Token& t, Slice& s, float* scratch) const {
  static thread_local Buffer<uint64_t> words;
  const size_t n = s.last - s.first;
  uint64_t* bits = words.get(padded(n) / 64);
  uint32_t* list = t.list + s.first;
  guess.candidates(t.packed, t.bias(t.m.gate), t.m.act, s.first, s.last, bits);
  const size_t count = list_of(bits, n, s.first, list);
  neurons_kernel(gate.quant)(gate, list, count, t.padded_in, scratch, t.up);  // up is computed later
  const float* bias = t.bias(t.m.gate);
  for (size_t i = 0; i < count; ++i) t.gate[s.first + i] = t.up[list[i]] + (bias ? bias[list[i]] : 0.f);
  return count;
}

size_t PackMlp::all_gates(const Token& t, Slice& s, float* scratch) const {
  const Mlp& m = t.m;
  const size_t n = s.last - s.first, o = m.gate + s.first;
  float* g = t.gate + s.first;
  if (gate.data) {
    neuron_range_kernel(gate.quant)(gate, s.first, s.last, t.padded_in, scratch, t.gate);
  } else {
    std::memset(g, 0, padded(n) * sizeof(float));
    matvec_kernel(m.up.w->quant)(*m.up.w, {nullptr, m.up.w->ic}, t.in, t.gate - m.gate, o, o + padded(n), 0,
                                 m.up.w->ic);
  }
  if (const float* bias = t.bias(m.gate))
    for (size_t j = 0; j < n; ++j) g[j] += bias[s.first + j];
  return n;
}

// Active neurons into the list, their act(gate) into t.act.
void PackMlp::gates(const Token& t, Slice& s, float* scratch) const {
  static thread_local Buffer<uint64_t> words;
  static thread_local Buffer<float> values;
  const size_t all = s.last - s.first;
  const bool some = guess && !t.whole;
  const size_t n = some ? some_gates(t, s, scratch) : all_gates(t, s, scratch);
  float *g = t.gate + s.first, *a = values.get(all);
  uint64_t *bits = words.get(2 * padded(all) / 64), *maybe = bits + padded(all) / 64;
  uint32_t* list = t.list + s.first;
  if (t.plant && s.index == 0 && n) g[0] = std::numeric_limits<float>::quiet_NaN(), s.planted = true;
  s.bad = !kernels().finite(g, n) || (guess && t.packed.bad());
  kernels().act(t.m.act, g, nullptr, n, a);
  PackSums sums;
  kernels().pack_bits(a, n, eps, bits, nullptr, &sums);
  s.candidates = n;
  if (guess && t.whole) {
    guess.candidates(t.packed, t.bias(t.m.gate), t.m.act, s.first, s.last, maybe);
    s.checked = sums.active;
    for (size_t w = 0; w < padded(all) / 64; ++w) bits[w] &= maybe[w];
    s.missed = s.checked - bits_of(bits, n);
  }
  size_t count = 0;
  for (size_t i = 0; i < n; i += 64)
    for (uint64_t word = bits[i / 64]; word; word &= word - 1) {
      const size_t at = i + static_cast<size_t>(__builtin_ctzll(word));
      const uint32_t j = some ? list[at] : static_cast<uint32_t>(s.first + at);
      list[count++] = j;  // never past `at`
      t.act[j] = a[at];
    }
  s.active = count;
}

void PackMlp::products(const Token& t, Slice& s, float* scratch) const {
  const Mat& w = *t.m.down.w;
  float* sum = t.sums + s.index * w.oc;
  const uint32_t* list = t.list + s.first;
  std::memset(sum, 0, w.oc * sizeof(float));
  neurons_kernel(up.quant)(up, list, s.active, t.padded_in, scratch, t.up);
  const float* bias = t.bias(t.m.value);
  for (size_t i = 0; i < s.active; ++i) {
    const size_t j = list[i];
    const float h = t.act[j] * (bias ? t.up[j] + bias[j] : t.up[j]);
    t.hidden[j] = h;
    s.bad |= !std::isfinite(h);
  }
  matvec_kernel(w.quant)(w, {list, s.active}, t.hidden, sum, 0, w.oc, 0, s.active);
}

// Bytes that the slices have read so far, less those of up and down.
size_t PackMlp::total(const std::vector<Slice>& slices, const Token& t) {
  size_t candidates = 0;
  for (const Slice& s : slices) candidates += s.candidates, counts.checked += s.checked, counts.missed += s.missed;
  const size_t guessed = guess ? guess.codes.bytes() + (guess.offset ? up.f * sizeof(float) : 0) : 0;
  if (guess) counts.candidates += candidates;
  return guessed + (gate.data ? candidates * gate.neuron_bytes() : t.m.up.w->ic * t.m.up.w->part_bytes(padded(up.f)));
}

size_t PackMlp::fused(Densities& d, const Mlp& m, const float* in, float* x, const Pass& pass, bool open) {
  static thread_local Buffer<float> inputs, gates_of, acts, ups, hidden, partial;
  static thread_local Buffer<uint32_t> lists;
  static thread_local Buffer<uint64_t> planes;
  static thread_local std::vector<Slice> slices;
  const size_t f = padded(m.f), oc = m.down.w->oc, width = slice_width(m.f), n = (m.f + width - 1) / width;
  float* padded_in = inputs.get(up.width());
  std::memcpy(padded_in, in, up.d * sizeof(float));
  std::memset(padded_in + up.d, 0, (up.width() - up.d) * sizeof(float));
  GateGuess::Input packed{planes.get(up.width() / 64 * kGatePlanes), 0.f};
  if (guess) packed.step = kernels().gate_planes(in, up.d, packed.planes);
  const Token t{m,
                in,
                padded_in,
                gates_of.get(f),
                acts.get(f),
                ups.get(f),
                hidden.get(f),
                lists.get(f),
                partial.get(n * oc),
                packed,
                open,
                plant};
  slices.clear();
  for (size_t i = 0; i < n; ++i) slices.push_back({i, i * width, std::min((i + 1) * width, m.f)});
  std::vector<Slice>& all = slices;  // the workers have slices of their own
  const auto active = [&] {
    size_t sum = 0;
    for (const Slice& s : all) sum += s.active;
    return sum;
  };
  if (open) {
    parallel(n, [&](size_t i, size_t thread) { gates(t, all[i], scratch(thread, up.width())); });
    if (!decide(d, m, pass.past, active())) {
      ++counts.dense;
      const size_t read = total(all, t);
      return read + mlp_dense(m, in, 1, x, pass);
    }
  }
  parallel(n, [&](size_t i, size_t thread) {
    float* own = scratch(thread, up.width());
    if (!open) gates(t, all[i], own);
    products(t, all[i], own);
  });
  if (!open) decide(d, m, pass.past, active());
  plant = plant && !all[0].planted;
  const size_t bytes = total(all, t) + active() * (up.neuron_bytes() + m.down.w->channel_bytes());
  if (std::any_of(all.begin(), all.end(), [](const Slice& s) { return s.bad; })) {
    ++nonfinite;
    return bytes + mlp_dense(m, in, 1, x, {pass.many, pass.past, nullptr});
  }
  const size_t dense = m.up.w->bytes() + m.down.w->bytes();
  ++counts.packed;
  counts.bytes_skipped += dense > bytes ? dense - bytes : 0;  // rows of an odd width have more padding
  kernels().add_rows(x, t.sums, oc, n, oc);
  if (m.down.bias)
    for (size_t o = 0; o < oc; ++o) x[o] += m.down.bias[o];
  return bytes;
}
