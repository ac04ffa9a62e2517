// Compares hashing, token map, dequantisation, gate and packed format with a directory of Engram
// vectors. Every file that is there counts; which files hold what is the vectors' README. By topic:
// check_hashing.cc, check_numbers.cc, check_formats.cc. Caller: golden_engram.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "boost/json.hpp"
#include "engram_service/store/hasher.h"
#include "engram_service/store/row_format.h"
#include "engram_service/store/sha256.h"
#include "kernels/thread_pool.h"
#include "tests/golden/golden_report.h"

namespace twinspark::golden {

namespace json = boost::json;
using engram::EngramShape;
using engram::Hasher;
using engram::Hex;
using engram::LayerHash;
using engram::Sha256;
using engram::TokenMap;
using engram::Window;

// Reading of JSON with a shape that is known: a wrong one throws out of Boost.JSON and ends the
// check of that file as an error.
inline int64_t Int(const json::value& value) {
  return value.to_number<int64_t>();
}

template <typename T>
std::vector<T> Numbers(const json::value& list) {
  std::vector<T> out;
  for (const auto& v : list.as_array())
    out.push_back(v.to_number<T>());
  return out;
}

inline std::string Text(const json::value& value) {
  return std::string(value.as_string());
}

inline std::string HexOfBytes(std::span<const uint8_t> bytes) {
  return Hex(bytes);
}

template <typename T>
std::string HexOfStruct(const T& value, size_t bytes) {
  return Hex({reinterpret_cast<const uint8_t*>(&value), bytes});
}

inline std::vector<uint8_t> BytesOfHex(const std::string& hex) {
  std::vector<uint8_t> bytes;
  for (size_t i = 0; i + 1 < hex.size(); i += 2) {
    bytes.push_back(static_cast<uint8_t>(std::stoi(hex.substr(i, 2), nullptr, 16)));
  }
  return bytes;
}

// Not thread-safe.
class EngramChecker {
 public:
  EngramChecker(std::string dir, std::string tokenizer)
      : dir_(std::move(dir)), tokenizer_(std::move(tokenizer)) {}

  int Run();

 private:
  void Record(const std::string& name, bool ok, const std::string& detail = "") {
    report_.Plan(1);
    report_.CompareRecord(name, ok, detail);
  }
  template <typename T>
  void Equal(const std::string& name, const T& got, const T& want) {
    Record(name, got == want);
  }
  void Equal(const std::string& name, const std::string& got, const std::string& want) {
    Record(name, got == want, got == want ? got : got + " instead of " + want);
  }

  std::optional<json::object> ReadJson(const std::string& name);
  void CheckTokenMap(const json::object& want);
  void CheckMapAgainstTokenizer();
  void CheckConstants(const json::object& want);
  void CheckTrace(const json::object& want, int count, uint64_t bound);
  void CheckHashSmall(const json::object& want);
  void CheckHashSmallRows(const Hasher& hasher, const json::object& want);
  void CheckHashTraces(const Hasher& hasher, const json::object& want);
  void CheckChunked(const Hasher& hasher, const json::object& want);
  void CheckHashReleased(const json::object& want);
  void CheckDequant(const json::object& want);
  void CheckDequantRows(const json::object& want);
  void CheckGate(const json::object& want);
  void CheckShards(const json::object& want);
  void CheckRanges(const LayerHash& layer, const json::object& ranges);
  void CheckCompat(const json::object& want);
  void CheckPackedPage(const json::object& want);
  void CheckPages(const json::object& want,
                  const engram::PackedLayout& layout,
                  const std::vector<uint8_t>& data);
  void CheckTinyFile(const json::object& want,
                     const engram::PackedLayout& layout,
                     const std::vector<uint8_t>& data);

  const std::string dir_;
  const std::string tokenizer_;
  GoldenReport report_;
  ThreadPool pool_{1};
  std::optional<TokenMap> map_;       // token_map_i32.bin
  std::optional<EngramShape> shape_;  // of constants.json
  std::vector<LayerHash> layers_;     // that shape's constants
};

}  // namespace twinspark::golden
