// Debian's Abseil keeps its own absl::string_view; our interfaces use std::string_view. Two
// one-line bridges.
#pragma once

#include <string_view>

#include "absl/strings/string_view.h"

namespace twinspark {

inline absl::string_view ToAbsl(std::string_view s) {
  return {s.data(), s.size()};
}
inline std::string_view ToStd(absl::string_view s) {
  return {s.data(), s.size()};
}

}  // namespace twinspark
