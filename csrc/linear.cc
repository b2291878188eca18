// Splits a linear map over the pool: one or a few tokens by outputs and channels, many tokens by outputs. Either way
// the sums behind an output are added in an order that does not depend on the number of threads.
#include "linear.h"

#include <algorithm>
#include <atomic>
#include <bit>
#include <cstring>
#include <optional>
#include <vector>

#include "buffer.h"
#include "factors.h"
#include "pool.h"
#include "prompts.h"
#include "tempo.h"

namespace {

struct Table {
  decltype(Kernels::matvec_f32) matvec;
  decltype(Kernels::matvec_few_f32) matvec_few;
  decltype(Kernels::matmul_f32) matmul;
  decltype(Kernels::pack_f32) pack;
  decltype(Kernels::norms_f32) norms;
  decltype(Kernels::neurons_f32) neurons;
  decltype(Kernels::neuron_range_f32) neuron_range;
};
Table table(Quant q) {
  const Kernels& k = kernels();
#define TABLE(q)                                                                                             \
  {                                                                                                          \
    k.matvec_##q, k.matvec_few_##q, k.matmul_##q, k.pack_##q, k.norms_##q, k.neurons_##q, k.neuron_range_##q \
  }
  switch (q) {
    case Quant::f32: return TABLE(f32);
    case Quant::bf16: return TABLE(bf16);
    case Quant::int8: return TABLE(int8);
    case Quant::int4: return TABLE(int4);
    case Quant::upper: return {k.matvec_upper, nullptr, nullptr, nullptr, nullptr, nullptr, nullptr};
    case Quant::lower: return {k.matvec_lower, nullptr, nullptr, nullptr, nullptr, nullptr, nullptr};
    case Quant::coarse: return {nullptr, nullptr, k.matmul_coarse, nullptr, nullptr, nullptr, nullptr};
    case Quant::hashed:
      return {k.matvec_hashed, k.matvec_few_hashed, k.matmul_hashed, nullptr, k.norms_hashed, nullptr, nullptr};
    default: return {k.matvec_proc, k.matvec_few_proc, k.matmul_proc, nullptr, k.norms_proc, nullptr, nullptr};
  }
#undef TABLE
}

void start(const float* bias, float* y, size_t o0, size_t o1) {
  if (bias)
    std::memcpy(y + o0, bias + o0, (o1 - o0) * sizeof(float));
  else
    std::memset(y + o0, 0, (o1 - o0) * sizeof(float));
}

// How the work of one token or a few is cut: rows longer than a panel by outputs, and all by channels, each range with
// sums of its own that are added up afterwards. It depends on the shape of the whole matrix alone, so that results do
// not depend on the number of threads, nor on which outputs are computed, nor on how many tokens there are.
struct Cut {
  size_t outputs, channels;  // parts
};
Cut cut(const Mat& w, size_t count) {
  constexpr size_t kTask = 48 << 10;  // bytes worth handing to a thread
  // Channels of a part, which ends by turning its sums into outputs: fewer only where there are two in all.
  constexpr size_t kLeast = 128, kLeastOfTwo = 48;
  size_t outputs = (w.oc + kPanel - 1) / kPanel, channels = 1;
  const size_t bytes = count * w.channel_bytes();
  if (w.ic < 128 && bytes > 2 * kTask && outputs == 1) outputs = 2;  // too few channels to share out
  const auto least = [&] { return channels == 1 ? kLeastOfTwo : kLeast; };
  while (channels * outputs < 64 && bytes / (channels * outputs) > kTask && count / (2 * channels) >= least())
    channels *= 2;
  return {outputs, std::min<size_t>(channels, 8)};
}

// Channels that are summed up in order, part by part: all of a map's, or half of them, or of a list.
struct Side {
  Channels c{nullptr, 0};     // of which those from the first-th to the last-th
  Channels fine{nullptr, 0};  // of halves: those that are read whole
  size_t first = 0, last = 0, parts = 0;
  size_t at(size_t part) const { return part == parts ? last : first + (last - first) * part / parts / 16 * 16; }
};

// The work of one token or a few (at most kSharedTokens, which take all channels), outputs [from, to), which are some.
struct Few {
  const Mat& w;
  const float *bias, *x;
  const size_t tokens;
  float* y;
  const bool add;
  const size_t from, to;
  const Mat* const lower;  // of upper halves, one token: the lower ones, which are read too where a channel is `fine`
  Side sides[2];           // each is added up in order; where there is one part the second has none
  size_t outputs;          // parts
  size_t first = 0, last;  // parts with outputs that are wanted

