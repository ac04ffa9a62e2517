// Reading of cases.json and expected tensors (golden_case.h).
#include "tests/golden/model/golden_case.h"

#include <algorithm>
#include <cstring>

#include <boost/json.hpp>

#include "absl/strings/str_cat.h"

#include "common/file_util.h"
#include "common/status_macros.h"
#include "kernels/dtype.h"

namespace twinspark::golden {
namespace {

template <class T>
std::vector<T> List(const boost::json::object& object, const char* key) {
  std::vector<T> out;
  const boost::json::value* value = object.if_contains(key);
  if (value == nullptr || !value->is_array()) return out;
  for (const boost::json::value& entry : value->get_array())
    out.push_back(entry.is_null() ? T{} : entry.to_number<T>());
  return out;
}

std::string Text(const boost::json::object& object, const char* key) {
  const boost::json::value* value = object.if_contains(key);
  return value == nullptr || !value->is_string() ? "" : std::string(value->get_string());
}

double Number(const boost::json::object& object, const char* key, double otherwise) {
  const boost::json::value* value = object.if_contains(key);
  return value == nullptr || !value->is_number() ? otherwise : value->to_number<double>();
}

ExpectedTensor ParseTensor(const boost::json::object& object) {
  ExpectedTensor t;
  t.name = Text(object, "name");
  t.file = Text(object, "file");
  t.key = Text(object, "key");
  t.shape = List<int64_t>(object, "shape");
  const boost::json::object& compare = object.at("compare").as_object();
  t.metric = Text(compare, "metric");
  t.gap = Text(compare, "gap");
  t.median_bound = Number(compare, "median_bound", 0);
  t.max_bound = Number(compare, "max_bound", 0);
  t.isolated_bound = Number(compare, "isolated_median_bound", 0);
  return t;
}

GoldenCase ParseCase(const boost::json::object& object) {
  GoldenCase c;
  c.name = Text(object, "name");
  c.kind = Text(object, "kind");
  c.level = Text(object, "level");
  c.ids = List<int32_t>(object, "ids");
  const int64_t num_ids = static_cast<int64_t>(c.ids.size());
  c.prompt_tokens =
      static_cast<int64_t>(Number(object, "prompt_tokens", static_cast<double>(num_ids)));
  c.end_row = num_ids;
  std::vector<int64_t> range = List<int64_t>(object, c.kind == "decode" ? "positions" : "rows");
  if (range.size() == 2) {
    c.first_row = range[0];
    c.end_row = range[1];
  } else if (c.kind == "decode_step") {
    c.first_row = static_cast<int64_t>(Number(object, "position", 0));
    c.end_row = c.first_row + 1;
  }
  c.anchor = static_cast<int32_t>(Number(object, "anchor", -1));
  c.draft_ids = List<int32_t>(object, "draft_ids");
  c.draft_margin = List<double>(object, "draft_margin");
  for (int mask : List<int>(object, "image_mask"))
    c.image_mask.push_back(static_cast<uint8_t>(mask != 0));
  if (const boost::json::value* image = object.if_contains("image");
      image != nullptr && image->is_object()) {
    c.image.start = static_cast<int64_t>(Number(image->get_object(), "start", 0));
    c.image.types = List<int>(image->get_object(), "types");
  }
  c.argmax = List<int32_t>(object, "argmax");
  c.argmax_margin = List<double>(object, "argmax_margin");
  for (const boost::json::value& tensor : object.at("tensors").as_array())
    c.tensors.push_back(ParseTensor(tensor.as_object()));
  return c;
}

}  // namespace

const ExpectedTensor* GoldenCase::Find(const std::string& tensor_name) const {
  const auto it = std::find_if(tensors.begin(), tensors.end(),
                               [&](const ExpectedTensor& t) { return t.name == tensor_name; });
  return it == tensors.end() ? nullptr : &*it;
}

absl::StatusOr<std::unique_ptr<GoldenDirectory>> GoldenDirectory::Open(const std::string& dir) {
  auto directory = std::make_unique<GoldenDirectory>();
  directory->dir_ = dir;
  const std::string path = dir + "/cases.json";
  ASSIGN_OR_RETURN(const std::string text, ReadFile(path, size_t{256} << 20));
  try {
    const boost::json::value parsed = boost::json::parse(text);
    const boost::json::object& root = parsed.as_object();
    directory->is_f32_ = Text(root, "mode") == "f32";
    directory->decisions_count_ = Text(root, "decisions") == "count";
    for (const boost::json::value& c : root.at("cases").as_array())
      directory->cases_.push_back(ParseCase(c.as_object()));
  } catch (const std::exception& error) {
    return absl::InvalidArgumentError(absl::StrCat(path, ": ", error.what()));
  }
  return directory;
}

absl::StatusOr<Values> GoldenDirectory::Read(const ExpectedTensor& expected) {
  const std::lock_guard lock(mutex_);
  std::unique_ptr<SafetensorsFile>& file = files_[expected.file];
  if (file == nullptr) {
    ASSIGN_OR_RETURN(file, SafetensorsFile::Open(absl::StrCat(dir_, "/", expected.file)));
  }
  const StoredTensor* tensor = file->Find(expected.key);
  if (tensor == nullptr || tensor->shape != expected.shape)
    return absl::InvalidArgumentError(absl::StrCat(
        file->path(), ": tensor ", expected.key,
        tensor == nullptr ? " is missing" : " has another shape than cases.json says"));
  ASSIGN_OR_RETURN(const std::vector<std::byte> bytes, file->ReadAll(*tensor));
  Values values;
  const int64_t count = tensor->num_elements();
  values.rows = expected.shape.size() < 2 ? 1 : expected.shape[0];
  values.cols = values.rows == 0 ? 0 : count / values.rows;
  values.data.resize(static_cast<size_t>(count));
  for (size_t i = 0; i < values.data.size(); ++i) {
    switch (tensor->type) {
      case StoredType::kF32:
        std::memcpy(&values.data[i], bytes.data() + 4 * i, 4);
        break;
      case StoredType::kI32: {
        int32_t number = 0;
        std::memcpy(&number, bytes.data() + 4 * i, 4);
        values.data[i] = static_cast<float>(number);
        break;
      }
      case StoredType::kBf16: {
        Bf16 number{};
        std::memcpy(&number, bytes.data() + 2 * i, 2);
        values.data[i] = ToF32(number);
        break;
      }
      default:
        return absl::InvalidArgumentError(absl::StrCat(file->path(), ": tensor ", expected.key,
                                                       " is ", StoredTypeName(tensor->type),
                                                       ", expected F32, BF16 or I32"));
    }
  }
  return values;
}

absl::StatusOr<Values> GoldenDirectory::ReadOptional(const GoldenCase& c, const std::string& name) {
  const ExpectedTensor* tensor = c.Find(name);
  if (tensor == nullptr) return Values();
  return Read(*tensor);
}

}  // namespace twinspark::golden
