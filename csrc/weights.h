// How each precision's rows are read: blocks of outputs of one input channel as float vectors, and their scales.
#pragma once
#include "kernels.h"
#include "proc_rows.h"
#include "simd.h"

namespace ISA {

constexpr size_t kBlock = kBlockV * kLanes;  // outputs read at a time
static_assert(kPad % kBlock == 0 && kBlock % kGroupInt4 == 0, "blocks tile the padding and hold whole int4 groups");

// read(row, o, out): outputs [o, o + kBlock) as kBlockV vectors, without their scales.
struct F32Row {
  static constexpr size_t kGroup = 0;
  static constexpr size_t bytes(size_t outputs) { return outputs * 4; }
  static void read(const uint8_t* row, size_t o, V* out) {
    const float* p = reinterpret_cast<const float*>(row) + o;
    for (size_t v = 0; v < kBlockV; ++v) out[v] = load(p + v * kLanes);
  }
};
struct Bf16Row {
  static constexpr size_t kGroup = 0;
  static constexpr size_t bytes(size_t outputs) { return outputs * 2; }
  static void read(const uint8_t* row, size_t o, V* out) {
    const uint16_t* p = reinterpret_cast<const uint16_t*>(row) + o;
    for (size_t v = 0; v < kBlockV; ++v) out[v] = load_bf16(p + v * kLanes);
  }
};
struct Int8Row {
  static constexpr size_t kGroup = kGroupInt8;
  static constexpr size_t bytes(size_t outputs) { return outputs; }
  static void read(const uint8_t* row, size_t o, V* out) {
    for (size_t v = 0; v < kBlockV; ++v) out[v] = load_u8(row + o + v * kLanes);
  }
};
// Two weights in a byte; a nibble less kOffset, times kUnit, is a weight without its scale.
struct Int4Row {
  static constexpr size_t kGroup = kGroupInt4;
  static constexpr float kOffset = 8.f, kUnit = 1.f;
  static constexpr size_t bytes(size_t outputs) { return outputs / 2; }
  static void read(const uint8_t* row, size_t o, V* out) {
    constexpr size_t half = kGroupInt4 / 2 / kLanes;  // vectors in half a group
    const uint8_t* p = row + o / 2;
    for (size_t g = 0; g < kBlock / kGroupInt4; ++g)
      for (size_t v = 0; v < half; ++v)
        load_nibbles(p + g * kGroupInt4 / 2 + v * kLanes, out[g * 2 * half + v], out[g * 2 * half + half + v]);
  }
};
// Of a byte 16 u + l, which is a weight of int8 + 128: u stands for 16 u + 8, and l - 8 is what is missing.
template <bool upper>
struct HalfRow : Int4Row {
  static constexpr size_t kGroup = kGroupInt8;
  static constexpr float kUnit = upper ? 16.f : 1.f, kOffset = upper ? 7.5f : 8.f;
  static void read(const uint8_t* row, size_t o, V* out) {
    Int4Row::read(row, o, out);
    for (size_t v = 0; v < kBlockV; ++v) out[v] = fma(out[v], set1(kUnit), set1((8.f - kOffset) * kUnit));
  }
};
using UpperRow = HalfRow<true>;
using LowerRow = HalfRow<false>;

// Of int8's bytes only the upper halves.
struct CoarseRow : Int8Row {
  static void read(const uint8_t* row, size_t o, V* out) {
    uint8_t bytes[kBlock];
    for (size_t i = 0; i < kBlock; ++i) bytes[i] = static_cast<uint8_t>((row[o + i] & 0xf0) | 8);
    Int8Row::read(bytes, 0, out);
  }
};

struct ProcRow {};  // rebuilt from seeds, see unpack_row

// The group, counted from the block's first, that vector v of a block belongs to.
template <class Row>
constexpr size_t group_of(size_t v) {
  return Row::kGroup && Row::kGroup < kBlock ? v * kLanes / Row::kGroup : 0;
}

// Channel i, outputs [o, o + kPad) as floats.
template <class Row>
inline void unpack_row(const Mat& w, size_t i, size_t o, float* out) {
  const uint8_t* row = w.data + i * w.row_bytes();
  for (size_t c = 0; c < kPad; c += kBlock) {
    V b[kBlockV];
    Row::read(row, o + c, b);
    if constexpr (Row::kGroup != 0) {
      const uint16_t* s = w.scales + i * w.groups() + (o + c) / Row::kGroup;
      for (size_t v = 0; v < kBlockV; ++v) b[v] = mul(b[v], set1(bf16_to_f32(s[group_of<Row>(v)])));
    }
    for (size_t v = 0; v < kBlockV; ++v) store(out + c + v * kLanes, b[v]);
  }
}

template <>
inline void unpack_row<ProcRow>(const Mat& w, size_t i, size_t o, float* out) {
  const Columns columns(w.proc->columns, w.oc);
  const size_t k = columns.of(o / kPad), j = o / kPad - columns.first(k);
  const uint8_t* row = w.data + i * w.row_bytes();
  uint8_t turned[kPad], bytes[kPad];
  rebuild(row + k * kPad, seeds_before(row, columns.all, k, turned), tables_of(*w.proc, columns.blocks(k), j), bytes);
  const V scale = set1(bf16_to_f32(w.scales[i * columns.all + k]));
  for (size_t b = 0; b < kPad; b += kLanes) store(out + b, mul(load_u8(bytes + b), scale));
  add_deltas(*w.proc, i, o, kPad, 1.f, out);
}

}  // namespace ISA
