// The kernel surface: the records kernels take, and the table of kernels made from kernels.def, the only list.
#pragma once
#include <cstddef>
#include <cstdint>

// Weight storage. Input-channel-major: one row per input channel, all outputs of that channel side by side, so that
// a skipped channel is one contiguous run of unread bytes. Outputs are padded to a multiple of kPad.
// int8: values -127..127 as bytes + 128. int4: values -8..7 as nibbles + 8; 16 bytes hold a group of 32 outputs, the
// low nibbles the first 16. Scales: bf16 per (channel, group of outputs), in channel-major order too.
// upper, lower: the two halves of int8's bytes, nibbles packed as int4's beside int8's scales. An upper half alone
// stands for about the middle of the bytes it may belong to; the lower one says how far from there the byte is.
// coarse: int8's own bytes, of which only the upper halves are looked at.
constexpr size_t kPad = 64;
inline size_t padded(size_t outputs) { return (outputs + kPad - 1) / kPad * kPad; }
constexpr size_t kGroupInt8 = 64;
constexpr size_t kGroupInt4 = 32;
constexpr size_t kPanel = 16384;         // outputs of one token that are summed side by side
constexpr size_t kScratch = 256 * kPad;  // floats: one block of unpacked weights in matmul
constexpr size_t kFewTokens = 8;         // as many give together what each gives alone
constexpr size_t kSharedTokens = 16;     // and so many of several texts: the most that a matvec takes
// Floats a matvec needs for its tokens: x beside the scales, and integer sums of a panel.
constexpr size_t matvec_scratch(size_t tokens) { return 2 * (tokens + 1) * kPanel; }

// proc: weights that are rebuilt from seeds, see Proc. hashed: from a hash, see Hashed. factors: products, see Factors.
enum class Quant { f32, bf16, int8, int4, upper, lower, coarse, proc, hashed, factors };
inline size_t weight_bytes(Quant q, size_t n) {
  return q == Quant::f32 ? n * 4 : q == Quant::bf16 ? n * 2 : q == Quant::int8 || q == Quant::coarse ? n : n / 2;
}
// Outputs that share a scale; 0: no scales.
inline size_t group_size(Quant q) {
  const bool parts = q == Quant::upper || q == Quant::lower || q == Quant::coarse;
  return q == Quant::int8 || parts ? kGroupInt8 : q == Quant::int4 ? kGroupInt4 : 0;
}

// Weights from seeds. A row's outputs are blocks of kPad, and its columns of kPad seeds (a byte each) share them out: a
// column of n blocks gives, from seed b and from the seed before it in its chain, weight b of each of the n. The seed
// before is seed b of the column to the left; left of the first column stands the last one, turned by kTurn seeds, so
// that chains are long. A weight is a sum of four table values, one for each half of the two seeds, times the column's
// scale; what is far off is put right by deltas. Of the seed before, the two highest bits do not count.
struct Proc {
  size_t columns;          // of a row
  const int8_t* tables;    // (kMostBlocks, kMostBlocks, 4, 16): of columns of n + 1 blocks the j-th: low and high half
                           // of the seed, low and high half of the one before (which repeats every four)
  const uint32_t* starts;  // (ic + 1): a channel's deltas; null: none
  const uint16_t* at;      // their outputs, ascending
  const uint16_t* deltas;  // bf16
};
constexpr size_t kMostBlocks = 4, kTurn = 16, kTable = 16, kTables = kMostBlocks * kMostBlocks * 4 * kTable;
// Columns [0, more) of a row have n + 1 blocks, the others n.
struct Columns {
  size_t all, n, more;
  Columns(size_t columns, size_t oc) : all(columns), n(oc / kPad / columns), more(oc / kPad % columns) {}
  size_t blocks(size_t k) const { return n + (k < more); }
  size_t first(size_t k) const { return k * n + (k < more ? k : more); }  // block of column k
  size_t of(size_t block) const {                                         // the column that gives a block
    return block < more * (n + 1) ? block / (n + 1) : more + (block - more * (n + 1)) / n;
  }
};

// Weights from a hash. A row's outputs are blocks of `block`, of which a channel keeps at most `fanout`; a weight
// outside them is zero and nothing of it is stored. Inside, weight = base + delta: base = base_scale times a number in
// [-1, 1) that is the hash of channel and output, delta a stored one where the block's bits have a one, else zero.
struct Hashed {
  size_t fanout, block;  // block: 8, 16 or 32
  float base_scale;
  const uint16_t* blocks;  // (ic, fanout) ascending; kNoBlock: none, nor any after it
  const uint32_t* bits;    // (ic, fanout): the outputs of a block that have a delta
  const uint32_t* starts;  // (ic + 1): a channel's deltas
  const uint16_t* values;  // bf16, by channel and output
};
constexpr uint16_t kNoBlock = 0xffff;

