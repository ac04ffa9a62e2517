// See engram_checker.h.
#include "tests/golden/engram/engram_checker.h"

#include "common/file_util.h"
#include "engram_service/store/file_io.h"

namespace twinspark::golden {
namespace {

constexpr size_t kMaxFileBytes = size_t{256} << 20;

}  // namespace

std::optional<json::object> EngramChecker::ReadJson(const std::string& name) {
  const std::string path = dir_ + "/" + name;
  if (!engram::FileExists(path)) return std::nullopt;
  const auto text = ReadFile(path, kMaxFileBytes);
  boost::system::error_code error;
  json::value value;
  if (text.ok()) value = json::parse(*text, error);
  if (!text.ok() || error || !value.is_object()) {
    report_.Error(path + " is not readable JSON");
    return std::nullopt;
  }
  return value.as_object();
}

int EngramChecker::Run() {
  const std::string map_path = dir_ + "/token_map_i32.bin";
  if (engram::FileExists(map_path)) {
    const auto bytes = engram::ReadWholeFile(map_path, kMaxFileBytes);
    auto map = bytes.ok() ? TokenMap::FromBytes(*bytes) : absl::StatusOr<TokenMap>(bytes.status());
    Record("token_map_i32.bin", map.ok(), std::string(map.status().message()));
    if (map.ok()) map_ = *std::move(map);
    if (map_ && !tokenizer_.empty()) CheckMapAgainstTokenizer();
  }
  const std::pair<const char*, void (EngramChecker::*)(const json::object&)> files[] = {
      {"token_map.json", &EngramChecker::CheckTokenMap},
      {"constants.json", &EngramChecker::CheckConstants},
      {"hash_small.json", &EngramChecker::CheckHashSmall},
      {"hash_released.json", &EngramChecker::CheckHashReleased},
      {"dequant.json", &EngramChecker::CheckDequant},
      {"gate_small.json", &EngramChecker::CheckGate},
      {"shards.json", &EngramChecker::CheckShards},
      {"packed_page.json", &EngramChecker::CheckPackedPage},
  };
  for (const auto& [name, check] : files) {
    const auto want = ReadJson(name);
    if (!want) continue;
    try {
      (this->*check)(*want);
    } catch (const std::exception& error) {
      report_.Error(std::string(name) + ": " + error.what());
    }
  }
  return report_.Finish();
}

}  // namespace twinspark::golden
