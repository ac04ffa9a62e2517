// Checkpoints as values: read one, change tensors, write it elsewhere. For tests that derive pack
// layouts or damage packs.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "common/safetensors.h"

namespace twinspark::packs {

struct Entry {
  std::string dtype;  // as in a header: "BF16"
  std::vector<int64_t> shape;
  std::string bytes;

  int64_t rows() const { return shape.at(0); }
  int64_t cols() const { return shape.at(1); }
};

struct CheckpointBuilder {
  std::string config_json;
  std::map<std::string, std::string> other_files;  // token map and the like: name > content
  std::map<std::string, Entry> tensors;

  // Everything in `dir`; CHECKs that it can be read.
  static CheckpointBuilder Read(const std::string& dir);
  // One model.safetensors, its index, and the other files.
  void Write(const std::string& dir) const;
  // Only the bytes of model.safetensors.
  std::string SafetensorsBytes() const;

  // Names with this prefix.
  std::vector<std::string> Names(const std::string& prefix) const;
  void ErasePrefix(const std::string& prefix);
  // Moves the four tensors of an EXL3 matrix, or weight and scale, from another checkpoint.
  void TakeMatrix(const CheckpointBuilder& from, const std::string& matrix);
};

// The matrix `name` as a dense [out, in] weight: EXL3 in F32 (decoded, both Hadamards in double),
// FP8 and FP4 in BF16 (exact there).
Entry DenseOfExl3(const CheckpointBuilder& checkpoint, const std::string& matrix);
Entry DenseOfScaled(const CheckpointBuilder& checkpoint, const std::string& matrix);

// Every matrix dense, nothing else changed.
CheckpointBuilder Dequantised(const CheckpointBuilder& checkpoint);

}  // namespace twinspark::packs
