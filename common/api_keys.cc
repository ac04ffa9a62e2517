// See api_keys.h.
#include "common/api_keys.h"

#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"

#include "common/file_util.h"
#include "common/limits.h"
#include "common/status_macros.h"

namespace twinspark {

absl::StatusOr<std::vector<std::string>> ReadApiKeys(const std::string& path) {
  ASSIGN_OR_RETURN(const std::string text, ReadFile(path, limits::kMaxSettingsFileBytes));
  std::vector<std::string> keys;
  for (absl::string_view line : absl::StrSplit(text, '\n')) {
    line = absl::StripAsciiWhitespace(line);
    if (!line.empty() && line.front() != '#') keys.emplace_back(line);
  }
  if (keys.empty()) {
    return absl::InvalidArgumentError(absl::StrCat(
        path, " holds no key; one line is one key, lines that begin with # are comments"));
  }
  return keys;
}

}  // namespace twinspark
