// Goal: the array and the heap merge alike, and a vocabulary with holes is refused. Method: a
// random merge table over three letters, random pieces.
#include "gateway/text/bpe_model.h"

#include "absl/container/flat_hash_set.h"
#include <gtest/gtest.h>

#include "common/testing/seeded_rng.h"

namespace twinspark::gateway {
namespace {

TEST(BpeModel, ArrayAndHeapAgree) {
  SeededRng rng(TestSeed(5));
  for (int table = 0; table < 20; ++table) {
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
      model->EncodeLong(piece, &by_heap);
      ASSERT_EQ(by_array, by_heap) << piece;
    }
  }
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
