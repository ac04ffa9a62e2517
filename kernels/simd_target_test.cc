// Goal: targets can be listed, pinned by name and released; a wrong name names the choices.
#include "kernels/simd_target.h"

#include <string>
#include <vector>

#include <gtest/gtest.h>

namespace twinspark {
namespace {

TEST(SimdTarget, PinsEveryListedTargetAndGoesBack) {
  const std::vector<std::string> targets = SimdTargets();
  ASSERT_FALSE(targets.empty());
  EXPECT_EQ(SimdTarget(), targets.front());
  for (const std::string& name : targets) {
    ASSERT_TRUE(PinSimdTarget(name).ok());
    EXPECT_EQ(SimdTarget(), name);
    EXPECT_EQ(SimdTargets(), targets) << "the list does not depend on the pin";
  }
  const std::string pinned = SimdTarget();
  const absl::Status wrong = PinSimdTarget("AVX9");
  EXPECT_EQ(wrong.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_NE(std::string(wrong.message()).find(targets.front()), std::string::npos);
  EXPECT_EQ(SimdTarget(), pinned) << "a refused name changes nothing";
  ASSERT_TRUE(PinSimdTarget("auto").ok());
  EXPECT_EQ(SimdTarget(), targets.front());
}

}  // namespace
}  // namespace twinspark
