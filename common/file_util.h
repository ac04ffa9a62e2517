// Whole small files, with the path in every error.
#pragma once

#include <cstddef>
#include <string>
#include <string_view>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace twinspark {

// kNotFound when the file is not there, kInvalidArgument when it is larger than max_bytes.
absl::StatusOr<std::string> ReadFile(const std::string& path, size_t max_bytes);

// Writes beside it and renames: readers see the old content or the new one. Used for PORT_FILE and
// state files.
absl::Status WriteFileAtomically(const std::string& path, std::string_view content);

}  // namespace twinspark
