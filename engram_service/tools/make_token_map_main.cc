// make_token_map --tokenizer FILE --out FILE: writes token_map_i32.bin for a model directory.
// --check FILE instead of --out compares with an existing map. Exit codes: 0, 1 maps differ, 65 bad
// tokenizer, 78 bad flags.
#include <cstdint>
#include <cstdio>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"

#include "common/file_util.h"
#include "common/status_macros.h"
#include "engram_service/store/token_map.h"
#include "engram_service/tools/token_map_builder.h"
#include "engram_service/tools/tool_flags.h"

namespace twinspark::engram {
namespace {

constexpr size_t kMaxTokenizerBytes = size_t{256} << 20;

const ToolUsage kUsage = {
    "make_token_map",
    "Token id to compressed id, from a tokenizer; exit code 1 when --check finds a difference.",
    {
        {"--tokenizer", "FILE", "tokenizer.json"},
        {"--out", "FILE", "the map to write: token_map_i32.bin of a model directory"},
        {"--check", "FILE", "instead of --out: compares with this map"},
    }};

// `code` is the exit code of a run without an error: 1 when --check finds another map.
absl::Status Run(const ToolFlags& flags, int& code) {
  const std::string tokenizer = flags.Text("--tokenizer");
  const std::string out = flags.Text("--out");
  const std::string check = flags.Text("--check");
  if (tokenizer.empty() || out.empty() == check.empty()) {
    return absl::InvalidArgumentError("give --tokenizer and one of --out and --check");
  }
  ASSIGN_OR_RETURN(const std::string json, ReadFile(tokenizer, kMaxTokenizerBytes));
  auto classes = BuildTokenMap(json);
  if (!classes.ok()) {
    return absl::DataLossError(absl::StrCat(tokenizer, ": ", classes.status().message()));
  }
  std::string bytes;
  for (const int32_t value : *classes) {
    for (int i = 0; i < 4; ++i)
      bytes.push_back(static_cast<char>(value >> (8 * i)));
  }
  const auto map = TokenMap::FromClasses(*std::move(classes));
  if (!map.ok()) return absl::DataLossError(map.status().message());
  printf("%d ids, %llu classes, SHA-256 %s\n", map->size(),
         static_cast<unsigned long long>(map->num_classes()), Hex(map->digest()).c_str());
  if (!check.empty()) {
    ASSIGN_OR_RETURN(const std::string existing, ReadFile(check, kMaxTokenizerBytes));
    const bool equal = existing == bytes;
    printf("%s %s\n", check.c_str(), equal ? "is the same" : "differs");
    code = equal ? 0 : 1;
    return absl::OkStatus();
  }
  return WriteFileAtomically(out, bytes);
}

}  // namespace
}  // namespace twinspark::engram

int main(int argc, char** argv) {
  using namespace twinspark::engram;
  int code = 0;
  const int failed =
      ToolMain(kUsage, argc, argv, [&](const ToolFlags& flags) { return Run(flags, code); });
  return failed != 0 ? failed : code;
}
