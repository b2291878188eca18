// Asking for memory that is read soon.
#pragma once
#include <cstddef>

// A function that does nothing but ask must be inlined, always: compilers take it for one without effect and leave its
// calls out.
#define ASKS [[gnu::always_inline]] inline

// The lines of `bytes` from `at` on, into the second-level cache.
ASKS void ask(const void* at, size_t bytes) {
  const char* from = static_cast<const char*>(at);
  for (size_t i = 0; i < bytes; i += 64) __builtin_prefetch(from + i, 0, 2);
}
