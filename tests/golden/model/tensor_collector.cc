// Copies of observed tensors (tensor_collector.h).
#include "tests/golden/model/tensor_collector.h"

#include <algorithm>
#include <cmath>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"

namespace twinspark::golden {
namespace {

Values Widened(const Values& from, int64_t cols, float fill) {
  Values to;
  to.rows = from.rows;
  to.cols = cols;
  to.data.assign(static_cast<size_t>(from.rows * cols), fill);
  for (int64_t r = 0; r < from.rows; ++r)
    std::copy_n(from.Row(r), from.cols, to.data.data() + r * cols);
  return to;
}

}  // namespace

void TensorCollector::Tensor(const std::string& name, const ConstTensorView& value) {
  Values rows;
  rows.rows = value.rows;
  rows.cols = value.cols;
  rows.data.resize(static_cast<size_t>(value.rows * value.cols));
  for (int64_t r = 0; r < value.rows; ++r)
    for (int64_t c = 0; c < value.cols; ++c) {
      float& out = rows.data[static_cast<size_t>(r * value.cols + c)];
      switch (value.dtype) {
        case DType::kF32:
          out = value.Row<float>(r)[c];
          break;
        case DType::kBf16:
          out = ToF32(value.Row<Bf16>(r)[c]);
          break;
        case DType::kI32:
          out = static_cast<float>(value.Row<int32_t>(r)[c]);
          break;
        default:
          CHECK(false) << name << " is " << DTypeName(value.dtype);
      }
    }
  Append(name, rows, -INFINITY);
  if (!absl::EndsWith(name, ".engram.gate")) return;
  const std::string layer = name.substr(1, name.find('.') - 1);
  for (size_t m = 0; m < engram_layer_ids_.size(); ++m) {
    if (layer != absl::StrCat(engram_layer_ids_[m])) continue;
    const std::vector<uint64_t> numbers = rows_.RowNumbers(static_cast<int>(m));
    Values table_rows;
    table_rows.rows = value.rows;
    table_rows.cols = static_cast<int64_t>(numbers.size()) / std::max<int64_t>(1, value.rows);
    for (uint64_t number : numbers)
      table_rows.data.push_back(static_cast<float>(number));
    Append(absl::StrCat("L", layer, ".engram.rows"), table_rows, 0);
  }
}

void TensorCollector::Lists(const std::string& name,
                            const ConstTensorView& lists,
                            const int32_t* counts) {
  Values rows;
  rows.rows = lists.rows;
  rows.cols = lists.cols;
  rows.data.assign(static_cast<size_t>(lists.rows * lists.cols), -1.0f);
  for (int64_t r = 0; r < lists.rows; ++r)
    for (int64_t i = 0; i < counts[r]; ++i)
      rows.data[static_cast<size_t>(r * lists.cols + i)] =
          static_cast<float>(lists.Row<int32_t>(r)[i]);
  Append(name, rows, -1.0f);
}

void TensorCollector::Append(const std::string& name, const Values& rows, float fill) {
  Values& all = values_[name];
  if (all.rows == 0) {
    all = rows;
    return;
  }
  const int64_t cols = std::max(all.cols, rows.cols);
  if (all.cols < cols) all = Widened(all, cols, fill);
  const Values wide = rows.cols < cols ? Widened(rows, cols, fill) : rows;
  all.data.insert(all.data.end(), wide.data.begin(), wide.data.end());
  all.rows += wide.rows;
}

const Values* TensorCollector::Find(const std::string& name) const {
  const auto it = values_.find(name);
  return it == values_.end() ? nullptr : &it->second;
}

}  // namespace twinspark::golden
