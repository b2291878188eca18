// Integer dot products of AVX-512 VNNI. Written in assembly because compilers copy the sums of the intrinsics from
// register to register until they run out of them.
#pragma once
#ifdef __AVX512VNNI__
#include <immintrin.h>

#include "written_out.h"

namespace ISA {

// Each 32-bit lane of acc += four products of w's unsigned and x's signed bytes.
inline void dot_bytes(__m512i& acc, __m512i w, __m512i x) { asm("vpdpbusd %2, %1, %0" : "+v"(acc) : "v"(w), "v"(x)); }
// Each 32-bit lane of acc += two products of signed 16-bit words.
inline void dot_words(__m512i& acc, __m512i a, __m512i b) { asm("vpdpwssd %2, %1, %0" : "+v"(acc) : "v"(a), "v"(b)); }

}  // namespace ISA
#endif