struct Factors;

struct Mat {
  Quant quant;
  uint8_t* data;     // (ic, row_bytes); null for hashed and factors
  uint16_t* scales;  // (ic, oc / group) bf16, of seeds (ic, columns); null for f32, bf16, hashed and factors
  size_t ic, oc;     // oc: padded
  const Proc* proc = nullptr;
  const Hashed* hashed = nullptr;
  const Factors* factors = nullptr;
  const float* largest = nullptr;  // (ic): of each channel's scales the largest magnitude; null without scales
  size_t row_bytes() const {
    if (hashed) return 6 * hashed->fanout;  // blocks and their bits
    return proc ? proc->columns * kPad : weight_bytes(quant, oc);
  }
  size_t groups() const { return proc ? proc->columns : group_size(quant) ? oc / group_size(quant) : 0; }
  // Of one channel; its deltas, which differ in number, come on top.
  size_t channel_bytes() const {
    if (hashed) return row_bytes() + 4;
    return proc ? row_bytes() + 2 * groups() + (proc->starts ? 4 : 0) : part_bytes(oc);
  }
  size_t delta_bytes(size_t channel) const {
    if (hashed) return size_t{2} * (hashed->starts[channel + 1] - hashed->starts[channel]);
    return proc && proc->starts ? 4 * (proc->starts[channel + 1] - proc->starts[channel]) : 0;
  }
  size_t part_bytes(size_t outputs) const {  // one channel's weights and scales of some outputs, whole groups
    return weight_bytes(quant, outputs) + (group_size(quant) ? outputs / group_size(quant) * 2 : 0);
  }
  size_t bytes() const {
    if (factors) return factor_bytes();
    if (hashed) return ic * channel_bytes() + size_t{2} * hashed->starts[ic];
    return ic * channel_bytes() + (proc && proc->starts ? 4 * proc->starts[ic] : 0);
  }
  inline size_t factor_bytes() const;
};

// Weights that are products of smaller ones: x goes through one step after another, each a small matrix that some rows
// of a token are multiplied by. Two steps of one row are a low-rank product; several rows, in another order for every
// step, are a tensor train. Of the first step some outputs may be kept: they are added to the last outputs of the
// whole, beside the product (weights that were not factored, or what the product misses).
struct Step {
  const Mat* w;
  size_t rows;           // of a token
  const uint32_t* from;  // (rows, w->ic): where each value lies in what came before; null: as it lies
};
struct Factors {
  const Step* steps;
  size_t count;
  const uint32_t* to;  // (outputs): where each lies in what the last step gave; null: as it lies
  size_t outputs;      // the first ones of the whole, which the product gives
  size_t kept;
};
size_t Mat::factor_bytes() const {
  size_t sum = 0;
  for (size_t k = 0; k < factors->count; ++k) sum += factors->steps[k].w->bytes();
  return sum;
}

// What seeds give in columns of 1 to kMostBlocks blocks, as the search reads it: of each seed, and of each seed before.
struct SeedCodes {
  const float *now, *before;  // (kMostBlocks, kMostBlocks, 256): in columns of n + 1 blocks the j-th
  const float* energy;        // (kMostBlocks, 256): squares of `now`, summed over j
};

// One part of a matrix neuron by neuron: the same stored values, row j what output j takes from every input, so that a
// neuron that is not computed is not read. Inputs are padded with zeros and packed within a row as outputs are above.
struct NeuronRows {
  Quant quant;
  uint8_t* data;     // (f, row_bytes)
  uint16_t* scales;  // (groups, width) bf16: of neurons [g * group, (g + 1) * group); null for f32 and bf16
  size_t d, f;       // inputs, neurons
  size_t width() const { return padded(d); }
  size_t row_bytes() const { return weight_bytes(quant, width()); }
  size_t groups() const { return group_size(quant) ? padded(f) / group_size(quant) : 0; }
  // A neuron's weights and its share of the group's scales.
  size_t neuron_bytes() const { return row_bytes() + (group_size(quant) ? 2 * d / group_size(quant) : 0); }
  size_t bytes() const { return f * neuron_bytes(); }
};

