// The file of accepted API keys (API_KEY_FILE).
#pragma once

#include <string>
#include <vector>

#include "absl/status/statusor.h"

namespace twinspark {

// One key per line, without the spaces around it; empty lines and lines that begin with # are
// skipped. kInvalidArgument when no key is left or the file is too large, kNotFound when it cannot
// be read.
absl::StatusOr<std::vector<std::string>> ReadApiKeys(const std::string& path);

}  // namespace twinspark
