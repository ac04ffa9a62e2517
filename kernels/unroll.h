// TWINSPARK_UNROLL before a loop of constant length makes the compiler unroll it fully, so that
// arrays of vectors become registers (-O2 alone leaves them in memory: 20 times slower).
#pragma once

#if defined(__clang__)
#define TWINSPARK_UNROLL _Pragma("clang loop unroll(full)")
#else
#define TWINSPARK_UNROLL _Pragma("GCC unroll 16")
#endif
