// One token reads the rows of up and the channels of down that won, and where gates are guessed the rows of the gate
// that may win. Several tokens read all weights anyway: what did not win is zero, which gives what the tokens would
// give one by one.
#include "modes/neurons.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>
#include <limits>

#include "buffer.h"
#include "pool.h"

const char* KwtaMlp::misfit(const Mlp& m) const {
  if (!m.gated) return "neurons are chosen by a gate, and this MLP has none";
  if (rows.d != m.up.w->ic || rows.f != m.f) return "a slot's neurons are of another shape than its MLP";
  if (tiles && (tiles->first != m.gate || tiles->whole->oc != m.up.w->oc)) return "a slot's tiles are not of its gate";
  return rows.quant == m.up.w->quant ? nullptr : "a slot's neurons are of another precision than its MLP";
}

size_t KwtaMlp::run(const Mlp& m, const float* in, size_t tokens, float* x, const Pass& pass) {
  if (tokens == 0) return 0;
  Held& held = state<Held>(pass, kMlp);
  return tokens == 1 ? one(held, m, in, x, pass) : many(held, m, in, tokens, x, pass);
}

// The winners among act(gate), without zeros where those are dropped. Held winners stay as they are: what is zero now
// may not be at the next token.
Channels KwtaMlp::choose(Held& held, const float* a, size_t position) {
  static thread_local Buffer<uint32_t> others;
  const Channels won = winners.choose(held, a, position);
  if (!zeros) return won;
  uint32_t* list = others.get(won.count);
  size_t kept = 0;
  for (size_t i = 0; i < won.count; ++i)
    if (a[won.list[i]] != 0.f) list[kept++] = won.list[i];
  winners.counts.kept -= won.count - kept;
  return {list, kept};
}

// h = a * (u + bias) where a neuron won, zero elsewhere; u is only read there.
void KwtaMlp::join(const Channels& won, const float* a, const float* u, const float* bias, float* h) {
  std::memset(h, 0, rows.f * sizeof(float));
  for (size_t i = 0; i < won.count; ++i) {
    const size_t j = won.list[i];
    h[j] = a[j] * (bias ? u[j] + bias[j] : u[j]);
  }
  if (plant && won.count) h[won.list[0]] = std::numeric_limits<float>::quiet_NaN(), plant = false;
}

// How many of the winners among all gates a (f) are candidates.
void KwtaMlp::look(const Channels& likely, const float* a) {
  static thread_local Buffer<uint32_t> lists;
  uint32_t* won = lists.get(rows.f);
  const size_t count = winners.chooser.choose(a, won);
  for (size_t i = 0, at = 0; i < count; ++i) {
    if (zeros && a[won[i]] == 0.f) continue;
    while (at < likely.count && likely.list[at] < won[i]) ++at;
    ++guesses.checked;
    guesses.missed += at == likely.count || likely.list[at] != won[i];
  }
}

// Of all act(gate) (f), zero where a neuron is no candidate: it cannot win.
void KwtaMlp::keep(const Channels& likely, size_t position, float* a) {
  if (RankGuess::checks(position)) look(likely, a);
  for (size_t j = 0, at = 0; j < rows.f; ++j) {
    const bool here = at < likely.count && likely.list[at] == j;
    at += here;
    if (!here) a[j] = 0.f;
  }
}

// act(gate) of one token's candidates, zero elsewhere; false: the guess is not finite.
bool KwtaMlp::likely_gates(const Mlp& m, const float* in, size_t position, float* gate, float* a, size_t& bytes) {
  const float* bias = m.up.bias ? m.up.bias + m.gate : nullptr;
  const bool check = RankGuess::checks(position);
  return guess.candidates(m, in, 1, winners.chooser.norms, bytes, [&](size_t, const Channels& likely) {
    guesses.guessed += m.f, guesses.candidates += likely.count;
    if (!check) std::memset(gate, 0, m.f * sizeof(float));
    bytes += neurons(guess.gate, check ? nullptr : likely.list, check ? m.f : likely.count, in, gate);
    for (size_t i = 0; bias && i < (check ? m.f : likely.count); ++i) {
      const size_t j = check ? i : likely.list[i];
      gate[j] += bias[j];
    }
    kernels().act(m.act, gate, nullptr, m.f, a);
    if (check) keep(likely, position, a);
  });
}

namespace {

// What the gate sees of its input.
Used used_of(const Linear& l, const float* in, const Pass& pass) {
  return taken(l.input, pass) ? l.input->choose(in, pass.past, l.place, pass) : Used{{nullptr, l.w->ic}};
}

}  // namespace