  Few(const Mat& m, const Channels& some, const float* b, const float* in, size_t n, float* out, bool add_, size_t o0,
      size_t o1, const Mat* lower_ = nullptr, const Channels& fine = {nullptr, 0})
      : w(m), bias(b), x(in), tokens(n), y(out), add(add_), from(o0), to(o1), lower(lower_) {
    const Cut c = ::cut(m, some.count);
    const size_t middle = c.channels == 1 ? some.count : some.count / 2 / 16 * 16;
    sides[0] = {some, fine, 0, middle, std::max<size_t>(c.channels / 2, 1)};
    sides[1] = {some, fine, middle, some.count, c.channels / 2};
    find_outputs(c.outputs);
  }
  // The same for one token, all outputs, of sides that follow.
  Few(const Mat& m, const float* b, const float* in, float* out, bool add_, const Mat* lower_)
      : w(m), bias(b), x(in), tokens(1), y(out), add(add_), from(0), to(m.oc), lower(lower_) {
    find_outputs(::cut(m, m.ic).outputs);
  }
  // What is used of a side.
  Side side(const Used& used) const {
    const size_t count = used.kept.count;
    return {used.kept, used.fine, 0, count, std::max<size_t>(::cut(w, 2 * count).channels / 2, 1)};
  }
  void find_outputs(size_t parts) {
    outputs = last = parts;
    while (output(first + 1) <= from) ++first;
    while (output(last - 1) >= to) --last;
  }
  size_t output(size_t part) const { return w.oc / kPad * part / outputs * kPad; }
  size_t channel_parts() const { return sides[0].parts + sides[1].parts; }
  size_t parts() const { return (last - first) * channel_parts(); }
  size_t size() const { return tokens * w.oc; }
  size_t sums() const { return (channel_parts() - 1) * size(); }  // floats
  float* slot(size_t run, float* others) const { return run == 0 ? y : others + (run - 1) * size(); }

  // Part p of a side, outputs of part o, into `out`, or onto what the thread has summed there: at once where the bits
  // are the same. whole: to bias, or y itself where add.
  void sum(size_t o, const Side& s, size_t p, bool onto, bool whole, float* out, float* room) const {
    const size_t o0 = std::max(output(o), from), o1 = std::min(output(o + 1), to), i0 = s.at(p), i1 = s.at(p + 1);
    const bool some = s.c.list && s.c.count < w.ic, once = some || (i1 - i0) % 4 == 0;  // nothing is added by itself
    const bool at_once = onto && once && i1 - i0 <= kernels().added_at_once(w.quant);
    float* into = onto && !at_once ? room : out;
    for (size_t t = 0; t < tokens && !at_once && !(whole && add); ++t)
      start(whole ? bias : nullptr, into + t * w.oc, o0, o1);
    if (lower)
      kernels().matvec_halves(w, *lower, s.c, s.fine, x, into, o0, o1, i0, i1);
    else if (tokens == 1)
      table(w.quant).matvec(w, s.c, x, into, o0, o1, i0, i1);
    else
      table(w.quant).matvec_few(w, x, tokens, into, o0, o1, i0, i1, room);
    if (onto && !at_once) kernels().add_rows(out + o0, room + o0, 0, 1, o1 - o0);
  }

