// Picks the kernel table once. The only file that knows which CPU flags a level needs.
#include <unistd.h>

#include <cstring>

#include "kernels.h"
#ifdef RALO_HAS_avx2
#include <cpuid.h>
#endif

namespace {
#define KERNEL(ret, name, params) NS::name,
#define NS base
const Kernels kBase = {
#include "kernels.def"
};
#undef NS
#ifdef RALO_HAS_avx2
#define NS avx2
const Kernels kAvx2 = {
#include "kernels.def"
};
#undef NS
#define NS avx512
const Kernels kAvx512 = {
#include "kernels.def"
};
#undef NS
#endif

struct Level {
  const char* name;
  const Kernels* table;
  bool runs_here;
};

#ifdef RALO_HAS_avx2
#define HAS(flag) (__builtin_cpu_supports(flag) != 0)
bool has_f16c() {  // asked directly: older Clang does not know the word
  unsigned a, b, c, d;
  return __get_cpuid(1, &a, &b, &c, &d) && (c & bit_F16C);
}
bool has_avx2() { return HAS("avx2") && HAS("fma") && has_f16c() && HAS("popcnt") && HAS("bmi2"); }
bool has_avx512() {
  return has_avx2() && HAS("avx512f") && HAS("avx512bw") && HAS("avx512vl") && HAS("avx512dq") && HAS("avx512cd") &&
         HAS("avx512vbmi") && HAS("avx512vnni") && HAS("avx512vpopcntdq");
}
const Level kLevels[] = {{"avx512", &kAvx512, has_avx512()}, {"avx2", &kAvx2, has_avx2()}, {"base", &kBase, true}};
#else
const Level kLevels[] = {{"base", &kBase, true}};
#endif

const Level* best() {
  for (const Level& l : kLevels)
    if (l.runs_here) return &l;
  return nullptr;
}
const Level* chosen = best();
}  // namespace

#ifdef _SC_LEVEL1_DCACHE_SIZE
bool near_rows = sysconf(_SC_LEVEL1_DCACHE_SIZE) >= 48 << 10;
#else
bool near_rows = false;
#endif
const Kernels& kernels() { return *chosen->table; }
const char* level() { return chosen->name; }
const char* const* levels() {
  static const char* names[4];
  int n = 0;
  for (const Level& l : kLevels)
    if (l.runs_here) names[n++] = l.name;
  names[n] = nullptr;
  return names;
}
bool force_level(const char* name) {
  for (const Level& l : kLevels)
    if (l.runs_here && !std::strcmp(l.name, name)) {
      chosen = &l;
      return true;
    }
  return false;
}
