// Merging works on a doubly linked list of symbols and a heap of candidate pairs. A candidate is
// stale when either symbol has changed since it was pushed; it is then skipped when popped.
//
// A long piece is merged in windows. What makes that exact: let U and V be the ids of two texts u
// and v. If the last of U and the first of V stand together (their joined bytes give these two ids
// again), the ids of uv are U followed by V. For the first merge across the border would join
// symbols inside those two tokens; until then every merge inside them comes in the same order as in
// their joined bytes alone, lowest rank first, leftmost among equals; so it would happen there too.
// And the ids of a text, cut between two of them, are the ids of its two parts.
#include "gateway/text/bpe_model.h"

#include <algorithm>

#include "absl/status/status.h"
#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"

namespace twinspark::gateway {
namespace {

struct Symbol {
  int32_t id;
  int32_t prev;  // -1 at the ends
  int32_t next;
};

struct Candidate {
  int32_t rank;
  int32_t left;  // symbol index
  int32_t left_id;
  int32_t right_id;
  int32_t merged_id;
};

// Heap order: lowest rank first, leftmost among equals (std heaps keep the largest on top).
bool Later(const Candidate& a, const Candidate& b) {
  return a.rank != b.rank ? a.rank > b.rank : a.left > b.left;
}

}  // namespace

absl::StatusOr<BpeModel> BpeModel::Create(
    std::span<const std::string> token_bytes,
    std::span<const std::pair<std::string, std::string>> merges) {
  absl::flat_hash_map<std::string, int32_t> ids;
  ids.reserve(token_bytes.size());
  for (size_t id = 0; id < token_bytes.size(); ++id) {
    if (!token_bytes[id].empty()) ids.emplace(token_bytes[id], static_cast<int32_t>(id));
  }
  BpeModel model;
  for (const std::string& bytes : token_bytes) {
    model.num_bytes_.push_back(static_cast<uint32_t>(bytes.size()));
    model.max_token_bytes_ = std::max(model.max_token_bytes_, bytes.size());
  }
  for (size_t byte = 0; byte < 256; ++byte) {
    const auto it = ids.find(std::string(1, static_cast<char>(byte)));
    if (it == ids.end()) {
      return absl::InvalidArgumentError(
          absl::StrCat("the vocabulary has no token for the single byte ", byte));
    }
    model.byte_ids_[byte] = it->second;
  }
  model.merges_.reserve(merges.size());
  for (size_t rank = 0; rank < merges.size(); ++rank) {
    const auto& [left, right] = merges[rank];
    const auto left_it = ids.find(left);
    const auto right_it = ids.find(right);
    const auto merged_it = ids.find(left + right);
    if (left_it == ids.end() || right_it == ids.end() || merged_it == ids.end()) {
      return absl::InvalidArgumentError(
          absl::StrCat("merge ", rank, " (\"", absl::CEscape(left), "\" + \"", absl::CEscape(right),
                       "\") names a token that the vocabulary lacks"));
    }
    model.merges_.emplace(Key(left_it->second, right_it->second),
                          Merge{static_cast<int32_t>(rank), merged_it->second});
  }
  model.byte_merges_.resize(256 * 256);
  for (size_t pair = 0; pair < model.byte_merges_.size(); ++pair) {
    model.byte_merges_[pair] = model.Find(model.byte_ids_[pair >> 8], model.byte_ids_[pair & 255]);
  }
  return model;
}

bool BpeModel::Encode(std::string_view piece,
                      std::vector<int32_t>* ids,
                      const EncodeBudget& budget) const {
  if (piece.size() > kMaxShortBytes) return EncodeLong(piece, ids, budget);
  EncodeShort(piece, ids);
  return budget.Allows(ids->size());
}

void BpeModel::EncodeShort(std::string_view piece, std::vector<int32_t>* ids) const {
  size_t n = piece.size();
  std::array<int32_t, kMaxShortBytes> symbols;
  std::array<Merge, kMaxShortBytes> merges;  // [i]: of symbols i and i + 1
  for (size_t i = 0; i < n; ++i) {
    const uint8_t byte = static_cast<uint8_t>(piece[i]);
    symbols[i] = byte_ids_[byte];
    if (i + 1 < n) {
      merges[i] = byte_merges_[static_cast<size_t>(byte) << 8 | static_cast<uint8_t>(piece[i + 1])];
    }
  }
  while (n > 1) {
    size_t best = 0;
    for (size_t i = 1; i + 1 < n; ++i) {
      if (merges[i].rank < merges[best].rank) best = i;
    }
    if (merges[best].rank == kNoRank) break;
    symbols[best] = merges[best].id;
    // Symbol best + 1 goes; the merge of `best` with what follows takes the place of its own.
    for (size_t i = best + 1; i + 1 < n; ++i) {
      symbols[i] = symbols[i + 1];
      merges[i - 1] = merges[i];
    }
    --n;
    if (best > 0) merges[best - 1] = Find(symbols[best - 1], symbols[best]);
    if (best + 1 < n) merges[best] = Find(symbols[best], symbols[best + 1]);
  }
  ids->insert(ids->end(), symbols.begin(), symbols.begin() + static_cast<ptrdiff_t>(n));
}

bool BpeModel::StandTogether(int32_t left, int32_t right, std::string_view joined) const {
  std::vector<int32_t> ids;
  if (joined.size() <= kMaxShortBytes) {
    EncodeShort(joined, &ids);
  } else {
    EncodeWhole(joined, &ids);
  }
  return ids.size() == 2 && ids[0] == left && ids[1] == right;
}

// Each window keeps the ids of its first three quarters: more text behind it can only change those
// near its end. Where it did change an id before the cut, the next window does not stand together
// with it; then both are one window of twice the size, again from where the first began.
bool BpeModel::EncodeLong(std::string_view piece,
                          std::vector<int32_t>* ids,
                          const EncodeBudget& budget,
                          size_t window_bytes) const {
  struct Window {
    size_t begin;      // in the piece
    size_t num_ids;    // that were there before it
    size_t num_bytes;  // that it looked at
  };
  std::vector<Window> done;
  std::vector<int32_t> found;
  // A long run of one character is the same window and the same border again and again. Such runs
  // have the fewest ids per byte, so a budget of ids lets more of them through than of anything.
  std::string_view found_in;
  std::pair<int32_t, int32_t> stood_together = {-1, -1};
  size_t begin = 0;
  size_t num_bytes = window_bytes;
  while (begin < piece.size()) {
    if (!budget.Allows(ids->size())) return false;
    const std::string_view window = piece.substr(begin, num_bytes);
    const bool is_last = begin + window.size() == piece.size();
    if (window != found_in) {
      found.clear();
      EncodeWhole(window, &found);
      found_in = window;
    }
    if (!done.empty() && stood_together != std::pair(ids->back(), found.front())) {
      const size_t before = NumBytes(ids->back());
      const std::string_view joined =
          piece.substr(begin - before, before + NumBytes(found.front()));
      stood_together = {ids->back(), found.front()};
      if (!StandTogether(ids->back(), found.front(), joined)) {
        stood_together = {-1, -1};
        const Window back = done.back();
        done.pop_back();
        ids->resize(back.num_ids);
        begin = back.begin;
        num_bytes = 2 * std::max(back.num_bytes, num_bytes);
        continue;
      }
    }
    done.push_back({begin, ids->size(), window.size()});
    const size_t keep = is_last ? window.size() : window.size() - window.size() / 4;
    size_t taken = 0;
    for (size_t i = 0; i < found.size() && (taken < keep); ++i) {
      ids->push_back(found[i]);
      taken += NumBytes(found[i]);
    }
    begin += taken;
    num_bytes = window_bytes;
  }
  return budget.Allows(ids->size());
}

void BpeModel::EncodeWhole(std::string_view piece, std::vector<int32_t>* ids) const {
  const int32_t n = static_cast<int32_t>(piece.size());
  std::vector<Symbol> symbols(piece.size());
  for (int32_t i = 0; i < n; ++i) {
    symbols[static_cast<size_t>(i)] = {
        byte_ids_[static_cast<uint8_t>(piece[static_cast<size_t>(i)])], i - 1,
        i + 1 < n ? i + 1 : -1};
  }
  std::vector<Candidate> heap;
  const auto push = [&](int32_t left) {
    if (left < 0 || symbols[static_cast<size_t>(left)].next < 0) return;
    const int32_t left_id = symbols[static_cast<size_t>(left)].id;
    const int32_t right = symbols[static_cast<size_t>(left)].next;
    const int32_t right_id = symbols[static_cast<size_t>(right)].id;
    const Merge merge = Find(left_id, right_id);
    if (merge.rank == kNoRank) return;
    heap.push_back({merge.rank, left, left_id, right_id, merge.id});
    std::push_heap(heap.begin(), heap.end(), Later);
  };
  for (int32_t i = 0; i + 1 < n; ++i)
    push(i);

  while (!heap.empty()) {
    std::pop_heap(heap.begin(), heap.end(), Later);
    const Candidate top = heap.back();
    heap.pop_back();
    Symbol& left = symbols[static_cast<size_t>(top.left)];
    if (left.id != top.left_id || left.next < 0) continue;
    Symbol& right = symbols[static_cast<size_t>(left.next)];
    if (right.id != top.right_id) continue;
    left.id = top.merged_id;
    left.next = right.next;
    if (right.next >= 0) symbols[static_cast<size_t>(right.next)].prev = top.left;
    right.id = -1;  // dead: no candidate that starts here is valid any more
    push(left.prev);
    push(top.left);
  }
  for (int32_t i = n > 0 ? 0 : -1; i >= 0; i = symbols[static_cast<size_t>(i)].next) {
    ids->push_back(symbols[static_cast<size_t>(i)].id);
  }
}

}  // namespace twinspark::gateway
