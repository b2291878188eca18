// Packed keys of one text: codes that guess which keys a query will look at, kept beside the cache.
#pragma once
#include "buffer.h"
#include "slots.h"

// Of one kv head, block by block.
struct HeadCodes {
  LineVector<uint64_t> bits;
  LineVector<uint16_t> scales, means;  // means: f16 (blocks, ep)
  LineVector<float> values;            // (blocks, ep): sums from the first block on
  void resize(size_t blocks, size_t words, size_t ep);
  Codes codes(size_t words) const { return {bits.data(), scales.data(), words}; }
  size_t nbytes() const;
};

// How well packed attention did at one position, by kv head: |packed - exact| beside the typical |exact| of a head.
struct Check {
  size_t position;
  std::vector<float> error;
};

struct KeyCodes : State {
  CodeForm form;
  std::vector<HeadCodes> heads;
  size_t blocks = 0, ep = 0;
  std::vector<Check> checks;
  explicit KeyCodes(const CodeForm& f) : form(f) {}
  std::unique_ptr<State> clone() const override { return std::make_unique<KeyCodes>(*this); }
  void trim(size_t length) override;
  size_t nbytes() const override;
  // Codes of all blocks that are complete at `end`; bytes of keys and values read for those that were missing.
  size_t grow(const Cache& c, size_t end);
  size_t words() const { return form.words(ep); }
  size_t block_bytes() const;  // of one head, that a scan reads
};