// Lists the neurons of a slice that its gates let through; how many. used: what the gate sees of its input; null: all.
// fine: of tiles, how many channels were read whole.
size_t KwtaMlp::open_neurons(const NeuronSlices& s, size_t slice, const Used* used, float* scratch,
                             size_t& fine) const {
  static thread_local Buffer<uint32_t> scores;
  const size_t first = s.first(slice), last = s.last(slice), n = last - first;
  const float* norms = winners.chooser.norms ? winners.chooser.norms + first : nullptr;
  const float least = std::max(winners.chooser.rule.least, std::numeric_limits<float>::denorm_min());  // never a zero
  if (used)
    s.gates(first, last, *used);
  else if (tiles)
    fine = s.gates(first, last, *tiles, BestOf(best, s.in));
  else
    s.gates(first, last, gate, scratch);
  kernels().act(s.m.act, s.gate + first, nullptr, n, s.act + first);
  uint32_t* list = s.list + first;
  const size_t found = kernels().select_above(s.act + first, norms, n, least, scores.get(n), list);
  for (size_t i = 0; i < found; ++i) list[i] += static_cast<uint32_t>(first);
  return found;
}

// Where a neuron's fate hangs on its own gate one region of the pool does it all.
size_t KwtaMlp::sliced(Held& held, const Mlp& m, const float* in, float* x, const Pass& pass) {
  static thread_local std::vector<size_t> counts_of;
  const NeuronSlices s(m, rows, in);
  const bool whole_gate = (gate.data || tiles) && !taken(m.up.input, pass);
  const Used used = whole_gate ? Used{{nullptr, 0}} : used_of(m.up, in, pass);
  counts_of.assign(2 * s.count, 0);
  size_t *active = counts_of.data(), *fine = active + s.count;  // the workers have others
  std::atomic<bool> finite{true};
  parallel_runs(s.count, [&](size_t slice, size_t, size_t thread) {
    const size_t first = s.first(slice), last = s.last(slice);
    float* own = scratch(thread, rows.width());
    const size_t found = open_neurons(s, slice, whole_gate ? nullptr : &used, own, fine[slice]);
    if (plant && slice == 0 && found) s.act[s.list[first]] = std::numeric_limits<float>::quiet_NaN();
    const bool good = kernels().finite(s.gate + first, last - first) && s.products(slice, found, own);
    if (!good) finite = false;
    active[slice] = found;
  });
  plant = plant && !active[0];
  size_t won = 0;
  for (size_t slice = 0; slice < s.count; ++slice) {
    std::memmove(s.list + won, s.list + s.first(slice), active[slice] * sizeof(uint32_t));
    won += active[slice];
  }
  KwtaCounts& counts = winners.counts;
  winners.note(held, {s.list, won}, pass.past);
  const size_t gates = !whole_gate ? used_bytes(*m.up.w, used, m.gate, m.gate + padded(m.f))
                       : tiles     ? tiles->bytes() + fine[0] * tiles->whole->part_bytes(tiles->oc)
                                   : gate.bytes();
  const size_t read = won * (rows.neuron_bytes() + m.down.w->channel_bytes());
  counts.bytes_read += read;
  if (!finite) return gates + read + dense(m, in, 1, x, pass);
  const size_t all = m.up.w->bytes() + m.down.w->bytes();
  counts.bytes_skipped += static_cast<int64_t>(all - std::min(gates + read, all));  // rows of an odd width have padding
  s.add_up(x);
  return gates + read;
}

size_t KwtaMlp::one(Held& held, const Mlp& m, const float* in, float* x, const Pass& pass) {
  static thread_local Buffer<float> gates, acts, hidden, ups;
  if (!zeros && winners.duty.seed && pass.past % winners.duty.every != 0) {  // dense, whatever the gate says
    winners.choose(held, nullptr, pass.past);
    return all(m, in, x, pass);
  }
  const Mat& w = *m.up.w;
  const bool others = taken(m.up.input, pass), guessed = guess && !others;
  if (by_itself() && !guessed && !taken(m.down.input, pass)) return sliced(held, m, in, x, pass);
  float *gate = gates.get(w.oc), *a = acts.get(m.f), *h = hidden.get(m.f), *u = ups.get(m.f);
  KwtaCounts& counts = winners.counts;
  size_t bytes = 0;
  if (guessed) {
    const bool finite = likely_gates(m, in, pass.past, gate, a, bytes);
    counts.bytes_read += bytes, counts.bytes_skipped -= static_cast<int64_t>(bytes);  // nothing is skipped for it yet
    if (!finite) return bytes + dense(m, in, 1, x, pass);
  } else {
    const size_t o0 = m.gate, o1 = m.gate + padded(m.f);
    bytes = apply_used(w, used_of(m.up, in, pass), m.up.bias, in, gate, o0, o1);
    kernels().act(m.act, gate + m.gate, nullptr, m.f, a);
  }
  const Channels won = choose(held, a, pass.past);
  if (won.count == m.f && !zeros) return bytes + all(m, in, x, pass);
  const size_t read = neurons(rows, won.list, won.count, in, u);
  bytes += read;
  counts.bytes_read += read;
  if (guessed) counts.bytes_skipped -= static_cast<int64_t>(read);
  join(won, a, u, m.up.bias ? m.up.bias + m.value : nullptr, h);
  if (!kernels().finite(h, m.f)) return bytes + dense(m, in, 1, x, pass);
  const size_t paid = guessed ? 0 : std::min(bytes, w.bytes());  // rows of an odd width have more padding
  counts.bytes_skipped += static_cast<int64_t>(w.bytes() - paid);
  return bytes + down(m, won, h, x, pass);
}

