// The cases of a directory of model vectors: cases.json and the tensors it names. Format: the
// vectors' README, sections 2 and 3.
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/status/statusor.h"

#include "common/safetensors.h"

namespace twinspark::golden {

// A tensor widened to f32, seen as rows: [shape[0], the rest]; a vector is one row.
struct Values {
  std::vector<float> data;
  int64_t rows = 0;
  int64_t cols = 0;

  const float* Row(int64_t r) const { return data.data() + r * cols; }
  bool empty() const { return data.empty(); }
};

struct ExpectedTensor {
  std::string name;
  std::string file;
  std::string key;
  std::vector<int64_t> shape;
  std::string metric;
  std::string gap;  // of set_if_margin
  double median_bound = 0;
  double max_bound = 0;       // 0 = none
  double isolated_bound = 0;  // 0 = not compared alone
};

struct ImageSpan {
  int64_t start = -1;  // negative = no image
  std::vector<int> types;
};

struct GoldenCase {
  std::string name;
  std::string kind;   // prefill, decode, decode_step, dspark
  std::string level;  // of a prefill: full, mid, tail
  std::vector<int32_t> ids;
  int64_t prompt_tokens = 0;  // processed as the prompt; the rest one by one
  int64_t first_row = 0;      // positions that row tensors hold: [first_row, end_row)
  int64_t end_row = 0;
  int32_t anchor = -1;
  std::vector<int32_t> draft_ids;
  std::vector<double> draft_margin;
  std::vector<uint8_t> image_mask;
  ImageSpan image;
  std::vector<int32_t> argmax;
  std::vector<double> argmax_margin;
  std::vector<ExpectedTensor> tensors;

  const ExpectedTensor* Find(const std::string& tensor_name) const;
};

class GoldenDirectory {
 public:
  static absl::StatusOr<std::unique_ptr<GoldenDirectory>> Open(const std::string& dir);

  const std::string& dir() const { return dir_; }
  bool is_f32() const { return is_f32_; }
  bool decisions_count() const { return decisions_count_; }
  const std::vector<GoldenCase>& cases() const { return cases_; }

  absl::StatusOr<Values> Read(const ExpectedTensor& tensor);
  // Null-like (empty) when the case does not hold it.
  absl::StatusOr<Values> ReadOptional(const GoldenCase& c, const std::string& name);

 private:
  std::string dir_;
  bool is_f32_ = false;
  bool decisions_count_ = false;
  std::vector<GoldenCase> cases_;
  std::mutex mutex_;  // blocks alone are read by all ranks at once
  absl::flat_hash_map<std::string, std::unique_ptr<SafetensorsFile>> files_;
};

}  // namespace twinspark::golden
