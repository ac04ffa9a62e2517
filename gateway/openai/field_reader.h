// Typed reading of one JSON object of a request. The first problem is kept and everything after it
// reads as absent, so that a parser is a plain list of fields. Types are strict (chat.md 4.2 of the
// specification): null is absent, a bool is no number, "5" is no number, 5.0 is an integer.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "gateway/openai/api_error.h"
#include "gateway/text/ordered_json.h"

namespace twinspark::gateway {

// Thread-compatible; borrows the object and the error slot.
class FieldReader {
 public:
  // `path` is put before a key in `param`: "messages[2]." or empty.
  FieldReader(const Json& object, std::string path, std::optional<ApiError>* error)
      : object_(object), path_(std::move(path)), error_(error) {}

  // The member; null pointer when absent, null, or after a failure.
  const Json* Get(std::string_view key);

  std::optional<bool> Bool(std::string_view key);
  std::optional<int64_t> Integer(std::string_view key, int64_t min, int64_t max);
  // min <= value <= max; with min_excluded min < value.
  std::optional<double> Number(std::string_view key,
                               double min,
                               double max,
                               bool min_excluded = false);
  const std::string* String(std::string_view key);
  const Json::Array* Array(std::string_view key);
  const Json* Object(std::string_view key);
  // An array of token ids below vocab_size, at most max_count.
  std::optional<std::vector<int32_t>> TokenIds(std::string_view key,
                                               size_t max_count,
                                               int32_t vocab_size,
                                               bool may_be_empty = false);

  // Keeps the first error. The second form takes the whole `param`.
  void Fail(std::string_view key, std::string message);
  void FailAt(std::string param, std::string message);
  void FailNotFound(std::string_view key, std::string message, std::string code);
  bool failed() const { return error_->has_value(); }
  std::string Path(std::string_view key) const { return path_ + std::string(key); }

 private:
  const Json& object_;
  const std::string path_;
  std::optional<ApiError>* error_;
};

}  // namespace twinspark::gateway
