#include "gateway/text/tokenizer.h"

#include <algorithm>
#include <fstream>
#include <sstream>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"

#include "common/status_macros.h"
#include "gateway/text/tokenizer_json.h"

namespace twinspark::gateway {
namespace {

// The released vocabulary (V3 to V4.1 share it): entries with BOS, EOS and padding, and merges.
constexpr size_t kReleasedBaseTokens = 128000;
constexpr size_t kReleasedMerges = 127741;

}  // namespace

absl::StatusOr<std::unique_ptr<Tokenizer>> Tokenizer::FromJson(
    std::string_view json, std::span<const AddedToken> added_override) {
  ASSIGN_OR_RETURN(TokenizerFile file, ParseTokenizerJson(json));
  if (file.token_bytes.size() == kReleasedBaseTokens && file.merges.size() != kReleasedMerges) {
    return absl::InvalidArgumentError(absl::StrCat(
        "tokenizer.json has the released vocabulary but ", file.merges.size(),
        " merges instead of ", kReleasedMerges, "; the file is damaged, fetch it again"));
  }
  if (!added_override.empty()) file.added.assign(added_override.begin(), added_override.end());
  ASSIGN_OR_RETURN(BpeModel bpe, BpeModel::Create(file.token_bytes, file.merges));
  return std::unique_ptr<Tokenizer>(
      new Tokenizer(std::move(bpe), std::move(file.token_bytes), std::move(file.added)));
}

absl::StatusOr<std::unique_ptr<Tokenizer>> Tokenizer::Load(const std::string& path) {
  std::ifstream stream(path, std::ios::binary);
  if (!stream) return absl::NotFoundError(absl::StrCat("cannot read ", path));
  std::ostringstream text;
  text << stream.rdbuf();
  absl::StatusOr<std::unique_ptr<Tokenizer>> result = FromJson(text.str());
  if (!result.ok()) {
    return absl::Status(result.status().code(),
                        absl::StrCat(path, ": ", result.status().message()));
  }
  return result;
}

Tokenizer::Tokenizer(BpeModel bpe,
                     std::vector<std::string> token_bytes,
                     std::vector<AddedToken> added)
    : bpe_(std::move(bpe)),
      token_bytes_(std::move(token_bytes)),
      num_base_tokens_(static_cast<int32_t>(token_bytes_.size())),
      max_token_bytes_(bpe_.max_token_bytes()) {
  for (AddedToken& token : added) {
    const size_t id = static_cast<size_t>(token.id);
    if (id >= token_bytes_.size()) token_bytes_.resize(id + 1);
    if (is_added_.size() < token_bytes_.size()) is_added_.resize(token_bytes_.size());
    is_added_[id] = true;
    max_token_bytes_ = std::max(max_token_bytes_, token.text.size());
    if (!token.text.empty()) begins_added_[static_cast<uint8_t>(token.text.front())] = true;
    uint32_t node = 0;
    for (const char c : token.text) {
      const uint64_t edge = static_cast<uint64_t>(node) << 8 | static_cast<uint8_t>(c);
      const auto [it, is_new] = trie_.try_emplace(edge, static_cast<uint32_t>(node_ids_.size()));
      if (is_new) node_ids_.push_back(-1);
      node = it->second;
    }
    node_ids_[node] = token.id;
    added_ids_[token.text] = token.id;
    token_bytes_[id] = std::move(token.text);
  }
  is_added_.resize(token_bytes_.size());
}

bool Tokenizer::EncodePlain(std::string_view text,
                            std::vector<int32_t>* ids,
                            const EncodeBudget& budget) const {
  if (!budget.Allows(ids->size() + FewestIds(text.size()))) return false;
  return pre_tokenizer_.Split(text, [&](std::string_view piece) {
    if (piece.size() > PieceCache::kMaxPieceBytes) return bpe_.Encode(piece, ids, budget);
    if (cache_.Lookup(piece, ids)) return budget.Allows(ids->size());
    const size_t before = ids->size();
    bpe_.Encode(piece, ids);
    cache_.Store(piece, ids->data() + before, ids->data() + ids->size());
    return budget.Allows(ids->size());
  });
}

bool Tokenizer::EncodeParse(std::string_view text,
                            std::vector<int32_t>* ids,
                            const EncodeBudget& budget) const {
  if (!budget.Allows(ids->size() + FewestIds(text.size()))) return false;
  size_t start = 0;
  size_t pos = 0;
  while (pos < text.size()) {
    const auto [id, length] = MatchAdded(text, pos);
    if (id < 0) {
      ++pos;
      continue;
    }
    if (!EncodePlain(text.substr(start, pos - start), ids, budget)) return false;
    ids->push_back(id);
    start = pos = pos + length;
  }
  return EncodePlain(text.substr(start), ids, budget);
}

std::pair<int32_t, size_t> Tokenizer::MatchAdded(std::string_view text, size_t pos) const {
  std::pair<int32_t, size_t> best = {-1, 0};
  if (!begins_added_[static_cast<uint8_t>(text[pos])]) return best;
  uint32_t node = 0;
  for (size_t i = pos; i < text.size(); ++i) {
    const auto it = trie_.find(static_cast<uint64_t>(node) << 8 | static_cast<uint8_t>(text[i]));
    if (it == trie_.end()) break;
    node = it->second;
    if (node_ids_[node] >= 0) best = {node_ids_[node], i + 1 - pos};
  }
  return best;
}

std::string_view Tokenizer::TokenBytes(int32_t id) const {
  if (id < 0 || id >= vocab_size()) return {};
  return token_bytes_[static_cast<size_t>(id)];
}

bool Tokenizer::IsAdded(int32_t id) const {
  return id >= 0 && id < vocab_size() && is_added_[static_cast<size_t>(id)];
}

std::optional<int32_t> Tokenizer::FindAdded(std::string_view spelling) const {
  const auto it = added_ids_.find(std::string(spelling));
  if (it == added_ids_.end()) return std::nullopt;
  return it->second;
}

std::string Tokenizer::DecodeBytes(std::span<const int32_t> ids) const {
  std::string bytes;
  for (const int32_t id : ids)
    bytes.append(TokenBytes(id));
  return bytes;
}

}  // namespace twinspark::gateway