  // others: (channel parts - 1, tokens, oc), sums of all channel parts but the first, whose go to y. Where the thread
  // has done the parts from a side's first one on, [begun, index), it adds to that one's sums: they stay in its cache,
  // as a slot for every part does not. True: the part has a slot of its own.
  bool part(size_t index, size_t begun, float* others, float* room) const {
    const size_t o = first + index / channel_parts(), run = index % channel_parts();
    const bool second = run >= sides[0].parts;
    const size_t head = second ? sides[0].parts : 0, p = run - head;
    const bool joins = tokens == 1 && p > 0 && begun + p <= index;
    sum(o, sides[second], p, joins, run == 0, slot(joins ? head : run, others), room);
    return p > 0 && !joins;
  }
  // All parts of a side, by one thread.
  void whole_side(const Side& s, bool second, float* out, float* room) const {
    for (size_t o = first; o < last; ++o)
      for (size_t p = 0; p < s.parts; ++p) sum(o, s, p, p > 0, !second && p == 0, out, room);
  }
  // apart: of every part whether it has a slot of its own.
  void add_up(size_t t, float* others, const uint8_t* apart) const {
    for (size_t i = 0; i < parts(); ++i) {
      const size_t o = first + i / channel_parts(), run = i % channel_parts(), second = sides[0].parts;
      const size_t at = t * w.oc + std::max(output(o), from), n = std::min(output(o + 1), to) + t * w.oc - at;
      if (apart[i]) kernels().add_rows(slot(run < second ? 0 : second, others) + at, slot(run, others) + at, 0, 1, n);
      if (run + 1 == channel_parts() && run >= second) kernels().add_rows(y + at, slot(second, others) + at, 0, 1, n);
    }
    add_bias(t);
  }
  void add_bias(size_t t) const {
    float* out = y + t * w.oc;
    for (size_t o = from; add && bias && o < to; ++o) out[o] += bias[o];
  }
  bool to_add_up() const { return channel_parts() > 1 || (add && bias); }
  // Of channels in the order they lie, without what is read of lower halves.
  size_t bytes() const { return (sides[0].last - sides[0].first + sides[1].last - sides[1].first) * w.channel_bytes(); }
  // Whether its lines are asked for at a pace.
  bool paced() const {
    const bool rows = w.quant == Quant::int8 || w.quant == Quant::int4 || w.quant == Quant::upper;
    return rows && tokens == 1 && from == 0 && to == w.oc && size_of(w) != Size::small;
  }
};

void apply_few(const Few& few) {
  static thread_local Buffer<float> buffer;
  static thread_local std::vector<uint8_t> flags;
  float* others = buffer.get(few.sums());
  flags.assign(few.parts(), 0);
  uint8_t* apart = flags.data();  // of this thread, whichever does the work
  const size_t room = few.tokens == 1 ? few.w.oc : matvec_scratch(kSharedTokens);
  std::optional<Reading> reading;
  if (few.paced()) reading.emplace(few.w, few.sides[0].c.list != nullptr);
  parallel_runs(few.parts(), [&](size_t part, size_t begun, size_t thread) {
    if (few.part(part, begun, others, scratch(thread, room))) apart[part] = 1;
  });
  if (reading) reading->done(few.bytes());
  if (!few.to_add_up()) return;
  if (few.tokens == 1) return few.add_up(0, others, apart);
  parallel(few.tokens, [&](size_t t, size_t) { few.add_up(t, others, apart); });
}

// The same by one thread, with room for its sums.
void apply_by(size_t thread, const Few& few) {
  const size_t own = std::max(few.w.oc, matvec_scratch(kSharedTokens));
  float* room = scratch(thread, own + few.sums());
  static thread_local std::vector<uint8_t> apart;
  apart.resize(few.parts());
  for (size_t part = 0; part < few.parts(); ++part) apart[part] = few.part(part, 0, room + own, room);
  for (size_t t = 0; few.to_add_up() && t < few.tokens; ++t) few.add_up(t, room + own, apart.data());
}

void apply_many(const Mat& w, const float* bias, const float* x, size_t tokens, float* y, bool add) {
  const auto kernel = table(w.quant).matmul;
  const size_t blocks = w.oc / kPad, tasks = std::min(blocks, 4 * threads());
  parallel(tasks, [&](size_t task, size_t thread) {
    const size_t o0 = task * blocks / tasks * kPad, o1 = (task + 1) * blocks / tasks * kPad;
    for (size_t t = 0; t < tokens; ++t) {
      if (!add) start(bias, y + t * w.oc, o0, o1);
      if (add && bias)
        for (size_t o = o0; o < o1; ++o) y[t * w.oc + o] += bias[o];
    }
    kernel(w, x, tokens, y, o0, o1, scratch(thread, kScratch));
  });
}

// Of some channels and outputs [o0, o1): the columns that give them and the one before, and the deltas that lie there.
size_t proc_bytes(const Mat& w, const Channels& c, size_t o0, size_t o1) {
  const Proc& p = *w.proc;
  const Columns columns(p.columns, w.oc);
  const size_t read = columns.of(o1 / kPad - 1) - columns.of(o0 / kPad) + 1, before = read < p.columns;
  size_t deltas = 0;
  for (size_t i = 0; i < c.count && p.starts; ++i)
    for (size_t ch = c.list ? c.list[i] : i, d = p.starts[ch]; d < p.starts[ch + 1]; ++d)
      deltas += p.at[d] >= o0 && p.at[d] < o1;
  return c.count * (read * (kPad + 2) + before * kPad + (p.starts ? 4 : 0)) + 4 * deltas;
}

// Of some channels and outputs [o0, o1): their lists of blocks, and the deltas of the blocks that lie there.
size_t hashed_bytes(const Mat& w, const Channels& c, size_t o0, size_t o1) {
  const Hashed& h = *w.hashed;
  size_t deltas = 0;
  for (size_t i = 0; i < c.count; ++i)
    for (size_t k = (c.list ? c.list[i] : i) * h.fanout, end = k + h.fanout; k < end; ++k)
      if (h.blocks[k] * h.block >= o0 && h.blocks[k] * h.block < o1) deltas += std::popcount(h.bits[k]);
  return c.count * w.channel_bytes() + 2 * deltas;
}

}  // namespace

