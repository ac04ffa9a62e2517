// make_token_map --tokenizer FILE --out FILE: writes token_map_i32.bin for a model directory.
// --check FILE instead of --out compares with an existing map. Exit codes: 0, 1 maps differ, 65 bad
// tokenizer, 78 bad flags.
#include <cstdint>
#include <cstdio>
#include <string>
#include <string_view>
#include <vector>

#include "common/exit_codes.h"
#include "common/file_util.h"
#include "engram_service/store/token_map.h"
#include "engram_service/tools/token_map_builder.h"

namespace twinspark::engram {
namespace {

constexpr size_t kMaxTokenizerBytes = size_t{256} << 20;

int Fail(int code, const std::string& text) {
  fprintf(stderr, "make_token_map: %s\n", text.c_str());
  return code;
}

int Run(const std::vector<std::string>& args) {
  std::string tokenizer;
  std::string out;
  std::string check;
  for (size_t i = 0; i < args.size(); i += 2) {
    std::string* to = args[i] == "--tokenizer" ? &tokenizer
                      : args[i] == "--out"     ? &out
                      : args[i] == "--check"   ? &check
                                               : nullptr;
    if (to == nullptr || i + 1 == args.size()) {
      return Fail(kExitBadConfig,
                  "usage: make_token_map --tokenizer FILE (--out FILE | --check FILE)");
    }
    *to = args[i + 1];
  }
  if (tokenizer.empty() || out.empty() == check.empty()) {
    return Fail(kExitBadConfig, "give --tokenizer and one of --out and --check");
  }
  const auto json = ReadFile(tokenizer, kMaxTokenizerBytes);
  if (!json.ok()) return Fail(kExitBadData, std::string(json.status().message()));
  auto classes = BuildTokenMap(*json);
  if (!classes.ok()) {
    return Fail(kExitBadData, tokenizer + ": " + std::string(classes.status().message()));
  }
  std::string bytes;
  for (const int32_t value : *classes) {
    for (int i = 0; i < 4; ++i)
      bytes.push_back(static_cast<char>(value >> (8 * i)));
  }
  const auto map = TokenMap::FromClasses(*std::move(classes));
  if (!map.ok()) return Fail(kExitBadData, std::string(map.status().message()));
  printf("%d ids, %llu classes, SHA-256 %s\n", map->size(),
         static_cast<unsigned long long>(map->num_classes()), Hex(map->digest()).c_str());
  if (!check.empty()) {
    const auto existing = ReadFile(check, kMaxTokenizerBytes);
    if (!existing.ok()) return Fail(kExitBadData, std::string(existing.status().message()));
    const bool equal = *existing == bytes;
    printf("%s %s\n", check.c_str(), equal ? "is the same" : "differs");
    return equal ? 0 : 1;
  }
  const absl::Status written = WriteFileAtomically(out, bytes);
  if (!written.ok()) return Fail(kExitBadData, std::string(written.message()));
  return 0;
}

}  // namespace
}  // namespace twinspark::engram

int main(int argc, char** argv) {
  return twinspark::engram::Run(std::vector<std::string>(argv + 1, argv + argc));
}
