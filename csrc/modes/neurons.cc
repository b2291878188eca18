// One token reads the rows of up and the channels of down that won. Several tokens read all weights anyway: what did
// not win is zero, which gives what the tokens would give one by one.
#include "modes/neurons.h"

#include <cstring>
#include <limits>

#include "buffer.h"
#include "pool.h"

const char* KwtaMlp::misfit(const Mlp& m) const {
  if (!m.gated) return "neurons are chosen by a gate, and this MLP has none";
  if (rows.d != m.up.w->ic || rows.f != m.f) return "a slot's neurons are of another shape than its MLP";
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

size_t KwtaMlp::one(Held& held, const Mlp& m, const float* in, float* x, const Pass& pass) {
  static thread_local Buffer<float> gates, acts, hidden, ups;
  if (!zeros && winners.duty.seed && pass.past % winners.duty.every != 0) {  // dense, whatever the gate says
    winners.choose(held, nullptr, pass.past);
    return all(m, in, x, pass);
  }
  const Mat& w = *m.up.w;
  float *gate = gates.get(w.oc), *a = acts.get(m.f), *h = hidden.get(m.f), *u = ups.get(m.f);
  const Channels used =
      taken(m.up.input, pass) ? m.up.input->choose(in, pass.past, kUp, pass) : Channels{nullptr, w.ic};
  size_t bytes = apply_part(w, used, m.up.bias, in, gate, m.gate, m.gate + padded(m.f));
  kernels().act(m.act, gate + m.gate, nullptr, m.f, a);
  const Channels won = choose(held, a, pass.past);
  if (won.count == m.f && !zeros) return bytes + all(m, in, x, pass);
  const size_t read = neurons(rows, won.list, won.count, in, u);
  bytes += read;
  winners.counts.bytes_read += read;
  winners.counts.bytes_skipped += w.bytes() > bytes ? w.bytes() - bytes : 0;  // rows of an odd width have more padding
  join(won, a, u, m.up.bias ? m.up.bias + m.value : nullptr, h);
  if (kernels().finite(h, m.f)) return bytes + down(m, won, h, x, pass);
  ++nonfinite;
  return bytes + mlp_dense(m, in, 1, x, {pass.many, pass.past, nullptr});
}

// The gate sees only the channels that a slot in front of it chooses, `up` sees all: the map is computed once more.
size_t KwtaMlp::gates_of_winners(const Mlp& m, const float* in, size_t tokens, const float*& gates, const Pass& pass) {
  static thread_local Buffer<float> kept, rows;
  const size_t d = m.up.w->ic;
  float *x = kept.get(tokens * d), *out = rows.get(tokens * m.up.w->oc);
  std::memset(x, 0, tokens * d * sizeof(float));
  for (size_t t = 0; t < tokens; ++t) {
    const Channels used = m.up.input->choose(in + t * d, pass.past + t, kUp, pass);
    for (size_t i = 0; i < used.count; ++i) {
      const size_t c = used.list ? used.list[i] : i;
      x[t * d + c] = in[t * d + c];
    }
  }
  gates = out;
  return ::apply(*m.up.w, m.up.bias, x, tokens, out, false, pass.many);
}

size_t KwtaMlp::many(Held& held, const Mlp& m, const float* in, size_t tokens, float* x, const Pass& pass) {
  static thread_local Buffer<float> ups, acts, hidden;
  const size_t stride = m.up.w->oc;
  float *up = ups.get(tokens * stride), *a = acts.get(tokens * m.f), *h = hidden.get(tokens * m.f);
  size_t bytes = apply(*m.up.w, m.up.bias, in, tokens, up, false, pass.many);
  const float* gates = up;
  if (taken(m.up.input, pass)) bytes += gates_of_winners(m, in, tokens, gates, pass);
  by_rows(tokens, [&](size_t first, size_t n) {
    for (size_t t = first; t < first + n; ++t)
      kernels().act(m.act, gates + t * stride + m.gate, nullptr, m.f, a + t * m.f);
  });
  for (size_t t = 0; t < tokens; ++t) {
    const Channels won = choose(held, a + t * m.f, pass.past + t);
    join(won, a + t * m.f, up + t * stride + m.value, nullptr, h + t * m.f);
  }
  if (kernels().finite(h, tokens * m.f)) return bytes + apply(m.down, h, tokens, x, true, pass);
  ++nonfinite;
  return bytes + mlp_dense(m, in, tokens, x, {pass.many, pass.past, nullptr});
}

// A slot in front of down chooses for itself, and counts what it reads.
size_t KwtaMlp::down(const Mlp& m, const Channels& won, const float* h, float* x, const Pass& pass) {
  if (taken(m.down.input, pass)) return apply(m.down, h, 1, x, true, pass);
  const size_t read = apply_some(*m.down.w, won, m.down.bias, h, x, true);
  winners.counts.bytes_read += read;
  winners.counts.bytes_skipped += m.down.w->bytes() - read;
  return read;
}

// All neurons won: the dense MLP, bit for bit.
size_t KwtaMlp::all(const Mlp& m, const float* in, float* x, const Pass& pass) {
  if (!taken(m.up.input, pass)) winners.counts.bytes_read += rows.bytes();
  if (!taken(m.down.input, pass)) winners.counts.bytes_read += m.down.w->bytes();
  return mlp_dense(m, in, 1, x, pass);
}
