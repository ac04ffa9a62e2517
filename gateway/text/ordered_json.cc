// The tree builder is a handler of Boost.JSON's push parser: it hands over the source text of every
// number, which is what keeps long integers whole and doubles correctly rounded.
#include "gateway/text/ordered_json.h"

#include <charconv>
#include <cmath>
#include <cstdlib>

#include <boost/json/basic_parser_impl.hpp>

#include "absl/container/flat_hash_map.h"
#include "absl/status/status.h"
#include "absl/strings/str_cat.h"

#include "common/check.h"
#include "common/string_view.h"
#include "gateway/text/utf8.h"

namespace twinspark::gateway {
namespace {

// Keeps the first position and the last value of each key.
void DropRepeatedKeys(Json::Object* members) {
  if (members->size() < 2) return;
  absl::flat_hash_map<std::string, size_t> first;
  size_t kept = 0;
  for (size_t i = 0; i < members->size(); ++i) {
    auto [it, is_new] = first.try_emplace((*members)[i].first, kept);
    if (!is_new) {
      (*members)[it->second].second = std::move((*members)[i].second);
    } else {
      if (kept != i) (*members)[kept] = std::move((*members)[i]);
      ++kept;
    }
  }
  members->resize(kept);
}

// Handler of boost::json::basic_parser. Values are kept on one stack; an array or object end takes
// its items off it.
class TreeBuilder {
 public:
  using error_code = boost::json::error_code;
  using sv = boost::json::string_view;
  static constexpr size_t max_object_size = static_cast<size_t>(-1);
  static constexpr size_t max_array_size = static_cast<size_t>(-1);
  static constexpr size_t max_key_size = static_cast<size_t>(-1);
  static constexpr size_t max_string_size = static_cast<size_t>(-1);

  Json TakeResult() { return std::move(values_.back()); }
  const std::string& reason() const { return reason_; }

  bool on_document_begin(error_code&) { return true; }
  bool on_document_end(error_code&) { return true; }
  bool on_array_begin(error_code& ec) { return Count(&ec); }
  bool on_object_begin(error_code& ec) { return Count(&ec); }
  bool on_array_end(size_t n, error_code&) {
    Json::Array items(std::make_move_iterator(values_.end() - static_cast<ptrdiff_t>(n)),
                      std::make_move_iterator(values_.end()));
    values_.resize(values_.size() - n);
    values_.push_back(Json::FromArray(std::move(items)));
    return true;
  }
  bool on_object_end(size_t n, error_code&) {
    Json::Object members;
    members.reserve(n);
    for (size_t i = 0; i < n; ++i) {
      members.emplace_back(std::move(keys_[keys_.size() - n + i]),
                           std::move(values_[values_.size() - n + i]));
    }
    keys_.resize(keys_.size() - n);
    values_.resize(values_.size() - n);
    DropRepeatedKeys(&members);
    values_.push_back(Json::FromObject(std::move(members)));
    return true;
  }
  bool on_key_part(sv part, size_t, error_code&) { return Collect(part); }
  bool on_key(sv part, size_t, error_code&) {
    Collect(part);
    keys_.push_back(std::move(text_));
    text_.clear();
    return true;
  }
  bool on_string_part(sv part, size_t, error_code&) { return Collect(part); }
  bool on_string(sv part, size_t, error_code& ec) {
    Collect(part);
    values_.push_back(Json::String(std::move(text_)));
    text_.clear();
    return Count(&ec);
  }
  bool on_number_part(sv part, error_code&) { return Collect(part); }
  bool on_int64(int64_t, sv part, error_code& ec) { return OnNumber(part, &ec); }
  bool on_uint64(uint64_t, sv part, error_code& ec) { return OnNumber(part, &ec); }
  bool on_double(double, sv part, error_code& ec) { return OnNumber(part, &ec); }
  bool on_bool(bool value, error_code& ec) {
    values_.push_back(Json::Bool(value));
    return Count(&ec);
  }
  bool on_null(error_code& ec) {
    values_.emplace_back();
    return Count(&ec);
  }
  bool on_comment_part(sv, error_code&) { return true; }
  bool on_comment(sv, error_code&) { return true; }

