// JSON objects that name a key twice: parsers keep one of the two and say nothing, which for a
// tensor or a setting is a wrong answer.
#pragma once

#include <string>
#include <string_view>

#include "absl/status/status.h"

namespace twinspark {

// kInvalidArgument with the key when any object of the text names a key twice; OK for text that is
// not JSON (the parser says that).
absl::Status CheckUniqueKeys(std::string_view json, std::string_view origin);

}  // namespace twinspark
