// When skipping pays, and how several tokens, or slots in front of the linear maps, go map by map: what is not active
// is zero, which gives what the tokens would give one by one.
#include "modes/pack_mlp.h"

#include <limits>
#include <utility>

#include "buffer.h"
#include "pool.h"

Densities::Choice Densities::choice(size_t position, double most) const {
  const size_t start = position / kWindow * kWindow, end = std::min(position + 1, active.size());
  const auto measured = [&](size_t from) {
    while (from < end && active[from] == kUnknown) ++from;
    return from;
  };
  const size_t early = measured(position / kLong * kLong);
  if (early < end && active[early] > kHopeless * most) return Choice::dense;
  const size_t first = measured(std::max(start, early));
  if (first >= end) return Choice::open;
  double sum = active[first], n = 1;
  for (size_t i = start < kWindow ? 0 : start - kWindow; i < start; ++i)
    if (active[i] != kUnknown) sum += active[i], ++n;
  return sum > most * n ? Choice::dense : Choice::packed;
}

// Notes what a token was measured to have, and says whether it is packed.
bool PackMlp::decide(Densities& d, const Mlp& m, size_t position, size_t active) {
  d.active.resize(position, Densities::kUnknown);
  d.active.push_back(static_cast<uint32_t>(active));
  counts.neurons += m.f, counts.active += active;
  return d.choice(position, rho * static_cast<double>(m.f)) == Densities::Choice::packed;
}

const char* PackMlp::misfit(const Mlp& m) const {
  if (up.d != m.up.w->ic || up.f != m.f) return "a slot's neurons are of another shape than its MLP";
  if (up.quant != m.up.w->quant) return "a slot's neurons are of another precision than its MLP";
  return up.data && !m.gated ? "an MLP without a gate has no rows of up to skip" : nullptr;
}

size_t PackMlp::run(const Mlp& m, const float* in, size_t tokens, float* x, const Pass& pass) {
  if (tokens == 0) return 0;
  Densities& d = state<Densities>(pass, kMlp);
  d.trim(pass.past);
  counts.steps += tokens;
  if (tokens > 1) return rows(d, m, in, tokens, x, pass);
  const size_t bytes = one(d, m, in, x, pass);
  counts.bytes_read += bytes;
  return bytes;
}

size_t PackMlp::one(Densities& d, const Mlp& m, const float* in, float* x, const Pass& pass) {
  const auto choice = d.choice(pass.past, rho * static_cast<double>(m.f));
  if (choice == Densities::Choice::dense) {
    ++counts.dense;
    return mlp_dense(m, in, 1, x, pass);
  }
  if (!up.data || taken(m.up.input, pass) || taken(m.down.input, pass)) return rows(d, m, in, 1, x, pass);
  return fused(d, m, in, x, pass, choice == Densities::Choice::open);
}

// ---------------------------------------------------------------- map by map

struct PackMlp::Rows {
  const Mlp& m;
  const float* in;           // (tokens, d)
  float *both, *act, *h;     // (tokens, oc of up), (tokens, f) twice
  uint64_t *active, *maybe;  // (tokens, f / 64): above eps, and the candidates
  size_t words;
  size_t gate() const { return m.gated ? m.gate : m.value; }
  const float* gates(size_t t) const { return both + t * m.up.w->oc + gate(); }
};

// Activation, bitmap and candidates of token t.
void PackMlp::row(const Rows& r, size_t t) const {
  static thread_local Buffer<uint64_t> planes;
  const Mlp& m = r.m;
  const float* value = r.both + t * m.up.w->oc + m.value;
  PackSums sums;
  kernels().act(m.act, r.gates(t), nullptr, m.f, r.act + t * m.f);
  kernels().act(m.act, r.gates(t), m.gated ? value : nullptr, m.f, r.h + t * m.f);
  kernels().pack_bits(r.act + t * m.f, m.f, eps, r.active + t * r.words, nullptr, &sums);
  if (!guess) return;
  GateGuess::Input packed{planes.get(up.width() / 64 * kGatePlanes), 0.f};
  packed.step = kernels().gate_planes(r.in + t * up.d, up.d, packed.planes);
  const float* bias = m.up.bias ? m.up.bias + r.gate() : nullptr;
  const size_t width = slice_width(m.f);
  for (size_t j = 0; j < m.f; j += width)
    guess.candidates(packed, bias, m.act, j, std::min(j + width, m.f), r.maybe + t * r.words + j / 64);
}

// Zero where token t, at `position`, is not active; false: it is dense.
bool PackMlp::keep_active(Densities& d, const Rows& r, size_t t, size_t position, bool& bad) {
  uint64_t *bits = r.active + t * r.words, *maybe = r.maybe + t * r.words;
  const auto choice = d.choice(position, rho * static_cast<double>(r.m.f));
  if (choice == Densities::Choice::dense) return false;
  if (guess) {
    const size_t all = bits_of(bits, r.m.f);
    for (size_t w = 0; w < r.words; ++w) bits[w] &= maybe[w];
    counts.candidates += choice == Densities::Choice::open ? r.m.f : bits_of(maybe, r.m.f);
    if (choice == Densities::Choice::open) counts.checked += all, counts.missed += all - bits_of(bits, r.m.f);
  }
  if (!decide(d, r.m, position, bits_of(bits, r.m.f))) return false;
  float* h = r.h + t * r.m.f;
  for (size_t j = 0; j < r.m.f; ++j)
    if (!(bits[j / 64] >> (j % 64) & 1)) h[j] = 0.f;
  if (std::exchange(plant, false)) h[0] = std::numeric_limits<float>::quiet_NaN();
  bad |= !kernels().finite(r.gates(t), r.m.f) || !kernels().finite(h, r.m.f);
  return true;
}

size_t PackMlp::rows(Densities& d, const Mlp& m, const float* in, size_t tokens, float* x, const Pass& pass) {
  static thread_local Buffer<float> ups, acts, products;
  static thread_local Buffer<uint64_t> bits;
  static thread_local Buffer<uint32_t> lists;
  const size_t words = padded(m.f) / 64;
  uint64_t* active = bits.get(2 * tokens * words);
  const Rows r{m,
               in,
               ups.get(tokens * m.up.w->oc),
               acts.get(tokens * m.f),
               products.get(tokens * m.f),
               active,
               active + tokens * words,
               words};
  size_t bytes = apply(m.up, in, tokens, r.both, false, pass);
  by_rows(tokens, [&](size_t first, size_t n) {
    for (size_t t = first; t < first + n; ++t) row(r, t);
  });
  bool bad = false, packed = false;
  for (size_t t = 0; t < tokens; ++t) {
    packed = keep_active(d, r, t, pass.past + t, bad);
    ++(packed ? counts.packed : counts.dense);
  }
  if (bad) {
    ++nonfinite;
    return bytes + mlp_dense(m, in, tokens, x, {pass.many, pass.past, nullptr});
  }
  if (tokens > 1 || !packed || taken(m.down.input, pass)) return bytes + apply(m.down, r.h, tokens, x, true, pass);
  uint32_t* list = lists.get(m.f);
  const size_t count = list_of(active, m.f, 0, list);
  const size_t read = apply_some(*m.down.w, {list, count}, m.down.bias, r.h, x, true);
  counts.bytes_skipped += m.down.w->bytes() - read;
  return bytes + read;
}