 private:
  bool Collect(sv part) {
    text_.append(part.data(), part.size());
    return true;
  }
  bool OnNumber(sv part, error_code* ec) {
    Collect(part);
    const std::string literal = std::move(text_);
    text_.clear();
    if (literal.find_first_of(".eE") == std::string::npos) {
      values_.push_back(Json::IntegerLiteral(literal == "-0" ? "0" : literal));
      return Count(ec);
    }
    double value = 0;
    const auto [end, error] =
        std::from_chars(literal.data(), literal.data() + literal.size(), value);
    // Out of range is also what underflow is called; strtod tells the two apart.
    if (error != std::errc()) value = std::strtod(literal.c_str(), nullptr);
    if (!std::isfinite(value)) {
      reason_ = absl::StrCat("the number ", literal.substr(0, 64), " is not finite");
      *ec = boost::json::make_error_code(boost::json::error::exponent_overflow);
      return false;
    }
    values_.push_back(Json::Real(value));
    return Count(ec);
  }
  bool Count(error_code* ec) {
    if (++num_values_ <= Json::kMaxValues) return true;
    reason_ = absl::StrCat("more than ", Json::kMaxValues, " values");
    *ec = boost::json::make_error_code(boost::json::error::array_too_large);
    return false;
  }

  std::vector<Json> values_;
  std::vector<std::string> keys_;
  std::string text_;
  std::string reason_;
  size_t num_values_ = 0;
};

// True when an escape \uD800..\uDFFF ends at, or one character before or after, `pos`.
bool FollowsHighSurrogate(std::string_view text, size_t pos) {
  const size_t begin = pos > 7 ? pos - 7 : 0;
  const std::string_view around = text.substr(begin, 8);
  for (size_t i = 0; i + 4 <= around.size(); ++i) {
    if (around[i] == '\\' && around[i + 1] == 'u' && (around[i + 2] | 0x20) == 'd' &&
        std::string_view("89abcdefABCDEF").find(around[i + 3]) != std::string_view::npos) {
      return true;
    }
  }
  return false;
}

}  // namespace

absl::StatusOr<Json> Json::Parse(std::string_view text, size_t max_depth) {
  if (!IsValidUtf8(text)) return absl::InvalidArgumentError("the text is not valid UTF-8");
  boost::json::parse_options options;
  options.max_depth = max_depth;
  boost::json::basic_parser<TreeBuilder> parser(options);
  boost::json::error_code ec;
  size_t pos = parser.write_some(false, text.data(), text.size(), ec);
  while (!ec && pos < text.size() && std::string_view(" \t\r\n").find(text[pos]) != text.npos) {
    ++pos;
  }
  if (!ec && pos < text.size()) ec = boost::json::make_error_code(boost::json::error::extra_data);
  if (!ec) return parser.handler().TakeResult();
  if (!parser.handler().reason().empty()) {
    return absl::InvalidArgumentError(parser.handler().reason());
  }
  if (ec == boost::json::error::too_deep) {
    return absl::InvalidArgumentError(absl::StrCat("nesting deeper than ", max_depth, " levels"));
  }
  if (ec == boost::json::error::illegal_trailing_surrogate || FollowsHighSurrogate(text, pos)) {
    return absl::InvalidArgumentError(absl::StrCat("a lone surrogate near byte ", pos));
  }
  return absl::InvalidArgumentError(absl::StrCat(ec.message(), " near byte ", pos));
}

double Json::as_double() const {
  if (const double* real = std::get_if<double>(&value_)) return *real;
  return std::strtod(std::get<Integer>(value_).digits.c_str(), nullptr);
}

std::optional<int64_t> Json::ToInt64() const {
  if (const Integer* integer = std::get_if<Integer>(&value_)) {
    int64_t result = 0;
    const char* end = integer->digits.data() + integer->digits.size();
    const auto [stop, error] = std::from_chars(integer->digits.data(), end, result);
    if (error != std::errc() || stop != end) return std::nullopt;
    return result;
  }
  if (const double* real = std::get_if<double>(&value_)) {
    if (*real != std::floor(*real) || std::fabs(*real) > 9007199254740992.0) return std::nullopt;
    return static_cast<int64_t>(*real);
  }
  return std::nullopt;
}

const Json* Json::Find(std::string_view key) const {
  const Object* members = std::get_if<Object>(&value_);
  if (members == nullptr) return nullptr;
  for (const Member& member : *members) {
    if (member.first == key) return &member.second;
  }
  return nullptr;
}

void Json::Set(std::string_view key, Json value) {
  if (is_null()) value_ = Object();
  CHECK(is_object()) << "Set of key " << key << " on a value that is no object";
  for (Member& member : as_object()) {
    if (member.first == key) {
      member.second = std::move(value);
      return;
    }
  }
  as_object().emplace_back(std::string(key), std::move(value));
}

std::string Json::Dump() const {
  std::string out;
  AppendTo(&out);
  return out;
}

void Json::AppendTo(std::string* out) const {
  if (is_null()) {
    out->append("null");
  } else if (is_bool()) {
    out->append(as_bool() ? "true" : "false");
  } else if (is_integer()) {
    out->append(std::get<Integer>(value_).digits);
  } else if (is_number()) {
    AppendJsonReal(std::get<double>(value_), out);
  } else if (is_string()) {
    AppendJsonString(as_string(), out);
  } else if (is_array()) {
    out->push_back('[');
    for (size_t i = 0; i < as_array().size(); ++i) {
      if (i > 0) out->append(", ");
      as_array()[i].AppendTo(out);
    }
    out->push_back(']');
  } else {
    out->push_back('{');
    for (size_t i = 0; i < as_object().size(); ++i) {
      if (i > 0) out->append(", ");
      AppendJsonString(as_object()[i].first, out);
      out->append(": ");
      as_object()[i].second.AppendTo(out);
    }
    out->push_back('}');
  }
}

bool Json::operator==(const Json& other) const {
  if (value_.index() != other.value_.index()) return false;
  if (!is_object()) return value_ == other.value_;
  if (as_object().size() != other.as_object().size()) return false;
  for (const Member& member : as_object()) {
    const Json* found = other.Find(member.first);
    if (found == nullptr || !(*found == member.second)) return false;
  }
  return true;
}

void AppendJsonEscaped(std::string_view text, std::string* out) {
  constexpr std::string_view kHex = "0123456789abcdef";
  size_t start = 0;
  for (size_t i = 0; i < text.size(); ++i) {
    const uint8_t c = static_cast<uint8_t>(text[i]);
    if (c >= 0x20 && c != '"' && c != '\\') continue;
    out->append(text.substr(start, i - start));
    start = i + 1;
    out->push_back('\\');
    switch (c) {
      case '"':
        out->push_back('"');
        break;
      case '\\':
        out->push_back('\\');
        break;
      case '\n':
        out->push_back('n');
        break;
      case '\r':
        out->push_back('r');
        break;
      case '\t':
        out->push_back('t');
        break;
      case '\b':
        out->push_back('b');
        break;
      case '\f':
        out->push_back('f');
        break;
      default:
        out->append("u00");
        out->push_back(kHex[c >> 4]);
        out->push_back(kHex[c & 15]);
    }
  }
  out->append(text.substr(start));
}

void AppendJsonString(std::string_view text, std::string* out) {
  out->push_back('"');
  AppendJsonEscaped(text, out);
  out->push_back('"');
}

void AppendJsonReal(double value, std::string* out) {
  CHECK(std::isfinite(value)) << "a number of JSON must be finite";
  char buffer[64];
  // Shortest digits in the form d.ddde±XX: digits and exponent are taken apart and laid out anew.
  const auto result =
      std::to_chars(buffer, buffer + sizeof(buffer), value, std::chars_format::scientific);
  std::string_view text(buffer, static_cast<size_t>(result.ptr - buffer));
  if (text.front() == '-') {
    out->push_back('-');
    text.remove_prefix(1);
  }
  const size_t e = text.find('e');
  const int exponent = std::atoi(std::string(text.substr(e + 1)).c_str());
  std::string digits(text.substr(0, 1));
  if (e > 2) digits.append(text.substr(2, e - 2));
  const int num_digits = static_cast<int>(digits.size());
  if (exponent < -4 || exponent >= 16) {
    out->push_back(digits[0]);
    if (num_digits > 1) absl::StrAppend(out, ".", ToAbsl(std::string_view(digits).substr(1)));
    const int magnitude = std::abs(exponent);
    absl::StrAppend(out, exponent < 0 ? "e-" : "e+", magnitude < 10 ? "0" : "", magnitude);
  } else if (exponent < 0) {
    out->append("0.");
    out->append(static_cast<size_t>(-exponent - 1), '0');
    out->append(digits);
  } else if (num_digits <= exponent + 1) {
    out->append(digits);
    out->append(static_cast<size_t>(exponent + 1 - num_digits), '0');
    out->append(".0");
  } else {
    const size_t point = static_cast<size_t>(exponent) + 1;
    absl::StrAppend(out, digits.substr(0, point), ".", digits.substr(point));
  }
}

}  // namespace twinspark::gateway
