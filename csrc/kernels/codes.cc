// Packing keys and queries into bits: centred, rotated, and cut down to signs or to two bitmaps.
#include "keys.h"

namespace ISA {
namespace {

// Half of the dimensions change their sign before they are mixed, or keys that are alike everywhere would all end up in
// one of them.
constexpr uint64_t kFlips = 0x9e3779b97f4a7c15;
constexpr float kEighth = 0.125f;  // keeps lengths: 1 / sqrt(64)
constexpr float kSteps[] = {1.596f, 0.9957f, 0.586f,
                            0.3352f};  // by bits, times the root mean square: lose least of a bell curve
constexpr float kMostScale = 1e4f, kMostJump = 4.f, kSmooth = 0.1f;

float flip(size_t d) { return kFlips >> d & 1 ? -kEighth : kEighth; }

// Dimensions of n columns, mixed with one another: a Hadamard transform. x (dims, n).
template <size_t dims, size_t n>
void mix(float* x) {
  for (size_t half = 1; half < dims; half *= 2)
    for (size_t d = 0; d < dims; ++d) {
      if (d & half) continue;
      float *a = x + d * n, *b = x + (d + half) * n;
      for (size_t i = 0; i < n; ++i) {
        const float one = a[i], other = b[i];
        a[i] = one + other, b[i] = one - other;
      }
    }
}

// 64 dimensions of a block of keys. x (64, kCodeKeys).
void rotate_keys(float* x) {
  for (size_t d = 0; d < 64; ++d)
    for (size_t i = 0; i < kCodeKeys; ++i) x[d * kCodeKeys + i] *= flip(d);
  mix<64, kCodeKeys>(x);
}

// 64 dimensions of a query, the same numbers in the same order: as a square, whose columns are mixed before its rows.
void rotate_query(float* x) {
  float turned[64];
  for (size_t j = 0; j < 8; ++j)
    for (size_t i = 0; i < 8; ++i) turned[j * 8 + i] = x[i * 8 + j] * flip(i * 8 + j);
  mix<8, 8>(turned);
  for (size_t i = 0; i < 8; ++i)
    for (size_t j = 0; j < 8; ++j) x[i * 8 + j] = turned[j * 8 + i];
  mix<8, 8>(x);
}

// The p-th bit of each of 64 bytes, as a word.
uint64_t bits_of(const uint8_t* bytes, size_t p) {
  uint64_t word = 0;
  for (size_t i = 0; i < 8; ++i) {
    uint64_t eight = 0;
    for (size_t b = 0; b < 8; ++b) eight |= static_cast<uint64_t>(bytes[i * 8 + b]) << (8 * b);
    // Byte b's bit comes to stand at 56 + b.
    word |= (eight >> p & 0x0101010101010101) * 0x0102040810204080 >> 56 << (8 * i);
  }
  return word;
}

template <class Key>
void read_rows(const Keys& kv, const void* base, const float* scales, size_t first, float* rows) {
  for (size_t t = 0; t < kCodeKeys; ++t) {
    const V scale = set1(Key::scale(scales, first + t));
    for (size_t e = 0; e < kv.ep; e += kLanes)
      store(rows + t * kv.ep + e, mul(Key::read(base, (first + t) * kv.ep + e), scale));
  }
}

void sum_rows(const float* rows, size_t ep, float* out) {
  std::memset(out, 0, ep * sizeof(float));
  for (size_t t = 0; t < kCodeKeys; ++t)
    for (size_t e = 0; e < ep; ++e) out[e] += rows[t * ep + e];
}

// Rows less their mean, which is rounded as it is kept.
void centre(float* rows, size_t ep, const float* sum, uint16_t* mean) {
  for (size_t e = 0; e < ep; e += kLanes) {
    store_f16(mean + e, mul(load(sum + e), set1(1.f / kCodeKeys)));
    const V rounded = load_f16(mean + e);
    for (size_t t = 0; t < kCodeKeys; ++t) store(rows + t * ep + e, sub(load(rows + t * ep + e), rounded));
  }
}

// Keys (kCodeKeys, ep) -> dimensions (ep padded to 64, kCodeKeys).
void turn(const float* rows, size_t ep, float* x) {
  std::memset(x, 0, (ep + 63) / 64 * 64 * kCodeKeys * sizeof(float));
  for (size_t e = 0; e < ep; ++e)
    for (size_t t = 0; t < kCodeKeys; ++t) x[e * kCodeKeys + t] = rows[t * ep + e];
}

struct Sums {
  float square[kCodeKeys], magnitude[kCodeKeys], active[kCodeKeys];
};

// Of every key over its dimensions: squares, and the magnitudes of those above eps.
void measure(const float* x, size_t dims, const float* eps, Sums& s) {
  std::memset(&s, 0, sizeof s);
  for (size_t d = 0; d < dims; ++d)
    for (size_t t = 0; t < kCodeKeys; ++t) {
      const float v = x[d * kCodeKeys + t], size = std::fabs(v);
      s.square[t] += v * v;
      s.magnitude[t] += size > eps[t] ? size : 0.f;
      s.active[t] += size > eps[t] ? 1.f : 0.f;
    }
}

// Bit d of words[t]: whether sign * x[d][t] is above eps, or |x| where sign is zero.
void bits_of(const float* x, float sign, const float* eps, uint64_t* words) {
  for (size_t t = 0; t < kCodeKeys; ++t) words[t] = 0;
  for (size_t d = 0; d < 64; ++d)
    for (size_t t = 0; t < kCodeKeys; ++t) {
      const float v = x[d * kCodeKeys + t];
      words[t] |= static_cast<uint64_t>((sign == 0.f ? std::fabs(v) : sign * v) > eps[t]) << d;
    }
}

// Key t of a block is in group t % kCodeStep, where it is number t / kCodeStep.
void put_words(const uint64_t* words, size_t w, size_t each, uint64_t* bits) {
  for (size_t t = 0; t < kCodeKeys; ++t) bits[(t % kCodeStep * each + w) * kCodeGroup + t / kCodeStep] = words[t];
}

// Dimensions that a root mean square is over: rotating spreads a key over all of a word.
float spread(const CodeForm& form, size_t ep) { return static_cast<float>(form.centred() ? (ep + 63) / 64 * 64 : ep); }

void find_eps(const CodeForm& form, size_t dims, size_t ep, const float* x, float* eps) {
  Sums s;
  for (size_t t = 0; t < kCodeKeys; ++t) eps[t] = form.code == Code::signs ? -1.f : form.eps;
  if (form.code == Code::signs || form.eps >= 0) return;
  measure(x, dims, eps, s);
  for (size_t t = 0; t < kCodeKeys; ++t) eps[t] = -form.eps * std::sqrt(s.square[t] / spread(form, ep));
}

// What a count of bits is multiplied with: for signs |x|^2 / sum|x|, which is right on average beside a query of many
// bits, else the mean |x| of the active ones. The document's forms smooth it from key to key and cap its jumps.
void put_scales(const CodeForm& form, const Sums& s, float before, uint16_t* scales) {
  for (size_t t = 0; t < kCodeKeys; ++t) {
    const float over = form.code == Code::signs ? s.magnitude[t] : s.active[t];
    float scale = over > 0 ? (form.code == Code::signs ? s.square[t] : s.magnitude[t]) / over : 0.f;
    if (!form.centred() && before > 0)
      scale = before + kSmooth * ((scale < kMostJump * before ? scale : kMostJump * before) - before);
    scale = scale < kMostScale ? scale : kMostScale;  // a NaN too
    before = scale;
    scales[t % kCodeStep * kCodeGroup + t / kCodeStep] = f32_to_bf16(scale);
  }
}

void encode(const float* x, size_t ep, const CodeForm& form, const CodeBlock& out) {
  const size_t chunks = (ep + 63) / 64, each = form.words(ep);
  float eps[kCodeKeys], none[kCodeKeys] = {};
  uint64_t words[kCodeKeys];
  Sums s;
  find_eps(form, chunks * 64, ep, x, eps);
  measure(x, chunks * 64, eps, s);
  for (size_t c = 0; c < chunks; ++c) {
    const float* from = x + c * 64 * kCodeKeys;
    const bool two = form.bitmaps() == 2;
    bits_of(from, form.code == Code::overlap ? 0.f : 1.f, form.code == Code::signs ? none : eps, words);
    put_words(words, c, each, out.bits);
    if (two) bits_of(from, -1.f, eps, words), put_words(words, chunks + c, each, out.bits);
  }
  put_scales(form, s, out.before, out.scales);
}

template <class Key>
void code_keys(const Keys& kv, size_t first, const CodeForm& form, const CodeBlock& out, float* scratch) {
  const size_t ep = kv.ep;
  float *rows = scratch, *x = scratch + kCodeKeys * ep, *sum = x;  // x is written after the sum was read
  read_rows<Key>(kv, kv.v, kv.v_scales, first, rows);
  sum_rows(rows, ep, out.values);
  read_rows<Key>(kv, kv.k, kv.k_scales, first, rows);
  if (form.centred())
    sum_rows(rows, ep, sum), centre(rows, ep, sum, out.mean);
  else
    std::memset(out.mean, 0, ep * sizeof(uint16_t));
  turn(rows, ep, x);
  if (form.centred())
    for (size_t c = 0; c < (ep + 63) / 64; ++c) rotate_keys(x + c * 64 * kCodeKeys);
  encode(x, ep, form, out);
}

// One query, rotated: x (dims), dims a multiple of 64. Its planes (planes, words).
struct QueryCode {
  const CodeForm& form;
  const float* x;
  size_t dims, ep;
  uint64_t* planes;
  float *factor, *offset;

