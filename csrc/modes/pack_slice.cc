// One token in slices of neurons: the gates of a slice, all or some, and which of them are active.
#include <cstring>
#include <limits>
#include <utility>

#include "buffer.h"
#include "modes/pack_mlp.h"
#include "pool.h"

struct PackMlp::Token : NeuronSlices {
  GateGuess::Input packed;
  bool whole, plant;  // all gates are computed, whatever the guess
};
// Neurons [first, last), a task's own, and so a line of memory.
struct alignas(64) PackMlp::Slice {
  size_t index, first, last;
  size_t candidates = 0, active = 0, checked = 0, missed = 0;
  bool bad = false, planted = false;
};

// Gates of the candidates, side by side from t.gate[first] on, their neurons in the list; how many.
size_t PackMlp::some_gates(const Token& t, Slice& s, float* scratch) const {
  static thread_local Buffer<uint64_t> words;
  const size_t n = s.last - s.first;
  uint64_t* bits = words.get(padded(n) / 64);
  uint32_t* list = t.list + s.first;
  guess.candidates(t.packed, t.bias(t.m.gate), t.m.act, s.first, s.last, bits);
  const size_t count = list_of(bits, n, s.first, list);
  neurons_kernel(gate.quant)(gate, list, count, t.padded_in, scratch, t.value);  // up is computed later
  const float* bias = t.bias(t.m.gate);
  for (size_t i = 0; i < count; ++i) t.gate[s.first + i] = t.value[list[i]] + (bias ? bias[list[i]] : 0.f);
  return count;
}

size_t PackMlp::all_gates(const Token& t, Slice& s, float* scratch) const {
  if (gate.data)
    t.gates(s.first, s.last, gate, scratch);
  else
    t.gates(s.first, s.last, {{nullptr, up.d}});
  return s.last - s.first;
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

// Bytes that the slices have read so far, less those of up and down.
size_t PackMlp::total(const std::vector<Slice>& slices, const Token& t) {
  size_t candidates = 0;
  for (const Slice& s : slices) candidates += s.candidates, counts.checked += s.checked, counts.missed += s.missed;
  const size_t guessed = guess ? guess.codes.bytes() + (guess.offset ? up.f * sizeof(float) : 0) : 0;
  if (guess) counts.candidates += candidates;
  return guessed + (gate.data ? candidates * gate.neuron_bytes() : t.m.up.w->ic * t.m.up.w->part_bytes(padded(up.f)));
}

size_t PackMlp::fused(Densities& d, const Mlp& m, const float* in, float* x, const Pass& pass, bool open) {
  static thread_local Buffer<uint64_t> planes;
  static thread_local std::vector<Slice> slices;
  GateGuess::Input packed{planes.get(up.width() / 64 * kGatePlanes), 0.f};
  if (guess) packed.step = kernels().gate_planes(in, up.d, packed.planes);
  const Token t{{m, up, in}, packed, open, plant};
  slices.clear();
  for (size_t i = 0; i < t.count; ++i) slices.push_back({i, t.first(i), t.last(i)});
  std::vector<Slice>& all = slices;  // the workers have slices of their own
  const auto active = [&] {
    size_t sum = 0;
    for (const Slice& s : all) sum += s.active;
    return sum;
  };
  if (open) {
    parallel_runs(t.count, [&](size_t i, size_t, size_t thread) { gates(t, all[i], scratch(thread, up.width())); });
    if (!decide(d, m, pass.past, active())) {
      ++counts.dense;
      const size_t read = total(all, t);
      return read + mlp_dense(m, in, 1, x, pass);
    }
  }
  parallel_runs(t.count, [&](size_t i, size_t, size_t thread) {
    float* own = scratch(thread, up.width());
    if (!open) gates(t, all[i], own);
    all[i].bad |= !t.products(i, all[i].active, own);
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
  t.add_up(x);
  return bytes;
}
