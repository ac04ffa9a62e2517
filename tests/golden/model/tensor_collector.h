// Keeps what a forward pass shows (shard_worker/model/forward_observer.h), rows of successive steps
// one below the other, as f32. Lists become rows padded with -1, scores rows padded with -inf.
#pragma once

#include <cstdint>
#include <string>

#include "absl/container/flat_hash_map.h"

#include "shard_worker/model/forward_observer.h"
#include "tests/golden/model/golden_case.h"
#include "tests/golden/model/memory_row_source.h"

namespace twinspark::golden {

class TensorCollector : public ForwardObserver {
 public:
  // `rows` gives the Engram row numbers of the step in progress; borrowed.
  TensorCollector(const MemoryRowSource& rows, std::vector<int> engram_layer_ids)
      : rows_(rows), engram_layer_ids_(std::move(engram_layer_ids)) {}

  void Tensor(const std::string& name, const ConstTensorView& value) override;
  void Lists(const std::string& name, const ConstTensorView& lists, const int32_t* counts) override;

  void Clear() { values_.clear(); }
  const Values* Find(const std::string& name) const;

 private:
  // Appends rows, widening the narrower side with `fill`.
  void Append(const std::string& name, const Values& rows, float fill);

  const MemoryRowSource& rows_;
  const std::vector<int> engram_layer_ids_;
  absl::flat_hash_map<std::string, Values> values_;
};

}  // namespace twinspark::golden