// Upper halves of int8 weights for products that take all channels: tile by tile of 64 outputs, so that a tile is read
// from its beginning to its end and its sums stay in registers. Four channels of a tile are two lines: byte 4 l + j of
// line m has of the j-th of them outputs 32 m + l (its low nibble) and 32 m + 16 + l. Those four are every 16th
// channel: of 64 channels the l-th four are l, 16 + l, 32 + l and 48 + l.
struct Tiles {
  const Mat* whole;  // of which they are, outputs from `first` on
  size_t first;
  uint8_t* data;         // (tiles, width / 4, 2, 64)
  uint16_t* scales;      // (tiles, width) bf16, zero past ic
  const float* largest;  // (ic): of each channel's scales the largest magnitude
  size_t ic, oc;         // oc: whole tiles
  size_t width() const { return padded(ic); }
  size_t count() const { return oc / kPad; }
  size_t bytes() const { return count() * width() * (kPad / 2 + sizeof(uint16_t)); }
};

// What a token gives to tiles.
struct TileInput {
  const float* units;  // (width): x in units, zero where a channel is read whole
  float unit;
  size_t whole;                // channels
  const uint32_t* list;        // (whole)
  const float* x;              // (whole)
  const uint8_t* const* rows;  // (whole): their bytes of int8, from the first tile's outputs on
};

// The input channels of a matrix that are computed: all of them, or those of an ascending list. The rest is not read.
struct Channels {
  const uint32_t* list;  // (count) or null: all
  size_t count;
};

// How several tokens at once are multiplied. `rounded`: where the CPU is faster at it, activations beside int8 and int4
// weights become bytes, and queries, keys and values 16-bit words. One token is always as good as floats.
enum class Many { floats, rounded };

// Activations of several tokens rounded to bytes; kByteGroup channels of a token share a scale.
struct ByteRows {
  int8_t* values;  // (groups, tokens, kByteGroup), zero past ic
  float* scales;   // (groups, tokens)
  int32_t* sums;   // (groups, tokens): of the values
  size_t tokens, ic;
};
constexpr size_t kByteGroup = 128;
inline size_t byte_groups(size_t ic) { return (ic + kByteGroup - 1) / kByteGroup; }
inline size_t panel_room(size_t ic) { return byte_groups(ic) * (kByteGroup * kPad / sizeof(float) + kPad); }  // floats

enum class Kv { f32, f16, int8 };  // precision of the key/value cache

// Keys and values of one kv head: rows of ep elements, one per position.
struct Keys {
  const void *k, *v;                 // (n, ep)
  const float *k_scales, *v_scales;  // (n), int8 only
  size_t ep;                         // head width padded to kHeadPad
};
constexpr size_t kHeadPad = 16;
// Positions whose keys or values are read: those of an ascending list, or `count` from `first` on. The rest is not.
struct Positions {
  const uint32_t* list;  // (count) or null
  size_t first, count;
};

// The queries of one kv head's group during prefill: g heads of width e, tokens `stride` floats apart.
struct Queries {
  const float* q;
  size_t stride, g, e;
  size_t past;    // positions already in the cache before token 0
  size_t window;  // keys a query may look back, itself included; 0 = all
  float scale;
  size_t out_stride;
};
constexpr size_t kTileRows = 256;    // query rows (tokens x heads) of one attention tile, at most
constexpr size_t kTileTokens = 128;  // tokens of one, at most; a power of two
constexpr size_t kTileKeys = 64;     // keys of one step
inline size_t tile_scratch(size_t g, size_t ep) {
  const size_t rows = (g > kTileRows ? g : kTileRows) + 15, width = ep + 31;  // room to start at whole lines
  return rows * (2 * ep + 2 * kTileKeys + 6) + kTileKeys * (2 * width + 2) + ep;
}
// A partial decode result of g heads: running maxima (g), sums (g), weighted values (g, ep).
inline size_t part_size(size_t g, size_t ep) { return g * (ep + 2); }

// How bits are counted: an instruction for eight words, for one word, a table of half bytes, or one step per bit.
enum class Popcount { vpopcntdq, popcnt, lut, kernighan };

