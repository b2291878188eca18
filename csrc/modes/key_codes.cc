// Keys are coded a block at a time, so what a code is depends on the block's keys alone, not on how they came.
#include "modes/key_codes.h"

#include <algorithm>

#include "pool.h"

namespace {

auto code_kernel(Kv kind) {
  const Kernels& k = kernels();
  return kind == Kv::f32 ? k.code_keys_f32 : kind == Kv::f16 ? k.code_keys_f16 : k.code_keys_int8;
}

float bf16(uint16_t h) {
  const uint32_t bits = static_cast<uint32_t>(h) << 16;
  float f;
  __builtin_memcpy(&f, &bits, sizeof f);
  return f;
}

}  // namespace

void HeadCodes::resize(size_t blocks, size_t words, size_t ep) {
  bits.resize(blocks * words * kCodeKeys), scales.resize(blocks * kCodeKeys);
  means.resize(blocks * ep), values.resize(blocks * ep);
}
size_t HeadCodes::nbytes() const {
  return bits.capacity() * sizeof bits[0] + (scales.capacity() + means.capacity()) * sizeof scales[0] +
         values.capacity() * sizeof values[0];
}

void KeyCodes::trim(size_t length) {
  blocks = std::min(blocks, length / kCodeKeys);
  for (auto& head : heads) head.resize(blocks, words(), ep);
  while (!checks.empty() && checks.back().position >= length) checks.pop_back();
}
size_t KeyCodes::nbytes() const {
  size_t sum = 0;
  for (auto& head : heads) sum += sizeof head + head.nbytes();
  for (auto& check : checks) sum += sizeof check + check.error.capacity() * sizeof(float);
  return sum;
}
size_t KeyCodes::block_bytes() const {
  return kCodeKeys * (words() * sizeof(uint64_t) + sizeof(uint16_t)) + ep * sizeof(uint16_t);
}

size_t KeyCodes::grow(const Cache& c, size_t end) {
  const size_t first = blocks, last = end / kCodeKeys;
  if (last <= first) return 0;
  ep = c.ep, heads.resize(c.heads), blocks = last;
  for (auto& head : heads) head.resize(last, words(), ep);
  const auto kernel = code_kernel(c.kind);
  auto code = [&](size_t h, size_t thread) {  // in order: the document's scales go on from key to key
    HeadCodes& head = heads[h];
    for (size_t b = first; b < last; ++b) {
      const float before = b ? bf16(head.scales[b * kCodeKeys - 1]) : 0.f;
      float* sum = head.values.data() + b * ep;
      kernel(c.keys(h), b * kCodeKeys, form,
             {head.bits.data() + b * words() * kCodeKeys, head.scales.data() + b * kCodeKeys,
              head.means.data() + b * ep, sum, before},
             scratch(thread, code_scratch(ep)));
      for (size_t e = 0; b && e < ep; ++e) sum[e] += sum[e - ep];
    }
  };
  parallel(c.heads, code);
  return (last - first) * kCodeKeys * 2 * c.heads * c.row_bytes();
}
