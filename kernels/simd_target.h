// Choice of the SIMD target of all CPU ops (Highway's run-time dispatch). By default the best one
// that the processor has; a setting or a test can pin another. Process-wide: call it at start,
// before the first op and from one thread.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"

namespace twinspark {

// Names of the targets that this build has and this processor supports, best first ("AVX2", ...).
std::vector<std::string> SimdTargets();

// Name of the target in use.
std::string SimdTarget();

// Pins one of SimdTargets(); "auto" or "" goes back to the best. InvalidArgument names the choices.
absl::Status PinSimdTarget(std::string_view name);

}  // namespace twinspark
