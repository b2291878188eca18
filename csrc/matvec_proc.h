// One token or a few times weights that are rebuilt from seeds, with floats: every level.
#pragma once
#include "matvec_floats.h"

namespace ISA {

// Outputs [o0, o1), channels pick(i0) to pick(i1 - 1) of `count` in all. A block's rows are rebuilt as bytes in the
// first-level cache and read from there.
template <class Pick, size_t Most>
void panel_proc(const Mat& w, Pick pick, size_t count, const Tokens<Most>& tokens, size_t o0, size_t o1, size_t i0,
                size_t i1) {
  const Columns columns(w.proc->columns, w.oc);
  const size_t rb = w.row_bytes(), b0 = o0 / kPad, b1 = o1 / kPad, k0 = columns.of(b0), k1 = columns.of(b1 - 1) + 1;
  alignas(64) uint8_t bytes[kPass * kPad], turned[kPass][kPad];
  float xs[Most * kPass];
  const RowsAt<All, kPass> built(bytes, kPad, 0, All{}, 0, kPass);
  for (size_t i = i0; i < i1; i += kPass) {
    const size_t n = upto(i1 - i, kPass), next = i + n;
    const RowsAt<Pick, kPass> rows(w.data, rb, 0, pick, i, n);
    Ahead<Pick> ahead(w.data, rb, k0 * kPad, (k1 - k0) * kPad, pick, next);
    ahead.move(next, upto(next + kPass, count));
    for (size_t k = k0; k < k1; ++k) {
      ahead.fetch(n);
      for (size_t r = 0; r < n; ++r) {
        const size_t c = pick(i + r);
        const float scale = bf16_to_f32(w.scales[c * columns.all + k]);
        for (size_t t = 0; t < tokens.count(); ++t) xs[t * kPass + r] = tokens.x_of(t)[c] * scale;
      }
      const size_t first = columns.first(k), blocks = columns.blocks(k);
      for (size_t j = 0; j < blocks; ++j) {
        if (first + j < b0 || first + j >= b1) continue;
        const int8_t* tables = tables_of(*w.proc, blocks, j);
        for (size_t r = 0; r < n; ++r)
          rebuild(rows[r] + k * kPad, seeds_before(rows[r], columns.all, k, turned[r]), tables, bytes + r * kPad);
        for (size_t o = 0; o < kPad; o += kBlock)
          batches<Most == 1 ? 1 : kBatch>(tokens.count(), [&](auto size, size_t t) {
            add_block<Int8Row, decltype(size)::value>(built, n, o, xs + t * kPass, 1,
                                                      tokens.y_of(t) + (first + j) * kPad + o, tokens.y_stride);
          });
      }
    }
  }
}

template <class Pick, size_t Most>
void all_deltas(const Mat& w, Pick pick, const Tokens<Most>& tokens, size_t o0, size_t o1, size_t i0, size_t i1) {
  if (!w.proc->starts) return;
  for (size_t i = i0; i < i1; ++i)
    for (size_t t = 0; t < tokens.count(); ++t)
      add_deltas(*w.proc, pick(i), o0, o1 - o0, tokens.x_of(t)[pick(i)], tokens.y_of(t) + o0);
}

}  // namespace ISA
