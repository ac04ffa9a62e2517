// Goal: alignment, reuse after a scope, the peak, and the refusal to give more than was planned.
#include "kernels/arena.h"

#include <cstdint>
#include <cstring>

#include <gtest/gtest.h>

namespace twinspark {
namespace {

bool Aligned(const void* p) {
  return reinterpret_cast<uintptr_t>(p) % Arena::kAlign == 0;
}

TEST(Arena, GivesAlignedDisjointZeroedMemory) {
  Arena arena(1000);
  EXPECT_EQ(arena.capacity_bytes(), 1024u);
  char* a = arena.Take<char>(1);
  double* b = arena.Take<double>(9);
  EXPECT_TRUE(Aligned(a) && Aligned(b));
  EXPECT_GE(reinterpret_cast<char*>(b), a + 1);
  for (int i = 0; i < 9; ++i)
    EXPECT_EQ(b[i], 0.0);
  std::memset(b, 1, 9 * sizeof(double));
  EXPECT_EQ(*a, 0);
  EXPECT_EQ(arena.used_bytes(), 64u + 128u);
}

TEST(Arena, ScopesGiveBackAndThePeakStays) {
  Arena arena(4096);
  arena.TakeBytes(64);
  void* first = nullptr;
  {
    const Arena::Scope scope(arena);
    first = arena.TakeBytes(1000);
    {
      const Arena::Scope inner(arena);
      arena.TakeBytes(2000);
    }
    EXPECT_EQ(arena.used_bytes(), 64u + 1024u);
  }
  EXPECT_EQ(arena.used_bytes(), 64u);
  EXPECT_EQ(arena.peak_bytes(), 64u + 1024u + 2048u);
  EXPECT_EQ(arena.TakeBytes(1), first);
}

TEST(Arena, BorrowedMemoryIsUsedAsItIs) {
  alignas(Arena::kAlign) char memory[256];
  Arena arena(memory, sizeof(memory));
  EXPECT_EQ(arena.TakeBytes(10), memory);
  EXPECT_EQ(arena.TakeBytes(10), memory + 64);
}

TEST(ArenaDeathTest, MoreThanPlannedIsABug) {
  Arena arena(128);
  arena.TakeBytes(64);
  EXPECT_DEATH(arena.TakeBytes(65), "memory plan");
}

}  // namespace
}  // namespace twinspark