// What likely_gates does, for several tokens whose gates (tokens, f) are all there.
bool KwtaMlp::keep_likely(const Mlp& m, const float* in, size_t tokens, size_t past, float* a, size_t& bytes) {
  const size_t d = m.up.w->ic;
  for (size_t t = 0; t < tokens; t += kFewTokens) {
    const auto use = [&](size_t i, const Channels& likely) {
      guesses.guessed += m.f, guesses.candidates += likely.count;
      keep(likely, past + t + i, a + (t + i) * m.f);
    };
    const size_t n = std::min(kFewTokens, tokens - t);
    if (!guess.candidates(m, in + t * d, n, winners.chooser.norms, bytes, use)) return false;
  }
  return true;
}

size_t KwtaMlp::many(Held& held, const Mlp& m, const float* in, size_t tokens, float* x, const Pass& pass) {
  static thread_local Buffer<float> ups, others, acts, hidden;
  const size_t stride = m.up.w->oc;
  float *up = ups.get(tokens * stride), *a = acts.get(tokens * m.f), *h = hidden.get(tokens * m.f);
  size_t bytes = apply(*m.up.w, m.up.bias, in, tokens, up, false, pass.many);
  float* gates = up;
  if (taken(m.up.input, pass)) {  // it chooses for the gate alone, `up` sees all: the map is computed once more
    gates = others.get(tokens * stride);
    bytes += m.up.input->parts(m.up, in, tokens, gates, pass);
  }
  if (tiles && gates == up) {
    gates = others.get(tokens * stride);
    uint64_t fine = 0;
    bytes += apply_coarse_but_best(*tiles->whole, best, m.up.bias, in, tokens, gates, false, pass.many, fine);
  }
  by_rows(tokens, [&](size_t first, size_t n) {
    for (size_t t = first; t < first + n; ++t)
      kernels().act(m.act, gates + t * stride + m.gate, nullptr, m.f, a + t * m.f);
  });
  if (guess && gates == up && !keep_likely(m, in, tokens, pass.past, a, bytes))
    return bytes + dense(m, in, tokens, x, pass);
  for (size_t t = 0; t < tokens; ++t) {
    const Channels won = choose(held, a + t * m.f, pass.past + t);
    join(won, a + t * m.f, up + t * stride + m.value, nullptr, h + t * m.f);
  }
  if (kernels().finite(h, tokens * m.f)) return bytes + apply(m.down, h, tokens, x, true, pass);
  return bytes + dense(m, in, tokens, x, pass);
}

// A slot in front of down chooses for itself, and counts what it reads.
size_t KwtaMlp::down(const Mlp& m, const Channels& won, const float* h, float* x, const Pass& pass) {
  if (taken(m.down.input, pass)) return apply(m.down, h, 1, x, true, pass);
  const size_t read = apply_some(*m.down.w, won, m.down.bias, h, x, true);
  winners.counts.bytes_read += read;
  winners.counts.bytes_skipped += static_cast<int64_t>(m.down.w->bytes() - read);
  return read;
}

// All neurons won: the dense MLP, bit for bit.
size_t KwtaMlp::all(const Mlp& m, const float* in, float* x, const Pass& pass) {
  if (!taken(m.up.input, pass)) winners.counts.bytes_read += rows.bytes();
  if (!taken(m.down.input, pass)) winners.counts.bytes_read += m.down.w->bytes();
  return mlp_dense(m, in, 1, x, pass);
}

// Instead of something that is not finite.
size_t KwtaMlp::dense(const Mlp& m, const float* in, size_t tokens, float* x, const Pass& pass) {
  ++nonfinite;
  return mlp_dense(m, in, tokens, x, {pass.many, pass.past, nullptr});
}