size_t apply(const Mat& w, const float* bias, const float* x, size_t tokens, float* y, bool add, Many many) {
  if (tokens == 0) return 0;
  if (w.factors) return apply_factors(w, bias, x, tokens, y, add, many);
  if (in_bytes(w, tokens, many))
    apply_bytes(w, bias, x, tokens, y, add);
  else if (tokens <= kFewTokens)
    apply_few({w, {nullptr, w.ic}, bias, x, tokens, y, add, 0, w.oc});
  else
    apply_many(w, bias, x, tokens, y, add);
  return w.bytes();
}

size_t apply_rows(const Mat& w, const float* bias, const float* x, size_t rows, float* y, bool add) {
  size_t bytes = 0;
  for (size_t r = 0; w.factors && r < rows; r += kFewTokens)
    bytes += apply(w, bias, x + r * w.ic, std::min(kFewTokens, rows - r), y + r * w.oc, add, Many::floats);
  if (w.factors) return bytes;
  size_t groups = (rows + kSharedTokens - 1) / kSharedTokens;
  const bool own = groups >= threads();  // a thread does a group's whole work, and its sums stay in its cache
  if (own) groups = (groups + threads() - 1) / threads() * threads();
  const auto few = [&](size_t g) {
    const size_t first = rows * g / groups, n = rows * (g + 1) / groups - first;
    return Few(w, {nullptr, w.ic}, bias, x + first * w.ic, n, y + first * w.oc, add, 0, w.oc);
  };
  if (own)
    parallel(groups, [&](size_t g, size_t thread) { apply_by(thread, few(g)); });
  else
    for (size_t g = 0; g < groups; ++g) apply_few(few(g));
  return groups * w.bytes();
}

size_t apply_some(const Mat& w, const Channels& c, const float* bias, const float* x, float* y, bool add) {
  if (w.factors) return apply_factors_some(w, c, bias, x, y, add);
  apply_few({w, c, bias, x, 1, y, add, 0, w.oc});
  size_t bytes = c.count * w.channel_bytes();
  if (w.proc || w.hashed)
    for (size_t i = 0; i < c.count; ++i) bytes += w.delta_bytes(c.list[i]);
  return bytes;
}

size_t apply_halves(const Halves& h, const Channels& kept, const Channels& fine, const float* bias, const float* x,
                    float* y, bool add, size_t o0, size_t o1) {
  if (o0 == o1) return 0;
  apply_few({h.upper, kept, bias, x, 1, y, add, o0, o1, &h.lower, fine});
  return used_bytes(h.upper, {kept, &h, fine}, o0, o1);
}

