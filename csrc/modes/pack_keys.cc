// When packed keys are used, and when a head goes without them.
#include "modes/pack_keys.h"

#include <algorithm>
#include <limits>

namespace {

constexpr float kBack = 0.8f;  // of the limit: a head that is off comes back below this

// Heads that the checks so far have switched off.
std::vector<bool> heads_off(const KeyCodes& codes, size_t heads, float limit) {
  std::vector<bool> off(heads, false);
  for (const Check& check : codes.checks)
    for (size_t h = 0; h < heads; ++h) off[h] = !(check.error[h] <= (off[h] ? kBack * limit : limit));
  return off;
}

}  // namespace

void PackCall::load(size_t head, float* to) const {
  for (size_t k = 0; k < g(); ++k)
    for (size_t i = 0; i < c.ep; ++i) to[k * c.ep + i] = i < e ? q[(head * g() + k) * e + i] * scale : 0.f;
}

// Codes of another form that an earlier plan left there are forgotten.
KeyCodes& PackKeys::state_of(const Pass& pass) const {
  KeyCodes& codes = state<KeyCodes>(pass, kAttend);
  if (codes.form == rule.form) return codes;
  pass.state->at[kAttend] = nullptr;
  return state<KeyCodes>(pass, kAttend);
}

bool PackKeys::all(const Span& s, size_t ep) const {
  // Else no block may lie between the first keys and the last.
  const size_t room = rule.keys.sinks_end(s) + rule.keys.recent + kCodeKeys;
  return rule.keys.all(s) || ep > kWidestCode || s.size() < rule.keys.recent + 2 * kCodeKeys || s.end < room;
}

void PackKeys::one(const PackCall& call, KeyCodes& codes, PackKeysCounts& now) const {
  const std::vector<bool> off = heads_off(codes, call.c.heads, rule.limit);
  const bool check = rule.check_every && call.position % rule.check_every == rule.phase % rule.check_every;
  const size_t keys = call.span().size(), row = call.c.row_bytes();
  const size_t dense = call.c.heads * keys * 2 * row;
  std::vector<Chosen> chosen(call.c.heads);
  attend_packed(rule, call, codes, check ? std::vector<bool>(call.c.heads, false) : off, chosen);
  size_t read = 0;
  for (size_t h = 0; h < call.c.heads; ++h) {
    now.keys += keys, now.kept += chosen[h].values, now.packed += !off[h];
    read += (chosen[h].count + chosen[h].values) * row + chosen[h].blocks * codes.block_bytes();
  }
  if (check) codes.checks.push_back(check_packed(call, chosen, now)), read += dense;
  now.heads += call.c.heads, now.bytes_read += read;
  now.bytes_skipped += static_cast<int64_t>(dense) - static_cast<int64_t>(read);
}

size_t PackKeys::attend(const Cache& c, const float* q, size_t stride, size_t tokens, size_t heads, size_t e,
                        size_t window, float scale, float* out, const Pass& pass) {
  if (tokens == 0) return 0;
  const auto dense = [&](size_t n) {
    return ::attend(c, q, stride, n, heads, e, pass.past, window, scale, out, pass.many);
  };
  PackKeysCounts now{};
  size_t t = 0;  // tokens with few keys come first and read them all
  for (; t < tokens && all(span_of(pass.past + t, window), c.ep); ++t) {
    const size_t keys = c.heads * span_of(pass.past + t, window).size();
    now.heads += c.heads, now.keys += keys, now.kept += keys;
  }
  now.bytes_read += dense(t);
  if (t < tokens) {
    KeyCodes& codes = state_of(pass);
    codes.trim(pass.past);  // keys from there on have just been stored
    const size_t coded = codes.grow(c, pass.past + tokens);
    now.bytes_read += coded, now.bytes_skipped -= static_cast<int64_t>(coded);
    for (; t < tokens; ++t)
      one({c, q + t * stride, heads, e, pass.past + t, window, scale, out + t * heads * e}, codes, now);
  }
  if (plant) out[0] = std::numeric_limits<float>::quiet_NaN(), plant = false;
  if (!kernels().finite(out, tokens * heads * e)) {
    ++nonfinite;
    const size_t again = dense(tokens);
    now.bytes_read += again, now.bytes_skipped -= static_cast<int64_t>(again);
  }
  counts += now;
  return now.bytes_read;
}
