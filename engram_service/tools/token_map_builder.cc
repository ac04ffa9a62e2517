// The key of a token: its raw vocabulary string when its bytes are not complete UTF-8, else the
// normalised text, else (nothing left) the text. All keys live in one map: some raw strings equal
// normalised ones and share a class.
#include "engram_service/tools/token_map_builder.h"

#include <cstdlib>
#include <memory>
#include <optional>
#include <utility>

#include <utf8proc.h>

#include "absl/container/flat_hash_map.h"
#include "absl/strings/str_cat.h"

#include "boost/json.hpp"
#include "common/status_macros.h"
#include "common/string_view.h"

namespace twinspark::engram {
namespace {

namespace json = boost::json;

constexpr char32_t kReplacement = 0xFFFD;
constexpr char32_t kSentinel = 0xE000;

// Unicode property White_Space.
bool IsWhiteSpace(char32_t c) {
  return (c >= 0x09 && c <= 0x0D) || c == 0x20 || c == 0x85 || c == 0xA0 || c == 0x1680 ||
         (c >= 0x2000 && c <= 0x200A) || c == 0x2028 || c == 0x2029 || c == 0x202F || c == 0x205F ||
         c == 0x3000;
}

bool IsFoldedBlank(char32_t c) {
  return c == ' ' || c == '\t' || c == '\r' || c == '\n';
}

// Code points, or nothing when the bytes are not UTF-8.
std::optional<std::u32string> Decode(std::string_view bytes) {
  std::u32string text;
  const auto* at = reinterpret_cast<const utf8proc_uint8_t*>(bytes.data());
  auto left = static_cast<utf8proc_ssize_t>(bytes.size());
  while (left > 0) {
    utf8proc_int32_t c = 0;
    const utf8proc_ssize_t n = utf8proc_iterate(at, left, &c);
    if (n <= 0) return std::nullopt;
    text.push_back(static_cast<char32_t>(c));
    at += n;
    left -= n;
  }
  return text;
}

std::string Encode(std::u32string_view text) {
  std::string bytes;
  for (const char32_t c : text) {
    utf8proc_uint8_t buffer[4];
    const utf8proc_ssize_t n = utf8proc_encode_char(static_cast<utf8proc_int32_t>(c), buffer);
    bytes.append(reinterpret_cast<const char*>(buffer), static_cast<size_t>(n));
  }
  return bytes;
}

// The byte of a character of the byte-level alphabet: printable characters of Latin-1 stand for
// themselves, the other 68 bytes, ascending, for U+0100 onwards.
std::vector<int> MakeByteOfCharacter() {
  std::vector<int> byte_of(0x100 + 68, -1);
  int next = 0x100;
  for (int byte = 0; byte < 256; ++byte) {
    const bool printable = (byte >= 0x21 && byte <= 0x7E) || (byte >= 0xA1 && byte <= 0xAC) ||
                           (byte >= 0xAE && byte <= 0xFF);
    byte_of[static_cast<size_t>(printable ? byte : next++)] = byte;
  }
  return byte_of;
}

// Bytes a token stands for.
std::string TokenBytes(const std::string& token,
                       const std::u32string& characters,
                       const std::vector<int>& byte_of) {
  std::string bytes;
  for (const char32_t c : characters) {
    if (c >= byte_of.size() || byte_of[c] < 0) return token;
    bytes.push_back(static_cast<char>(byte_of[c]));
  }
  return bytes;
}

absl::StatusOr<std::u32string> MapWith(std::u32string_view text, int options) {
  const std::string bytes = Encode(text);
  utf8proc_uint8_t* out = nullptr;
  const utf8proc_ssize_t n =
      utf8proc_map(reinterpret_cast<const utf8proc_uint8_t*>(bytes.data()),
                   static_cast<utf8proc_ssize_t>(bytes.size()), &out,
                   static_cast<utf8proc_option_t>(options | UTF8PROC_STABLE));
  const std::unique_ptr<utf8proc_uint8_t, decltype(&free)> owner(out, &free);
  if (n < 0) return absl::InternalError(absl::StrCat("utf8proc: ", utf8proc_errmsg(n)));
  auto decoded = Decode({reinterpret_cast<const char*>(out), static_cast<size_t>(n)});
  if (!decoded) return absl::InternalError("utf8proc gave text that is not UTF-8");
  return *std::move(decoded);
}

absl::StatusOr<std::vector<std::string>> TokensById(std::string_view text) {
  boost::system::error_code error;
  json::parse_options options;
  options.max_depth = 64;
  const json::value root = json::parse({text.data(), text.size()}, error, {}, options);
  const json::object* model = !error && root.is_object() && root.as_object().contains("model")
                                  ? root.at("model").if_object()
                                  : nullptr;
  const json::value* vocab = model != nullptr ? model->if_contains("vocab") : nullptr;
  if (vocab == nullptr || !vocab->is_object()) {
    return absl::DataLossError("not a tokenizer.json with model.vocab");
  }
  std::vector<std::pair<std::string, int64_t>> entries;
  for (const auto& item : vocab->get_object()) {
    if (!item.value().is_int64()) return absl::DataLossError("a vocabulary id is not a number");
    entries.emplace_back(std::string(item.key()), item.value().get_int64());
  }
  if (const json::value* added = root.as_object().if_contains("added_tokens")) {
    if (!added->is_array()) return absl::DataLossError("added_tokens is not a list");
    for (const json::value& token : added->get_array()) {
      const json::object* object = token.if_object();
      const json::value* id = object != nullptr ? object->if_contains("id") : nullptr;
      const json::value* content = object != nullptr ? object->if_contains("content") : nullptr;
      if (id == nullptr || !id->is_int64() || content == nullptr || !content->is_string()) {
        return absl::DataLossError("an added token without id and content");
      }
      entries.emplace_back(std::string(content->get_string()), id->get_int64());
    }
  }
  std::vector<std::string> tokens;
  std::vector<bool> known;
  for (auto& [token, id] : entries) {
    if (id < 0 || id >= static_cast<int64_t>(entries.size())) {
      return absl::DataLossError(
          absl::StrCat("token id ", id, " of ", entries.size(), " tokens: ids must be 0..n-1"));
    }
    const size_t i = static_cast<size_t>(id);
    if (i >= tokens.size()) {
      tokens.resize(i + 1);
      known.resize(i + 1);
    }
    tokens[i] = std::move(token);
    known[i] = true;
  }
  for (size_t i = 0; i < known.size(); ++i) {
    if (!known[i]) return absl::DataLossError(absl::StrCat("no token has id ", i));
  }
  return tokens;
}

}  // namespace

absl::StatusOr<std::string> NormalizeTokenText(std::string_view text) {
  auto decoded = Decode(text);
  if (!decoded) return absl::InvalidArgumentError("text is not UTF-8");
  ASSIGN_OR_RETURN(std::u32string composed, MapWith(*decoded, UTF8PROC_COMPOSE | UTF8PROC_COMPAT));
  ASSIGN_OR_RETURN(const std::u32string decomposed, MapWith(composed, UTF8PROC_DECOMPOSE));
  std::u32string out;
  for (const char32_t c : decomposed) {
    const utf8proc_category_t category = utf8proc_category(static_cast<utf8proc_int32_t>(c));
    if (category == UTF8PROC_CATEGORY_MN || category == UTF8PROC_CATEGORY_MC ||
        category == UTF8PROC_CATEGORY_ME) {
      continue;
    }
    const auto lower = static_cast<char32_t>(utf8proc_tolower(static_cast<utf8proc_int32_t>(c)));
    if (!IsFoldedBlank(lower)) {
      out.push_back(lower);
    } else if (out.empty() || out.back() != ' ') {
      out.push_back(' ');
    }
  }
  if (out == U" ") return std::string(" ");
  size_t begin = 0;
  size_t end = out.size();
  while (begin < end && IsWhiteSpace(out[begin]))
    ++begin;
  while (end > begin && IsWhiteSpace(out[end - 1]))
    --end;
  out = out.substr(begin, end - begin);
  // The sentinel of the single blank, where a token's own text has it.
  for (char32_t& c : out)
    c = c == kSentinel ? U' ' : c;
  return Encode(out);
}

absl::StatusOr<std::vector<int32_t>> BuildTokenMap(std::string_view json) {
  ASSIGN_OR_RETURN(const std::vector<std::string> tokens, TokensById(json));
  const std::vector<int> byte_of = MakeByteOfCharacter();
  absl::flat_hash_map<std::string, int32_t> class_of_key;
  std::vector<int32_t> classes;
  for (const std::string& token : tokens) {
    const auto characters = Decode(token);
    if (!characters)
      return absl::DataLossError(absl::StrCat("token ", classes.size(), " is not UTF-8"));
    const std::string bytes = TokenBytes(token, *characters, byte_of);
    const auto text = Decode(bytes);
    std::string key;
    if (!text || text->find(kReplacement) != std::u32string::npos) {
      key = token;
    } else {
      ASSIGN_OR_RETURN(key, NormalizeTokenText(bytes));
      if (key.empty()) key = bytes;
    }
    const auto next = static_cast<int32_t>(class_of_key.size());
    classes.push_back(class_of_key.try_emplace(std::move(key), next).first->second);
  }
  return classes;
}

}  // namespace twinspark::engram