size_t apply_coarse(const Mat& w, const float* bias, const float* x, size_t tokens, float* y, bool add, Many many) {
  Mat coarse = w;
  coarse.quant = Quant::coarse;
  if (in_bytes(coarse, tokens, many))
    apply_bytes(coarse, bias, x, tokens, y, add);
  else
    apply_many(coarse, bias, x, tokens, y, add);
  return w.bytes();
}

size_t apply_chosen(const Mat& w, const Halves* halves, const SideChoice& choice, const float* bias, const float* x,
                    float* y, bool add, Used (&used)[2]) {
  static thread_local Buffer<float> second;
  Few few(halves ? halves->upper : w, bias, x, y, add, halves ? &halves->lower : nullptr);
  if (threads() == 2 && w.bytes() < kFromMemory) {  // of more, a thread that is done had better take parts of the other
    float* other = second.get(w.oc);
    std::optional<Reading> reading;
    if (few.paced()) reading.emplace(few.w, true);
    parallel_runs(2, [&](size_t side, size_t, size_t thread) {
      const Used own = choice.side(side);
      few.whole_side(few.side(own), side == 1, side == 1 ? other : y, scratch(thread, w.oc));
      used[side] = own;
    });
    if (reading) reading->done(used_bytes(w, used[0], 0, w.oc) + used_bytes(w, used[1], 0, w.oc));
    kernels().add_rows(y, other, 0, 1, w.oc);
    few.add_bias(0);
  } else {
    for (size_t side = 0; side < 2; ++side) used[side] = choice.side(side), few.sides[side] = few.side(used[side]);
    apply_few(few);
  }
  return used_bytes(w, used[0], 0, w.oc) + used_bytes(w, used[1], 0, w.oc);
}

void halve(const Mat& w, const Halves& h) {
  constexpr size_t kChannels = 64, kHalf = 16;
  parallel((w.ic + kChannels - 1) / kChannels, [&](size_t task, size_t) {
    for (size_t i = task * kChannels; i < std::min((task + 1) * kChannels, w.ic); ++i)
      for (size_t o = 0; o < w.oc; o += 2 * kHalf)
        for (size_t j = 0; j < kHalf; ++j) {
          const uint8_t *from = w.data + i * w.row_bytes() + o + j, a = from[0], b = from[kHalf];
          const size_t to = i * h.upper.row_bytes() + o / 2 + j;
          h.upper.data[to] = static_cast<uint8_t>(a >> 4 | (b & 0xf0));
          h.lower.data[to] = static_cast<uint8_t>((a & 0x0f) | b << 4);
        }
  });
}

size_t apply_part(const Mat& w, const Channels& c, const float* bias, const float* x, float* y, size_t o0, size_t o1) {
  if (o0 == o1) return 0;
  if (w.factors) return apply_factors_part(w, c, bias, x, y, o0, o1);
  apply_few({w, c, bias, x, 1, y, false, o0, o1});
  return used_bytes(w, {c}, o0, o1);
}

size_t apply_used(const Mat& w, const Used& used, const float* bias, const float* x, float* y, size_t o0, size_t o1) {
  if (!used.halves) return apply_part(w, used.kept, bias, x, y, o0, o1);
  return apply_halves(*used.halves, used.kept, used.fine, bias, x, y, false, o0, o1);
}

void apply_alone(const Mat& w, const Used& used, const float* bias, const float* x, float* y, size_t o0, size_t o1) {
  const size_t count = used.kept.count;
  start(bias, y, o0, o1);
  if (used.halves)
    kernels().matvec_halves(used.halves->upper, used.halves->lower, used.kept, used.fine, x, y, o0, o1, 0, count);
  else
    table(w.quant).matvec(w, used.kept, x, y, o0, o1, 0, count);
}

