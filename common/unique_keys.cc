#include "common/unique_keys.h"

#include <vector>

#include <boost/json/basic_parser_impl.hpp>

#include "absl/container/flat_hash_set.h"
#include "absl/strings/str_cat.h"

#include "common/string_view.h"

namespace twinspark {
namespace {

// Sees the text as events; keeps the keys of the objects that are open.
struct KeyHandler {
  static constexpr std::size_t max_object_size = SIZE_MAX;
  static constexpr std::size_t max_array_size = SIZE_MAX;
  static constexpr std::size_t max_key_size = SIZE_MAX;
  static constexpr std::size_t max_string_size = SIZE_MAX;
  using Error = boost::json::error_code;
  using Text = boost::json::string_view;

  bool on_document_begin(Error&) { return true; }
  bool on_document_end(Error&) { return true; }
  bool on_object_begin(Error&) {
    open.emplace_back();
    return true;
  }
  bool on_object_end(std::size_t, Error&) {
    open.pop_back();
    return true;
  }
  bool on_array_begin(Error&) { return true; }
  bool on_array_end(std::size_t, Error&) { return true; }
  bool on_key_part(Text part, std::size_t, Error&) {
    key.append(part.data(), part.size());
    return true;
  }
  bool on_key(Text part, std::size_t, Error& error) {
    key.append(part.data(), part.size());
    if (!open.back().insert(key).second) {
      twice = key;
      error = boost::json::error::extra_data;  // any error ends the parse
      return false;
    }
    key.clear();
    return true;
  }
  bool on_string_part(Text, std::size_t, Error&) { return true; }
  bool on_string(Text, std::size_t, Error&) { return true; }
  bool on_number_part(Text, Error&) { return true; }
  bool on_int64(std::int64_t, Text, Error&) { return true; }
  bool on_uint64(std::uint64_t, Text, Error&) { return true; }
  bool on_double(double, Text, Error&) { return true; }
  bool on_bool(bool, Error&) { return true; }
  bool on_null(Error&) { return true; }
  bool on_comment_part(Text, Error&) { return true; }
  bool on_comment(Text, Error&) { return true; }

  std::vector<absl::flat_hash_set<std::string>> open;
  std::string key;
  std::string twice;
};

}  // namespace

absl::Status CheckUniqueKeys(std::string_view json, std::string_view origin) {
  boost::json::basic_parser<KeyHandler> parser{boost::json::parse_options{}};
  boost::json::error_code error;
  parser.write_some(false, json.data(), json.size(), error);
  const std::string& twice = parser.handler().twice;
  if (twice.empty()) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat(ToAbsl(origin), ": '", twice.substr(0, 200), "' is named twice"));
}

}  // namespace twinspark
