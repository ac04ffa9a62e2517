// The byte-level alphabet: 188 bytes keep their code point, the other 68 follow from U+0100 on.
#include "gateway/text/tokenizer_json.h"

#include <cstdint>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"

#include "common/status_macros.h"
#include "common/string_view.h"
#include "gateway/text/ordered_json.h"
#include "gateway/text/utf8.h"

namespace twinspark::gateway {
namespace {

constexpr int64_t kMaxVocabSize = 1 << 22;

bool KeepsCodePoint(uint32_t byte) {
  return (byte >= 0x21 && byte <= 0x7E) || (byte >= 0xA1 && byte <= 0xAC) ||
         (byte >= 0xAE && byte <= 0xFF);
}

// Index: code point of the byte-level alphabet; value: its byte, or -1.
std::vector<int> MakeByteTable() {
  std::vector<int> table(0x144, -1);
  uint32_t next = 0x100;
  for (uint32_t byte = 0; byte < 256; ++byte) {
    table[KeepsCodePoint(byte) ? byte : next++] = static_cast<int>(byte);
  }
  return table;
}

absl::Status NotOfThisPipeline(std::string_view what) {
  return absl::InvalidArgumentError(
      absl::StrCat("tokenizer.json: ", ToAbsl(what),
                   "; only the byte-level BPE of DeepSeek V3 to V4.1 is supported"));
}

std::string StringOr(const Json* value, std::string_view fallback) {
  return value != nullptr && value->is_string() ? value->as_string() : std::string(fallback);
}
bool IsTrue(const Json* value) {
  return value != nullptr && value->is_bool() && value->as_bool();
}

// "\\r" and a real CR are two spellings of one pattern, and both are in circulation.
std::string WithEscapedLineEnds(std::string_view pattern) {
  std::string out;
  for (const char c : pattern) {
    if (c == '\r') {
      out.append("\\r");
    } else if (c == '\n') {
      out.append("\\n");
    } else {
      out.push_back(c);
    }
  }
  return out;
}

absl::Status CheckPipeline(const Json& file, const Json& model) {
  if (StringOr(model.Find("type"), "BPE") != "BPE") {
    return NotOfThisPipeline("model.type is not BPE");
  }
  if (IsTrue(model.Find("ignore_merges")) || IsTrue(model.Find("byte_fallback"))) {
    return NotOfThisPipeline("model.ignore_merges or model.byte_fallback is set");
  }
  const Json* dropout = model.Find("dropout");
  if (dropout != nullptr && !dropout->is_null()) return NotOfThisPipeline("model.dropout is set");
  const Json* normalizer = file.Find("normalizer");
  if (normalizer != nullptr && !normalizer->is_null()) {
    const Json* list = normalizer->Find("normalizers");
    if (list == nullptr || !list->is_array() || !list->as_array().empty()) {
      return NotOfThisPipeline("there is a normalizer");
    }
  }
  const Json* pre = file.Find("pre_tokenizer");
  const Json* steps = pre == nullptr ? nullptr : pre->Find("pretokenizers");
  if (steps == nullptr || !steps->is_array() || steps->as_array().size() != 4) {
    return NotOfThisPipeline("pre_tokenizer is not three splits and a byte level");
  }
  const std::string_view expected[] = {kSplitNumbers, kSplitCjk, kSplitWords};
  for (size_t i = 0; i < 3; ++i) {
    const Json& step = steps->as_array()[i];
    const Json* pattern = step.Find("pattern");
    const std::string regex =
        pattern == nullptr ? std::string() : StringOr(pattern->Find("Regex"), "");
    if (StringOr(step.Find("type"), "") != "Split" ||
        StringOr(step.Find("behavior"), "") != "Isolated" || IsTrue(step.Find("invert")) ||
        WithEscapedLineEnds(regex) != expected[i]) {
      return NotOfThisPipeline(absl::StrCat("split pattern ", i, " is another one"));
    }
  }
  const Json& byte_level = steps->as_array()[3];
  if (StringOr(byte_level.Find("type"), "") != "ByteLevel" ||
      IsTrue(byte_level.Find("add_prefix_space")) || IsTrue(byte_level.Find("use_regex"))) {
    return NotOfThisPipeline("pre_tokenizer does not end in a plain byte level");
  }
  return absl::OkStatus();
}

absl::StatusOr<int64_t> ReadId(const Json* value, std::string_view of) {
  const std::optional<int64_t> id = value == nullptr ? std::nullopt : value->ToInt64();
  if (!id.has_value() || *id < 0 || *id >= kMaxVocabSize) {
    return absl::InvalidArgumentError(
        absl::StrCat("tokenizer.json: the id of ", ToAbsl(of), " is missing or out of range"));
  }
  return *id;
}

absl::StatusOr<std::pair<std::string, std::string>> ReadMerge(const Json& merge) {
  std::string left;
  std::string right;
  if (merge.is_string()) {
    const std::string& text = merge.as_string();
    const size_t space = text.find(' ');
    if (space == std::string::npos) return absl::InvalidArgumentError("no space in it");
    left = text.substr(0, space);
    right = text.substr(space + 1);
  } else if (merge.is_array() && merge.as_array().size() == 2 && merge.as_array()[0].is_string() &&
             merge.as_array()[1].is_string()) {
    left = merge.as_array()[0].as_string();
    right = merge.as_array()[1].as_string();
  } else {
    return absl::InvalidArgumentError("neither a string nor a pair of strings");
  }
  ASSIGN_OR_RETURN(std::string left_bytes, BytesOfByteLevel(left));
  ASSIGN_OR_RETURN(std::string right_bytes, BytesOfByteLevel(right));
  return std::make_pair(std::move(left_bytes), std::move(right_bytes));
}

}  // namespace

absl::StatusOr<std::string> BytesOfByteLevel(std::string_view spelling) {
  static const std::vector<int> kTable = MakeByteTable();
  std::string bytes;
  for (size_t pos = 0; pos < spelling.size();) {
    const CodePoint cp = DecodeUtf8(spelling, pos);
    if (cp.value >= kTable.size() || kTable[cp.value] < 0) {
      return absl::InvalidArgumentError(absl::StrCat(
          "\"", ToAbsl(spelling.substr(0, 64)), "\" has a character outside the byte alphabet"));
    }
    bytes.push_back(static_cast<char>(kTable[cp.value]));
    pos += cp.length;
  }
  return bytes;
}

absl::StatusOr<TokenizerFile> ParseTokenizerJson(std::string_view json) {
  ASSIGN_OR_RETURN(const Json file, Json::Parse(json));
  const Json* model = file.Find("model");
  const Json* vocab = model == nullptr ? nullptr : model->Find("vocab");
  const Json* merges = model == nullptr ? nullptr : model->Find("merges");
  const Json* added = file.Find("added_tokens");
  if (vocab == nullptr || !vocab->is_object() || merges == nullptr || !merges->is_array() ||
      added == nullptr || !added->is_array()) {
    return NotOfThisPipeline("model.vocab, model.merges or added_tokens is missing");
  }
  RETURN_IF_ERROR(CheckPipeline(file, *model));

  TokenizerFile result;
  absl::flat_hash_map<int64_t, bool> is_added;
  for (const Json& token : added->as_array()) {
    AddedToken entry;
    entry.text = StringOr(token.Find("content"), "");
    ASSIGN_OR_RETURN(const int64_t id, ReadId(token.Find("id"), entry.text));
    if (entry.text.empty()) return NotOfThisPipeline("an added token has no content");
    if (IsTrue(token.Find("lstrip")) || IsTrue(token.Find("rstrip")) ||
        IsTrue(token.Find("single_word"))) {
      return NotOfThisPipeline("an added token strips its neighbourhood");
    }
    entry.id = static_cast<int32_t>(id);
    is_added[id] = true;
    result.added.push_back(std::move(entry));
  }
  for (const auto& [spelling, value] : vocab->as_object()) {
    ASSIGN_OR_RETURN(const int64_t id, ReadId(&value, spelling));
    if (is_added.contains(id)) continue;  // BOS, EOS and padding stand in both lists
    ASSIGN_OR_RETURN(std::string bytes, BytesOfByteLevel(spelling));
    if (static_cast<size_t>(id) >= result.token_bytes.size()) {
      result.token_bytes.resize(static_cast<size_t>(id) + 1);
    }
    result.token_bytes[static_cast<size_t>(id)] = std::move(bytes);
  }
  result.merges.reserve(merges->as_array().size());
  for (size_t i = 0; i < merges->as_array().size(); ++i) {
    absl::StatusOr<std::pair<std::string, std::string>> merge = ReadMerge(merges->as_array()[i]);
    if (!merge.ok()) {
      return absl::InvalidArgumentError(
          absl::StrCat("tokenizer.json: merge ", i, ": ", merge.status().message()));
    }
    result.merges.push_back(*std::move(merge));
  }
  return result;
}

}  // namespace twinspark::gateway
