// Reading and checking of the map; the released one is linked into the program as bytes.
#include "engram_service/store/token_map.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"

#include "common/status_macros.h"
#include "engram_service/store/file_io.h"

// The file as it is, between two symbols of the read-only segment.
__asm__(
    ".section .rodata\n"
    ".balign 64\n"
    ".global twinspark_released_token_map\n"
    "twinspark_released_token_map:\n"
    ".incbin \"" TWINSPARK_RELEASED_TOKEN_MAP
    "\"\n"
    ".global twinspark_released_token_map_end\n"
    "twinspark_released_token_map_end:\n"
    ".byte 0\n"
    ".previous\n");

extern "C" {
extern const uint8_t twinspark_released_token_map[];
extern const uint8_t twinspark_released_token_map_end[];
}

namespace twinspark::engram {
namespace {

constexpr size_t kMaxTokenizerBytes = size_t{256} << 20;
constexpr size_t kMaxMapBytes = size_t{64} << 20;

}  // namespace

absl::StatusOr<TokenMap> TokenMap::FromClasses(std::vector<int32_t> classes) {
  std::vector<bool> used(classes.size());
  int32_t largest = -1;
  for (size_t id = 0; id < classes.size(); ++id) {
    const int32_t value = classes[id];
    if (value < 0 || static_cast<size_t>(value) >= classes.size()) {
      return absl::DataLossError(absl::StrCat("token map: id ", id, " has class ", value,
                                              "; expected 0..", classes.size() - 1));
    }
    used[static_cast<size_t>(value)] = true;
    largest = std::max(largest, value);
  }
  for (int32_t value = 0; value <= largest; ++value) {
    if (!used[static_cast<size_t>(value)]) {
      return absl::DataLossError(absl::StrCat("token map: no id has class ", value, ", but ",
                                              largest, " is used; the map is cut or damaged"));
    }
  }
  TokenMap map;
  Sha256 hash;
  for (const int32_t value : classes)
    hash.UpdateU32(static_cast<uint32_t>(value));
  map.digest_ = hash.Finish();
  map.classes_ = std::move(classes);
  map.num_classes_ = static_cast<uint64_t>(largest + 1);
  return map;
}

absl::StatusOr<TokenMap> TokenMap::FromBytes(std::span<const uint8_t> bytes) {
  if (bytes.empty() || bytes.size() % 4 != 0) {
    return absl::DataLossError(
        absl::StrCat("token map has ", bytes.size(), " bytes; expected 4 per token id"));
  }
  std::vector<int32_t> classes(bytes.size() / 4);
  for (size_t i = 0; i < classes.size(); ++i) {
    const uint8_t* b = &bytes[4 * i];
    classes[i] = static_cast<int32_t>(b[0] | (uint32_t{b[1]} << 8) | (uint32_t{b[2]} << 16) |
                                      (uint32_t{b[3]} << 24));
  }
  return FromClasses(std::move(classes));
}

std::span<const uint8_t> ReleasedTokenMapBytes() {
  return {twinspark_released_token_map, twinspark_released_token_map_end};
}

absl::StatusOr<TokenMap> LoadTokenMap(const std::string& model_dir) {
  const std::string path = model_dir + "/token_map_i32.bin";
  if (FileExists(path)) {
    ASSIGN_OR_RETURN(const std::vector<uint8_t> bytes, ReadWholeFile(path, kMaxMapBytes));
    auto map = TokenMap::FromBytes(bytes);
    if (!map.ok()) {
      return absl::DataLossError(absl::StrCat(path, ": ", map.status().message()));
    }
    return map;
  }
  const std::string tokenizer = model_dir + "/tokenizer.json";
  std::string seen = "there is no tokenizer.json either";
  if (FileExists(tokenizer)) {
    ASSIGN_OR_RETURN(const std::vector<uint8_t> bytes,
                     ReadWholeFile(tokenizer, kMaxTokenizerBytes));
    const std::string digest = Hex(Sha256Of(bytes));
    if (digest == kReleasedTokenizerSha256) return TokenMap::FromBytes(ReleasedTokenMapBytes());
    seen = absl::StrCat("tokenizer.json is not the released one (SHA-256 ", digest, ")");
  }
  return absl::NotFoundError(absl::StrCat("no token map: ", path, " does not exist and ", seen,
                                          "; make one with: make_token_map --tokenizer ", tokenizer,
                                          " --out ", path));
}

}  // namespace twinspark::engram
