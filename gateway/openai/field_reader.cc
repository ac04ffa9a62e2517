#include "gateway/openai/field_reader.h"

#include <utility>

#include "absl/strings/str_cat.h"

#include "common/string_view.h"
#include "gateway/openai/api_error.h"

namespace twinspark::gateway {
namespace {

std::string_view KindName(const Json& value) {
  if (value.is_bool()) return "a boolean";
  if (value.is_number()) return "a number";
  if (value.is_string()) return "a string";
  if (value.is_array()) return "an array";
  return value.is_object() ? "an object" : "null";
}

std::string WrongKind(std::string_view key, std::string_view wanted, const Json& value) {
  return absl::StrCat("`", ToAbsl(key), "` must be ", ToAbsl(wanted), ", not ",
                      ToAbsl(KindName(value)), ".");
}

}  // namespace

const Json* FieldReader::Get(std::string_view key) {
  if (failed()) return nullptr;
  const Json* value = object_.Find(key);
  return value == nullptr || value->is_null() ? nullptr : value;
}

std::optional<bool> FieldReader::Bool(std::string_view key) {
  const Json* value = Get(key);
  if (value == nullptr) return std::nullopt;
  if (value->is_bool()) return value->as_bool();
  Fail(key, WrongKind(key, "a boolean", *value));
  return std::nullopt;
}

std::optional<int64_t> FieldReader::Integer(std::string_view key, int64_t min, int64_t max) {
  const Json* value = Get(key);
  if (value == nullptr) return std::nullopt;
  const std::optional<int64_t> number = value->is_number() ? value->ToInt64() : std::nullopt;
  if (!number.has_value()) {
    Fail(key, value->is_number() ? absl::StrCat("`", ToAbsl(key), "` must be an integer, not ",
                                                ToAbsl(Quoted(value->Dump())), ".")
                                 : WrongKind(key, "an integer", *value));
    return std::nullopt;
  }
  if (*number < min || *number > max) {
    Fail(key, absl::StrCat("`", ToAbsl(key), "` must be between ", min, " and ", max, ", not ",
                           *number, "."));
    return std::nullopt;
  }
  return number;
}

std::optional<double> FieldReader::Number(std::string_view key,
                                          double min,
                                          double max,
                                          bool min_excluded) {
  const Json* value = Get(key);
  if (value == nullptr) return std::nullopt;
  if (!value->is_number()) {
    Fail(key, WrongKind(key, "a number", *value));
    return std::nullopt;
  }
  const double number = value->as_double();
  if (!(number >= min && number <= max) || (min_excluded && number == min)) {
    Fail(key,
         absl::StrCat("`", ToAbsl(key), "` must be ", min_excluded ? "greater than " : "at least ",
                      min, " and at most ", max, ", not ", ToAbsl(Quoted(value->Dump())), "."));
    return std::nullopt;
  }
  return number;
}

const std::string* FieldReader::String(std::string_view key) {
  const Json* value = Get(key);
  if (value == nullptr) return nullptr;
  if (value->is_string()) return &value->as_string();
  Fail(key, WrongKind(key, "a string", *value));
  return nullptr;
}

const Json::Array* FieldReader::Array(std::string_view key) {
  const Json* value = Get(key);
  if (value == nullptr) return nullptr;
  if (value->is_array()) return &value->as_array();
  Fail(key, WrongKind(key, "an array", *value));
  return nullptr;
}

const Json* FieldReader::Object(std::string_view key) {
  const Json* value = Get(key);
  if (value == nullptr || value->is_object()) return value;
  Fail(key, WrongKind(key, "an object", *value));
  return nullptr;
}

std::optional<std::vector<int32_t>> FieldReader::TokenIds(std::string_view key,
                                                          size_t max_count,
                                                          int32_t vocab_size,
                                                          bool may_be_empty) {
  const Json::Array* items = Array(key);
  if (items == nullptr) return std::nullopt;
  if (items->empty() && !may_be_empty) {
    Fail(key, absl::StrCat("`", ToAbsl(key), "` must not be empty."));
    return std::nullopt;
  }
  if (items->size() > max_count) {
    Fail(key, absl::StrCat("`", ToAbsl(key), "` has ", items->size(), " entries, at most ",
                           max_count, " are allowed."));
    return std::nullopt;
  }
  std::vector<int32_t> ids;
  ids.reserve(items->size());
  for (const Json& item : *items) {
    const std::optional<int64_t> id = item.is_number() ? item.ToInt64() : std::nullopt;
    if (!id.has_value() || *id < 0 || *id >= vocab_size) {
      Fail(key,
           absl::StrCat("`", ToAbsl(key), "`: ", ToAbsl(Quoted(item.Dump())),
                        " is no token id of this model's vocabulary (0 to ", vocab_size - 1, ")."));
      return std::nullopt;
    }
    ids.push_back(static_cast<int32_t>(*id));
  }
  return ids;
}

void FieldReader::Fail(std::string_view key, std::string message) {
  FailAt(Path(key), std::move(message));
}

void FieldReader::FailNotFound(std::string_view key, std::string message, std::string code) {
  if (failed()) return;
  *error_ = {404, "invalid_request_error", Path(key), std::move(code), std::move(message)};
}

void FieldReader::FailAt(std::string param, std::string message) {
  if (failed()) return;
  *error_ = ApiError::Invalid(std::move(param), std::move(message));
}

}  // namespace twinspark::gateway
