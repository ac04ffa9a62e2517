// Goal: the array, the heap and the windows merge alike, and a vocabulary with holes is refused.
// Method: random merge tables over three letters (ranks in any order, so that a cut may well be
// wrong and be found out), random pieces.
#include "gateway/text/bpe_model.h"

#include "absl/container/flat_hash_set.h"
#include <gtest/gtest.h>

#include "common/file_util.h"
#include "common/testing/seeded_rng.h"
#include "gateway/text/tokenizer_json.h"

namespace twinspark::gateway {
namespace {

TEST(BpeModel, ArrayAndHeapAgree) {
  SeededRng rng(TestSeed(5));
  for (int table = 0; table < 6; ++table) {
    std::vector<std::string> tokens;
    for (int byte = 0; byte < 256; ++byte)
      tokens.emplace_back(1, static_cast<char>(byte));
    std::vector<std::string> made = {"a", "b", "c"};
    absl::flat_hash_set<std::string> known(made.begin(), made.end());
    std::vector<std::pair<std::string, std::string>> merges;
    for (int i = 0; i < 60; ++i) {
      const std::string left =
          made[static_cast<size_t>(rng.Int(0, static_cast<int64_t>(made.size()) - 1))];
      const std::string right =
          made[static_cast<size_t>(rng.Int(0, static_cast<int64_t>(made.size()) - 1))];
      if (!known.insert(left + right).second) continue;
      merges.emplace_back(left, right);
      made.push_back(left + right);
      tokens.push_back(left + right);
    }
    const absl::StatusOr<BpeModel> model = BpeModel::Create(tokens, merges);
    ASSERT_TRUE(model.ok()) << model.status();
    for (int round = 0; round < 500; ++round) {
      std::string piece;
      for (int64_t i = rng.Int(0, BpeModel::kMaxShortBytes); i > 0; --i) {
        piece.push_back(static_cast<char>(rng.Int('a', 'c')));
      }
      std::vector<int32_t> by_array, by_heap;
      model->EncodeShort(piece, &by_array);
      model->EncodeWhole(piece, &by_heap);
      ASSERT_EQ(by_array, by_heap) << piece;
    }
    for (int round = 0; round < 200; ++round) {
      // Runs and repetitions are where a token may depend on one far away.
      std::string piece, unit;
      for (int64_t i = rng.Int(1, 5); i > 0; --i)
        unit.push_back(static_cast<char>(rng.Int('a', 'c')));
      for (int64_t i = rng.Int(1, 600); i > 0; --i) {
        if (round % 2 == 0) piece += unit;
        piece.push_back(static_cast<char>(rng.Int('a', round % 4 == 0 ? 'a' : 'c')));
      }
      std::vector<int32_t> whole;
      model->EncodeWhole(piece, &whole);
      for (const size_t window : {1, 2, 7, 16, 100, 4096}) {
        std::vector<int32_t> by_window = {7};
        ASSERT_TRUE(model->EncodeLong(piece, &by_window, {}, window));
        by_window.erase(by_window.begin());
        ASSERT_EQ(by_window, whole) << window << " " << piece;
      }
    }
  }
}

// Real vocabularies, the released one where tests/fetch_tokenizer.sh has put it: text of their own
// tokens, joined without the cuts of the split rules.
TEST(BpeModel, WindowsAgreeOnRealVocabularies) {
  const std::string root = TWINSPARK_SOURCE_DIR;
  for (const std::string& path :
       {root + "/deploy/demo_model/tokenizer.json", root + "/build/tokenizer/tokenizer.json"}) {
    const absl::StatusOr<std::string> text = ReadFile(path, size_t{64} << 20);
    if (absl::IsNotFound(text.status())) continue;
    ASSERT_TRUE(text.ok()) << text.status();
    const absl::StatusOr<TokenizerFile> file = ParseTokenizerJson(*text);
    ASSERT_TRUE(file.ok()) << file.status();
    const absl::StatusOr<BpeModel> model = BpeModel::Create(file->token_bytes, file->merges);
    ASSERT_TRUE(model.ok()) << model.status();
    SeededRng rng(TestSeed(6));
    const auto token = [&]() -> const std::string& {
      return file->token_bytes[static_cast<size_t>(
          rng.Int(0, static_cast<int64_t>(file->token_bytes.size()) - 1))];
    };
    for (int round = 0; round < 60; ++round) {
      std::string piece;
      const std::string unit = token() + token();
      while (piece.size() < 12000) {
        const int64_t kind = round % 3 == 0 ? 0 : rng.Int(0, 2);
        if (kind == 0) piece += unit;
        if (kind == 1) piece += token();
        if (kind == 2)
          piece.append(static_cast<size_t>(rng.Int(1, 300)), unit.empty() ? 'a' : unit[0]);
        if (unit.empty()) piece += 'a';
      }
      std::vector<int32_t> whole;
      model->EncodeWhole(piece, &whole);
      for (const size_t window : {size_t{100}, size_t{1000}, BpeModel::kWindowBytes}) {
        std::vector<int32_t> by_window;
        ASSERT_TRUE(model->EncodeLong(piece, &by_window, {}, window));
        ASSERT_EQ(by_window, whole) << path << " round " << round << " window " << window;
      }
    }
  }
}

TEST(BpeModel, GivesUpInTheMiddleOfAPiece) {
  std::vector<std::string> tokens;
  for (int byte = 0; byte < 256; ++byte)
    tokens.emplace_back(1, static_cast<char>(byte));
  tokens.push_back("aa");
  const std::vector<std::pair<std::string, std::string>> merges = {{"a", "a"}};
  const absl::StatusOr<BpeModel> model = BpeModel::Create(tokens, merges);
  ASSERT_TRUE(model.ok()) << model.status();
  EXPECT_EQ(model->max_token_bytes(), 2u);
  const std::string piece(1 << 20, 'a');
  std::vector<int32_t> ids;
  EncodeBudget budget;
  budget.max_ids = 5000;
  EXPECT_FALSE(model->Encode(piece, &ids, budget));
  EXPECT_LE(ids.size(), 5000 + BpeModel::kWindowBytes) << "it stops within a window";
  ids.clear();
  std::atomic<bool> gone{true};
  budget.max_ids = SIZE_MAX;
  budget.cancelled = &gone;
  EXPECT_FALSE(model->Encode(piece, &ids, budget));
  EXPECT_TRUE(ids.empty());
  gone = false;
  EXPECT_TRUE(model->Encode(piece, &ids, budget));
  EXPECT_EQ(ids, std::vector<int32_t>(piece.size() / 2, 256));
}

TEST(BpeModel, RefusesHoles) {
  std::vector<std::string> tokens;
  for (int byte = 0; byte < 256; ++byte)
    tokens.emplace_back(1, static_cast<char>(byte));
  EXPECT_TRUE(BpeModel::Create(tokens, {}).ok());
  const std::vector<std::pair<std::string, std::string>> unknown = {{"a", "b"}};
  EXPECT_FALSE(BpeModel::Create(tokens, unknown).ok());
  tokens.pop_back();
  EXPECT_FALSE(BpeModel::Create(tokens, {}).ok());
}

}  // namespace
}  // namespace twinspark::gateway
