// See simd_target.h.
#include "kernels/simd_target.h"

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"

#include "common/check.h"
#include "hwy/highway.h"

namespace twinspark {
namespace {

// Bits of the targets this build has code for and the processor runs, best first, ignoring a pin.
std::vector<int64_t> AllTargets() {
  hwy::SetSupportedTargetsForTest(0);
  return hwy::SupportedAndGeneratedTargets();  // Highway numbers better targets lower
}

}  // namespace

std::vector<std::string> SimdTargets() {
  const int64_t pinned = hwy::SupportedTargets();
  std::vector<std::string> names;
  for (int64_t target : AllTargets())
    names.emplace_back(hwy::TargetName(target));
  hwy::SetSupportedTargetsForTest(pinned);
  return names;
}

std::string SimdTarget() {
  const std::vector<int64_t> targets = hwy::SupportedAndGeneratedTargets();
  CHECK(!targets.empty());
  return hwy::TargetName(targets.front());
}

absl::Status PinSimdTarget(std::string_view name) {
  const int64_t before = hwy::SupportedTargets();
  const std::vector<int64_t> targets = AllTargets();
  int64_t chosen = 0;
  std::vector<std::string> names;
  for (int64_t target : targets) {
    names.emplace_back(hwy::TargetName(target));
    if (name == names.back()) chosen = target;
  }
  const bool automatic = name.empty() || name == "auto";
  if (!automatic) hwy::SetSupportedTargetsForTest(chosen != 0 ? chosen : before);
  hwy::GetChosenTarget().Update(hwy::SupportedTargets());
  if (automatic || chosen != 0) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat("SIMD target \"", std::string(name), "\" is not one of auto, ",
                   absl::StrJoin(names, ", "), " (what this processor and this build have)"));
}

}  // namespace twinspark
