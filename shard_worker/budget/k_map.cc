#include "shard_worker/budget/k_map.h"

#include <boost/json.hpp>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"

#include "common/status_macros.h"
#include "common/string_view.h"

namespace twinspark {
namespace {

absl::StatusOr<int> Bits(const boost::json::value& value,
                         std::string_view origin,
                         std::string_view key) {
  if (!value.is_int64() || value.as_int64() < 1 || value.as_int64() > 8) {
    return absl::InvalidArgumentError(absl::StrCat(ToAbsl(origin), ": ", ToAbsl(key), " is ",
                                                   boost::json::serialize(value),
                                                   ", expected 1 to 8 bits"));
  }
  return static_cast<int>(value.as_int64());
}

absl::Status ReadBits(const boost::json::object& object,
                      std::string_view key,
                      std::string_view origin,
                      int& bits) {
  const boost::json::value* value = object.if_contains({key.data(), key.size()});
  if (value == nullptr) return absl::OkStatus();
  ASSIGN_OR_RETURN(bits, Bits(*value, origin, key));
  return absl::OkStatus();
}

absl::Status ReadLayers(const boost::json::object& object,
                        std::string_view key,
                        std::string_view origin,
                        std::map<int, int>& layers) {
  const boost::json::value* value = object.if_contains({key.data(), key.size()});
  if (value == nullptr) return absl::OkStatus();
  if (!value->is_object())
    return absl::InvalidArgumentError(
        absl::StrCat(ToAbsl(origin), ": ", ToAbsl(key), " is not an object"));
  for (const auto& [layer, bits] : value->as_object()) {
    int layer_idx = 0;
    if (!absl::SimpleAtoi(absl::string_view(layer.data(), layer.size()), &layer_idx) ||
        layer_idx < 0) {
      return absl::InvalidArgumentError(
          absl::StrCat(ToAbsl(origin), ": ", ToAbsl(key), " has layer '", std::string(layer), "'"));
    }
    ASSIGN_OR_RETURN(layers[layer_idx], Bits(bits, origin, key));
  }
  return absl::OkStatus();
}

int Find(const std::map<int, int>& layers, int layer) {
  const auto found = layers.find(layer);
  return found == layers.end() ? 0 : found->second;
}

}  // namespace

int KMap::BitsOf(std::string_view name) const {
  if (name == "head" || name == "lm_head") return head;
  const std::vector<std::string> parts = absl::StrSplit(ToAbsl(name), '.');
  if (parts[0] == "mtp") return mtp;
  int layer = -1;
  if (parts.size() < 3 || parts[0] != "layers" || !absl::SimpleAtoi(parts[1], &layer)) return 0;
  if (parts[2] == "engram") return Find(engram_wkv, layer);
  if (parts[2] == "ffn" && parts[3] == "shared_experts")
    return Find(parts[4] == "w2" ? shared_w2 : shared_w1_w3, layer);
  if (parts[2] == "ffn") return Find(routed, layer);
  const auto exception = attention_exceptions.find(std::string(name));
  if (exception != attention_exceptions.end()) return exception->second;
  return indexer_wk != 0 && absl::EndsWith(ToAbsl(name), "indexer.wk") ? indexer_wk
                                                                       : attention_default;
}

absl::StatusOr<KMap> ParseKMap(std::string_view json, std::string_view origin) {
  boost::system::error_code error;
  const boost::json::value parsed = boost::json::parse({json.data(), json.size()}, error);
  if (error || !parsed.is_object())
    return absl::InvalidArgumentError(absl::StrCat(ToAbsl(origin), ": not a JSON object"));
  const boost::json::object& object = parsed.as_object();
  KMap map;
  RETURN_IF_ERROR(ReadLayers(object, "routed", origin, map.routed));
  RETURN_IF_ERROR(ReadLayers(object, "shared", origin, map.shared_w1_w3));
  map.shared_w2 = map.shared_w1_w3;
  RETURN_IF_ERROR(ReadLayers(object, "shared_w1_w3", origin, map.shared_w1_w3));
  RETURN_IF_ERROR(ReadLayers(object, "shared_w2", origin, map.shared_w2));
  RETURN_IF_ERROR(ReadLayers(object, "engram", origin, map.engram_wkv));
  RETURN_IF_ERROR(ReadLayers(object, "engram_wkv", origin, map.engram_wkv));
  map.head = 6;  // what the pack has where a map leaves it out
  for (const auto& [key, bits] : std::initializer_list<std::pair<const char*, int*>>{
           {"attn_default", &map.attention_default},
           {"attention_default", &map.attention_default},
           {"indexer_wk_bits", &map.indexer_wk},
           {"mtp", &map.mtp},
           {"mtp_bits", &map.mtp},
           {"head", &map.head},
           {"head_bits", &map.head}}) {
    RETURN_IF_ERROR(ReadBits(object, key, origin, *bits));
  }
  if (const auto* exceptions = object.if_contains("attention_exceptions");
      exceptions != nullptr && exceptions->is_object()) {
    for (const auto& [name, bits] : exceptions->as_object()) {
      ASSIGN_OR_RETURN(map.attention_exceptions[std::string(name)],
                       Bits(bits, origin, "attention_exceptions"));
    }
  }
  if (map.routed.empty() || map.attention_default == 0 || map.mtp == 0) {
    return absl::InvalidArgumentError(
        absl::StrCat(ToAbsl(origin),
                     ": a K map has at least routed, attention_default (or attn_default) and mtp "
                     "(or mtp_bits)"));
  }
  return map;
}

}  // namespace twinspark