  size_t chunks() const { return dims / 64; }
  uint64_t* plane(size_t p) const { return planes + p * form.bitmaps() * chunks(); }

  // Odd numbers, a plane per bit, whose bits stand for +1 and -1: q . signs of a key = half a step * sum over planes of
  // 2^p * (dims - 2 * bits that differ).
  void numbers() const {
    const float levels = static_cast<float>(1 << form.bits);
    float square = 0;
    for (size_t d = 0; d < dims; ++d) square += x[d] * x[d];
    const float step = kSteps[form.bits - 1] * std::sqrt(square / static_cast<float>(dims));
    const float inverse = step > 1e-30f ? 1 / step : 0.f;
    for (size_t c = 0; c < chunks(); ++c) {
      uint8_t number[64];
      for (size_t d = 0; d < 64; ++d) {
        const float v = x[c * 64 + d] * inverse + levels / 2;  // a NaN becomes the lowest
        number[d] = static_cast<uint8_t>(static_cast<int32_t>(v >= levels ? levels - 1 : v > 0 ? v : 0.f));
      }
      for (size_t p = 0; p < form.bits; ++p) plane(p)[c] = bits_of(number, p);
    }
    *factor = -step, *offset = 0.5f * step * (levels - 1) * static_cast<float>(dims);
  }

