// slim_engram --from CHECKPOINT --out DIR: a directory with only what the row service needs, for a
// node that holds no weights: hard links of the files with Engram tables, an index reduced to those
// tensors, config.json, and token map or tokenizer where present. Hard links cost no space and stay
// good when the checkpoint is deleted. Exit codes: 0, 65, 78.
#include <cstdio>
#include <filesystem>
#include <set>
#include <string>
#include <system_error>

#include "absl/strings/str_cat.h"

#include "boost/json.hpp"
#include "common/file_util.h"
#include "common/status_macros.h"
#include "engram_service/tools/tool_flags.h"

namespace twinspark::engram {
namespace {

namespace fs = std::filesystem;
namespace json = boost::json;

constexpr size_t kMaxIndexBytes = size_t{64} << 20;

bool IsTable(const std::string& name) {
  return name.ends_with(".engram.embed.weight") || name.ends_with(".engram.embed.scale");
}

absl::Status Link(const fs::path& from, const fs::path& to) {
  std::error_code error;
  fs::remove(to, error);
  fs::create_hard_link(fs::canonical(from), to, error);
  if (!error) return absl::OkStatus();
  return absl::UnavailableError(absl::StrCat("cannot link ", from.string(), " to ", to.string(),
                                             ": ", error.message(),
                                             "; --out must lie in the same file system"));
}

const ToolUsage kUsage = {
    "slim_engram",
    "A directory with only what the row service needs, of hard links. They change the ctime of the "
    "tables: not while a cluster serves from these files.",
    {
        {"--from", "DIR", "checkpoint"},
        {"--out", "DIR", "in the same file system; created"},
    }};

absl::Status Run(const ToolFlags& flags) {
  const fs::path from = flags.Text("--from");
  const fs::path out = flags.Text("--out");
  if (from.empty() || out.empty()) {
    return absl::InvalidArgumentError(
        "give --from and --out; makes hard links, which changes ctime: not while a cluster serves "
        "from these files");
  }
  const std::string index_name = "model.safetensors.index.json";
  ASSIGN_OR_RETURN(const std::string text, ReadFile((from / index_name).string(), kMaxIndexBytes));
  boost::system::error_code parse_error;
  const json::value index = json::parse(text, parse_error);
  if (parse_error || !index.is_object() || !index.as_object().contains("weight_map") ||
      !index.at("weight_map").is_object()) {
    return absl::DataLossError(absl::StrCat((from / index_name).string(), " has no weight_map"));
  }
  json::object kept;
  std::set<std::string> files;
  for (const auto& item : index.at("weight_map").get_object()) {
    if (!IsTable(std::string(item.key())) || !item.value().is_string()) continue;
    kept[item.key()] = item.value();
    files.insert(std::string(item.value().get_string()));
  }
  if (files.empty()) {
    return absl::NotFoundError(absl::StrCat(from.string(), " has no Engram tables"));
  }
  RETURN_IF_ERROR(MakeDirectories(out.string()));
  for (const std::string& file : files) {
    RETURN_IF_ERROR(Link(from / file, out / fs::path(file).filename()));
  }
  for (auto& item : kept) {
    item.value() = fs::path(std::string(item.value().get_string())).filename().string();
  }
  RETURN_IF_ERROR(WriteFileAtomically((out / index_name).string(),
                                      json::serialize(json::object{{"weight_map", kept}})));
  for (const char* name :
       {"config.json", "engram_constants.json", "token_map_i32.bin", "tokenizer.json"}) {
    if (!fs::exists(from / name)) continue;
    RETURN_IF_ERROR(Link(from / name, out / name));
  }
  printf("%s: %zu table files linked, %zu tensors in the index\n", out.string().c_str(),
         files.size(), kept.size());
  return absl::OkStatus();
}

}  // namespace
}  // namespace twinspark::engram

int main(int argc, char** argv) {
  using namespace twinspark::engram;
  return ToolMain(kUsage, argc, argv, Run);
}