// Packed keys: what a key is worth to a query is guessed from a few bits of it. Keys are coded kCodeKeys at a time,
// when a block is complete; kCodeGroup keys of a block, kCodeStep apart, have their words side by side.
constexpr size_t kMostPlanes = 4;
constexpr size_t kWidestCode = 1024;  // of a head that is coded
constexpr size_t kCodeKeys = 64, kCodeGroup = 16, kCodeStep = kCodeKeys / kCodeGroup;
// The first key of a group; the others follow kCodeStep apart.
constexpr size_t first_of(size_t group) { return group / kCodeStep * kCodeKeys + group % kCodeStep; }
// signs: of the key less its block's mean, rotated, and one scale; ternary: two bitmaps of the same, above and below
// eps. The document's forms, of the key as it is: overlap, one bitmap of |x| > eps; difference, two, pos - neg.
enum class Code { signs, ternary, overlap, difference };
struct CodeForm {
  Code code;
  float eps;        // of the two bitmaps; negative: that many times a key's root mean square
  size_t bits = 1;  // of a query's numbers beside signs; more of them guess better, but hardly choose better
  bool operator==(const CodeForm& o) const { return code == o.code && eps == o.eps; }  // of keys
  bool centred() const { return code == Code::signs || code == Code::ternary; }
  size_t bitmaps() const { return code == Code::signs || code == Code::overlap ? 1 : 2; }  // of a key
  size_t planes() const { return code == Code::signs ? bits : bitmaps(); }                 // of a query
  size_t words(size_t ep) const { return (ep + 63) / 64 * bitmaps(); }                     // of 64 bits, a key
};
// The codes of one kv head.
struct Codes {
  const uint64_t* bits;    // (blocks, kCodeStep, words, kCodeGroup)
  const uint16_t* scales;  // (blocks, kCodeStep, kCodeGroup) bf16
  size_t words;
};
// What encoding a block writes; the sum of its values stands in for those that are not read.
struct CodeBlock {
  uint64_t* bits;
  uint16_t *scales, *mean;  // mean (ep) f16: of the keys
  float* values;            // (ep): sum
  float before;             // the scale of the key before, which the document's forms go on from; 0: none
};
constexpr size_t code_scratch(size_t ep) { return kCodeKeys * (ep + (ep + 63) / 64 * 64); }
// Queries of one kv head's group, packed. Guess of a score: scale * (factor * count + offset) + the block's.
struct CodeQuery {
  CodeForm form;
  const uint64_t* planes;        // (g, planes, words)
  const float *factor, *offset;  // (g)
  const float* blocks;           // (g, stride): query times a block's mean
  size_t stride, g;
};
// Keys found by a scan, room for every key of it and kCodeGroup more.
struct CodeHits {
  uint32_t* at;
  float* importance;
};

// Two bits a weight of a gate: bitmaps of its large positive and of its large negative weights, and what those weigh on
// average. Of kCodeNeurons neurons the words lie side by side, so that they are counted together.
constexpr size_t kCodeNeurons = 8;
constexpr size_t kGatePlanes = 4;  // of x, beside them: a number in two's complement
struct GateCodes {
  const uint64_t* bits;  // (blocks, words, 2, kCodeNeurons): positive, negative
  const float* scales;   // (f)
  size_t d, f;
  size_t words() const { return (d + 63) / 64; }
  size_t blocks() const { return (f + kCodeNeurons - 1) / kCodeNeurons; }
  size_t bytes() const { return (blocks() * words() * 2 * kCodeNeurons) * sizeof(uint64_t) + f * sizeof(float); }
};

// What pack_bits found above its bound: how many values, and the sum of their magnitudes.
struct PackSums {
  size_t active;
  float magnitude;
};

enum class Act { silu, relu, relu2, gelu, gelu_tanh };

// One namespace of the same kernels per ISA level.
#define KERNEL(ret, name, params) ret name params;
namespace base {
#include "kernels.def"
}
namespace avx2 {
#include "kernels.def"
}
namespace avx512 {
#include "kernels.def"
}
// AVX-512 with VBMI and VPOPCNTDQ: the same kernels but for weights from seeds and for counting bits.
namespace avx512vbmi {
using namespace avx512;
#include "kernels_avx512vbmi.def"
}  // namespace avx512vbmi
// AVX-512 with AMX: the same kernels but for products of bytes.
namespace amx {
using namespace avx512vbmi;
#include "kernels_amx.def"
}  // namespace amx
#undef KERNEL

struct Kernels {
#define KERNEL(ret, name, params) ret(*name) params;
#include "kernels.def"
#undef KERNEL
};
// Whether rows that are read next are asked for into the first-level cache, beside those that are being read: where it
// has 48 KB or more, but on Intel's. It changes no result.
extern bool near_rows;
// How slowly lines are asked for where they come from memory, or may: products, one after the other, that two lines
// wait for the two before; kFastest: for none. It is found while matrices are read (tempo.h), and changes no result.
constexpr size_t kMaybeMemory = 1ull << 20;  // bytes of a matrix that may be in no cache when its turn comes again
constexpr size_t kFromMemory = 4ull << 20;   // and of one that is in none
constexpr int kFastest = 1, kSlowest = 9;
enum class Size { small, medium, large };
inline Size size_of(const Mat& w) {
  const size_t bytes = w.bytes();
  return bytes < kMaybeMemory ? Size::small : bytes < kFromMemory ? Size::medium : Size::large;
}
extern int asking_paces[3];          // by size; of small ones kFastest
const Kernels& kernels();            // the chosen level's table
const char* level();                 // its name
const char* const* levels();         // levels this CPU can run, best first, null-terminated
bool force_level(const char* name);  // false: unknown, or the CPU lacks it