size_t used_bytes(const Mat& w, const Used& used, size_t o0, size_t o1) {
  const Channels& c = used.kept;
  if (used.halves)
    return c.count * used.halves->upper.part_bytes(o1 - o0) + used.fine.count * used.halves->lower.part_bytes(o1 - o0);
  if (w.proc) return proc_bytes(w, c, o0, o1);
  return w.hashed ? hashed_bytes(w, c, o0, o1) : c.count * w.part_bytes(o1 - o0);
}

size_t neurons(const NeuronRows& w, const uint32_t* list, size_t count, const float* x, float* y) {
  constexpr size_t kTask = 16 << 10;  // bytes worth handing to a thread
  static thread_local Buffer<float> values;
  const size_t width = w.width(), bytes = count * w.neuron_bytes(), tasks = std::min(threads(), bytes / kTask + 1);
  float* padded_x = values.get(width);
  std::memcpy(padded_x, x, w.d * sizeof(float));
  std::memset(padded_x + w.d, 0, (width - w.d) * sizeof(float));
  if (!list) {
    const auto range = table(w.quant).neuron_range;
    parallel(padded(w.f) / kPad, [&](size_t task, size_t thread) {
      range(w, task * kPad, std::min((task + 1) * kPad, w.f), padded_x, scratch(thread, width), y);
    });
    return w.bytes();
  }
  // Neurons that share their scales go to one thread, which folds them into x once.
  const auto neuron = [&](size_t task) {
    const size_t group = group_size(w.quant);
    size_t i = count * task / tasks;
    while (group && i > 0 && i < count && list[i] / group == list[i - 1] / group) ++i;
    return i;
  };
  const auto kernel = table(w.quant).neurons;
  parallel(tasks, [&](size_t task, size_t thread) {
    const size_t i0 = neuron(task), i1 = neuron(task + 1);
    kernel(w, list + i0, i1 - i0, padded_x, scratch(thread, width), y);
  });
  return bytes;
}

size_t row_dots(const Mat& w, const uint32_t* list, size_t count, const float* x, float* y) {
  constexpr size_t kTask = 8 << 10;  // bytes worth handing to a thread
  const size_t bytes = count * w.channel_bytes(), tasks = std::min(threads(), bytes / kTask + 1);
  parallel(tasks, [&](size_t task, size_t) {
    const size_t i0 = count * task / tasks, i1 = count * (task + 1) / tasks;
    kernels().row_dots(w, list + i0, i1 - i0, x, y);
  });
  return bytes;
}

decltype(Kernels::matvec_f32) matvec_kernel(Quant q) { return table(q).matvec; }
decltype(Kernels::neurons_f32) neurons_kernel(Quant q) { return table(q).neurons; }
decltype(Kernels::neuron_range_f32) neuron_range_kernel(Quant q) { return table(q).neuron_range; }

void largest_scales(const Mat& w, float* out) {
  constexpr size_t kChannels = 64;
  parallel((w.ic + kChannels - 1) / kChannels, [&](size_t task, size_t) {
    for (size_t i = task * kChannels; i < std::min((task + 1) * kChannels, w.ic); ++i) {
      uint16_t top = 0;  // as integers, bf16 magnitudes are ordered too
      for (size_t g = 0; g < w.groups(); ++g) top = std::max<uint16_t>(top, w.scales[i * w.groups() + g] & 0x7fff);
      out[i] = std::bit_cast<float>(uint32_t{top} << 16);
    }
  });
}

void norms(const Mat& w, float* out) {
  if (w.factors) return factors_norms(w, out);
  const auto kernel = table(w.quant).norms;
  constexpr size_t kChannels = 64;
  parallel((w.ic + kChannels - 1) / kChannels,
           [&](size_t task, size_t) { kernel(w, task * kChannels, std::min((task + 1) * kChannels, w.ic), out); });
}

bool pack(const float* rows, size_t n, const Mat& w, size_t o0) {
  const auto kernel = table(w.quant).pack;
  std::atomic<bool> ok{true};
  constexpr size_t kChannels = 64;
  parallel((w.ic + kChannels - 1) / kChannels, [&](size_t task, size_t) {
    const size_t c0 = task * kChannels, c1 = c0 + kChannels < w.ic ? c0 + kChannels : w.ic;
    if (!kernel(rows, n, w, o0, c0, c1)) ok = false;
  });
  return ok;
}