  // Two bitmaps, or one, beside those of the keys. `scale`: what the query was multiplied with.
  void bitmaps(float scale) const {
    float square = 0, magnitude = 0, active = 0;
    for (size_t d = 0; d < dims; ++d) square += x[d] * x[d];
    const float eps = form.eps < 0 ? -form.eps * std::sqrt(square / spread(form, ep)) : form.eps * scale;
    const size_t n = chunks();
    for (size_t d = 0; d < dims; ++d) {
      if (!(std::fabs(x[d]) > eps)) continue;
      magnitude += std::fabs(x[d]), active += 1;
      const size_t w = d / 64;
      const uint64_t bit = 1ull << (d % 64);
      const bool above = x[d] > 0;
      if (form.code == Code::overlap)
        plane(0)[w] |= bit;
      else if (form.code == Code::difference)
        plane(above ? 0 : 1)[above ? w : n + w] |= bit;
      else
        plane(0)[above ? w : n + w] |= bit, plane(1)[above ? n + w : w] |= bit;
    }
    *factor = active > 0 ? magnitude / active : 0.f, *offset = 0;
  }
};

}  // namespace

void code_keys_f32(const Keys& kv, size_t first, const CodeForm& form, const CodeBlock& out, float* scratch) {
  code_keys<F32Key>(kv, first, form, out, scratch);
}
void code_keys_f16(const Keys& kv, size_t first, const CodeForm& form, const CodeBlock& out, float* scratch) {
  code_keys<F16Key>(kv, first, form, out, scratch);
}
void code_keys_int8(const Keys& kv, size_t first, const CodeForm& form, const CodeBlock& out, float* scratch) {
  code_keys<Int8Key>(kv, first, form, out, scratch);
}

void code_query(const float* q, size_t g, size_t ep, float scale, const CodeForm& form, uint64_t* planes, float* factor,
                float* offset) {
  const size_t dims = (ep + 63) / 64 * 64, each = form.planes() * form.words(ep);
  std::memset(planes, 0, g * each * sizeof(uint64_t));
  for (size_t h = 0; h < g; ++h) {
    float x[kWidestCode] = {};
    std::memcpy(x, q + h * ep, ep * sizeof(float));
    if (form.centred())
      for (size_t d = 0; d < dims; d += 64) rotate_query(x + d);
    const QueryCode code{form, x, dims, ep, planes + h * each, factor + h, offset + h};
    form.code == Code::signs ? code.numbers() : code.bitmaps(scale);
  }
}

}  // namespace ISA
