// Picks the kernel table once. The only file that knows which CPU flags a level needs.
#ifdef RALO_HAS_amx
#include <sys/syscall.h>
#endif
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
#define NS avx512vbmi
const Kernels kAvx512Vbmi = {
#include "kernels.def"
};
#undef NS
#ifdef RALO_HAS_amx
#define NS amx
const Kernels kAmx = {
#include "kernels.def"
};
#undef NS
#endif
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
         HAS("avx512vnni");
}
bool has_avx512vbmi() { return has_avx512() && HAS("avx512vbmi") && HAS("avx512vpopcntdq"); }
#ifdef RALO_HAS_amx
// Linux lends a process the registers of tiles when it asks for them.
bool has_amx() {
  constexpr long kAskForState = 0x1023, kTileData = 18;    // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
  constexpr unsigned kTiles = 1u << 24, kInt8 = 1u << 25;  // compilers have other words for them
  unsigned a, b, c, d;
  return has_avx512vbmi() && __get_cpuid_count(7, 0, &a, &b, &c, &d) && (d & kTiles) && (d & kInt8) &&
         syscall(SYS_arch_prctl, kAskForState, kTileData) == 0;
}
#endif
const Level kLevels[] = {
#ifdef RALO_HAS_amx
    {"amx", &kAmx, has_amx()},
#endif
    {"avx512vbmi", &kAvx512Vbmi, has_avx512vbmi()},
    {"avx512", &kAvx512, has_avx512()},
    {"avx2", &kAvx2, has_avx2()},
    {"base", &kBase, true}};
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

namespace {
// Intel's cores wait for at most sixteen lines on their way into the first-level cache: from memory the second-level
// cache fetches more of them at once (docs/log.md, "AMX").
bool is_intel() {
#ifdef RALO_HAS_avx2
  return __builtin_cpu_is("intel") != 0;
#else
  return false;
#endif
}
bool large_first_level() {
#ifdef _SC_LEVEL1_DCACHE_SIZE
  return sysconf(_SC_LEVEL1_DCACHE_SIZE) >= 48 << 10;
#else
  return false;
#endif
}
}  // namespace

bool near_rows = large_first_level() && !is_intel();
const Kernels& kernels() { return *chosen->table; }
const char* level() { return chosen->name; }
const char* const* levels() {
  static const char* names[sizeof kLevels / sizeof *kLevels + 1];
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
