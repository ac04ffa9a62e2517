// A K map: how many bits each EXL3 matrix of a pack is said to have. Only a hint for planning; K of
// a stored matrix comes from its trellis shape. Two spellings are read: ours (routed, shared_w1_w3,
// shared_w2, engram_wkv, attention_default, attention_exceptions) and the serving kit's (routed,
// shared, engram, attn_default, indexer_wk_bits, mtp_bits, head_bits). Source: EXL3
// specification 9.1.
#pragma once

#include <map>
#include <string>
#include <string_view>

#include "absl/status/statusor.h"

namespace twinspark {

struct KMap {
  std::map<int, int> routed;  // layer > K
  std::map<int, int> shared_w1_w3;
  std::map<int, int> shared_w2;
  std::map<int, int> engram_wkv;
  int attention_default = 0;
  std::map<std::string, int> attention_exceptions;  // matrix name > K
  int indexer_wk = 0;  // 0: as attention_default, unless an exception says otherwise
  int mtp = 0;
  int head = 0;

  // K of a matrix by its name in the pack; 0 when the map does not know it.
  int BitsOf(std::string_view name) const;
};

absl::StatusOr<KMap> ParseKMap(std::string_view json, std::string_view origin);

}  // namespace twinspark
