// JSON as the model sees it (chat.md 2.6 of the specification): a value tree that keeps key order,
// the difference between 1 and 1.0, and integers of any length, and one rendering of it. Boost.JSON
// does the grammar; its own value type sorts out none of the three. Requests of the API are read
// into it too, because tools and schemas are rendered from them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <variant>
#include <vector>

#include "absl/status/statusor.h"

namespace twinspark::gateway {

// A JSON value. Thread-compatible. A repeated key keeps its first position and last value.
class Json {
 public:
  using Array = std::vector<Json>;
  using Member = std::pair<std::string, Json>;
  using Object = std::vector<Member>;
  // An integer literal, digit for digit ("-0" is stored as "0").
  struct Integer {
    std::string digits;
    bool operator==(const Integer&) const = default;
  };

  Json() = default;  // null
  static Json Bool(bool value) { return Json(Value(value)); }
  static Json Int(int64_t value) { return Json(Value(Integer{std::to_string(value)})); }
  static Json IntegerLiteral(std::string digits) { return Json(Value(Integer{std::move(digits)})); }
  static Json Real(double value) { return Json(Value(value)); }
  static Json String(std::string value) { return Json(Value(std::move(value))); }
  static Json FromArray(Array items) { return Json(Value(std::move(items))); }
  static Json FromObject(Object members) { return Json(Value(std::move(members))); }

  // Values of one text: the tree needs about 40 bytes for each, whatever its text is.
  static constexpr size_t kMaxValues = size_t{1} << 22;

  // One JSON text and nothing after it. INVALID_ARGUMENT names the reason and the byte offset:
  // grammar, invalid UTF-8, a lone surrogate, a number that is not finite, nesting over max_depth,
  // more than kMaxValues values.
  static absl::StatusOr<Json> Parse(std::string_view text, size_t max_depth = 128);

  bool is_null() const { return std::holds_alternative<std::monostate>(value_); }
  bool is_bool() const { return std::holds_alternative<bool>(value_); }
  bool is_integer() const { return std::holds_alternative<Integer>(value_); }
  bool is_number() const { return is_integer() || std::holds_alternative<double>(value_); }
  bool is_string() const { return std::holds_alternative<std::string>(value_); }
  bool is_array() const { return std::holds_alternative<Array>(value_); }
  bool is_object() const { return std::holds_alternative<Object>(value_); }

  // The kind must be right.
  bool as_bool() const { return std::get<bool>(value_); }
  const std::string& as_string() const { return std::get<std::string>(value_); }
  const Array& as_array() const { return std::get<Array>(value_); }
  Array& as_array() { return std::get<Array>(value_); }
  const Object& as_object() const { return std::get<Object>(value_); }
  Object& as_object() { return std::get<Object>(value_); }

  double as_double() const;  // any number, rounded to double
  // An integer, or a real without fraction ("5.0"), in range; else nothing.
  std::optional<int64_t> ToInt64() const;

  // Member of an object; null pointer when this is no object or has no such key.
  const Json* Find(std::string_view key) const;
  // Sets a member (at the end when new). This must be an object or null.
  void Set(std::string_view key, Json value);

  // Text with ", " and ": ", as the model was trained to read.
  std::string Dump() const;
  void AppendTo(std::string* out) const;

  // Equality of values: 1 and 1.0 differ, key order does not matter.
  bool operator==(const Json& other) const;

 private:
  using Value = std::variant<std::monostate, bool, Integer, double, std::string, Array, Object>;
  explicit Json(Value value) : value_(std::move(value)) {}

  Value value_;
};

// Appends the string with quotes and the escapes of chat.md 2.6.
void AppendJsonString(std::string_view text, std::string* out);
// The same without the quotes, so that a string can be written piece by piece.
void AppendJsonEscaped(std::string_view text, std::string* out);
// Shortest digits that read back as the same double: "1.5", "100.0", "1e-05". Must be finite.
void AppendJsonReal(double value, std::string* out);

}  // namespace twinspark::gateway
