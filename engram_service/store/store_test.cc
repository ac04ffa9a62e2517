// Constants, windows, buckets and token maps against the published vectors (tests/golden/data), and
// what must be refused.
#include <fstream>
#include <iterator>
#include <string>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "boost/json.hpp"
#include "common/testing/seeded_rng.h"
#include "engram_service/store/hash_params.h"
#include "engram_service/store/hasher.h"
#include "engram_service/store/row_table.h"
#include "engram_service/store/token_map.h"

namespace twinspark::engram {
namespace {

namespace json = boost::json;
using ::testing::HasSubstr;

std::string ReadText(const std::string& name) {
  std::ifstream file(std::string(TWINSPARK_ENGRAM_VECTORS) + "/" + name);
  EXPECT_TRUE(file.good()) << name;
  return {std::istreambuf_iterator<char>(file), {}};
}

json::object Vectors(const std::string& name) {
  return json::parse(ReadText(name)).as_object();
}

template <typename T>
std::vector<T> Numbers(const json::value& list) {
  std::vector<T> out;
  for (const auto& v : list.as_array())
    out.push_back(v.to_number<T>());
  return out;
}

EngramShape ReleasedShape() {
  EngramShape shape;
  shape.layer_ids = {1, 14};
  shape.num_rows = {384006168, 384016682};
  shape.max_ngram_size = 4;
  shape.num_heads = 8;
  shape.head_dim = 256;
  shape.bucket_start = 16000000;
  shape.num_classes = 99092;
  shape.pad_token_id = 2;
  shape.vocab_size = 129280;
  return shape;
}

Hasher SmallHasher(const json::object& small) {
  EngramShape shape;
  shape.layer_ids = {2, 5};
  shape.max_ngram_size = 4;
  shape.num_heads = 2;
  shape.head_dim = 32;
  shape.bucket_start = 50;
  shape.num_classes = 23;
  shape.pad_token_id = 2;
  shape.vocab_size = 40;
  auto map = TokenMap::FromClasses(Numbers<int32_t>(small.at("token_map")));
  EXPECT_TRUE(map.ok()) << map.status();
  auto hasher = Hasher::Create(shape, *map);
  EXPECT_TRUE(hasher.ok()) << hasher.status();
  return *std::move(hasher);
}

TEST(HashParams, ReleasedConstants) {
  const auto layers = DeriveLayerHashes(ReleasedShape());
  ASSERT_TRUE(layers.ok()) << layers.status();
  const json::object expected = Vectors("constants.json");
  EXPECT_EQ(MultiplierBound(99092), expected.at("multiplier_bound").to_number<uint64_t>());
  for (size_t i = 0; i < 2; ++i) {
    EXPECT_EQ((*layers)[i].multipliers,
              Numbers<uint64_t>(expected.at("multipliers").as_array()[i]));
    EXPECT_EQ((*layers)[i].primes, Numbers<uint32_t>(expected.at("primes").as_array()[i]));
    EXPECT_EQ((*layers)[i].offsets, Numbers<uint64_t>(expected.at("offsets").as_array()[i]));
  }
  EXPECT_EQ(Hex(HashParamsDigest(*layers)),
            expected.at("hash_parameter_blob_sha256").as_string().c_str());
  const std::string text = ReadText("constants.json");
  EXPECT_TRUE(CheckConstants(ReleasedShape(), *layers, text, "constants.json").ok());
  std::string wrong = text;
  wrong.replace(wrong.find("16000079"), 8, "16000080");
  EXPECT_THAT(CheckConstants(ReleasedShape(), *layers, wrong, "file").message(),
              HasSubstr("primes of layer index 0"));
}

TEST(HashParams, RefusesRowCountsThatThePrimesDoNotGive) {
  EngramShape shape = ReleasedShape();
  shape.num_rows[1] -= 1;
  const auto layers = DeriveLayerHashes(shape);
  ASSERT_FALSE(layers.ok());
  EXPECT_THAT(layers.status().message(), HasSubstr("384016682"));
}

TEST(HashParams, ColumnsOfARank) {
  const EngramShape shape = ReleasedShape();
  EXPECT_EQ(*BalancedColumns(shape, 1, 2),
            (std::vector<int>{4, 5, 6, 7, 12, 13, 14, 15, 20, 21, 22, 23}));
  EXPECT_EQ(BalancedColumns(shape, 0, 1)->size(), 24u);
  EXPECT_EQ(ContiguousColumns(shape, 1, 2)->front(), 12);
  EXPECT_EQ(BalancedColumns(shape, 0, 3).status().message(),
            "world 3 does not divide the 8 hash heads of this model");
  EXPECT_EQ(BalancedColumns(shape, 2, 2).status().message(), "rank 2 is not in 0..1 (world 2)");
  EXPECT_EQ(BalancedColumns(shape, -1, 2).status().message(), "rank -1 is not in 0..1 (world 2)");
  EXPECT_EQ(ContiguousColumns(shape, 3, 2).status().message(), "rank 3 is not in 0..1 (world 2)");
  EXPECT_EQ(BalancedColumns(shape, 0, 0).status().message(), "world 0 is below 1");
}

TEST(Hasher, SmallExampleEveryRow) {
  const json::object small = Vectors("hash_small.json");
  const Hasher hasher = SmallHasher(small);
  const auto ids = Numbers<int32_t>(small.at("sequence"));
  const auto check = [&](const json::value& rows, const std::vector<uint8_t>& dead) {
    std::vector<Window> windows(ids.size());
    ASSERT_TRUE(hasher.Windows(ids, 0, dead, windows).ok());
    for (size_t p = 0; p < ids.size(); ++p) {
      std::vector<uint64_t> got(6);
      hasher.Rows(0, windows[p], got);
      EXPECT_EQ(got, Numbers<uint64_t>(rows.at(p).at("layer2"))) << p;
      hasher.Rows(1, windows[p], got);
      EXPECT_EQ(got, Numbers<uint64_t>(rows.at(p).at("layer5"))) << p;
    }
  };
  check(small.at("rows"), {});
  std::vector<uint8_t> dead;
  for (const int live : Numbers<int>(small.at("dead_case").at("live"))) {
    dead.push_back(live == 0 ? 1 : 0);
  }
  check(small.at("dead_case").at("rows"), dead);
}

// Any split of a sequence into requests gives the windows of the whole, when each carries the ids
// before it. Dead positions included.
TEST(Hasher, AnyChunkingGivesTheSameWindows) {
  const json::object small = Vectors("hash_small.json");
  const Hasher hasher = SmallHasher(small);
  SeededRng rng(TestSeed(11));
  for (int round = 0; round < 200; ++round) {
    const size_t size = static_cast<size_t>(rng.Int(1, 40));
    std::vector<int32_t> ids(size);
    std::vector<uint8_t> dead(size);
    for (auto& id : ids)
      id = static_cast<int32_t>(rng.Int(0, 39));
    for (auto& d : dead)
      d = rng.OneIn(5) ? 1 : 0;
    std::vector<Window> whole(size);
    ASSERT_TRUE(hasher.Windows(ids, 0, dead, whole).ok());
    for (size_t begin = 0; begin < size;) {
      const size_t end =
          begin + static_cast<size_t>(rng.Int(1, static_cast<int64_t>(size - begin)));
      const size_t history = std::min<size_t>(begin, 3);
      std::vector<Window> part(end - begin);
      ASSERT_TRUE(
          hasher
              .Windows(std::span(ids).subspan(begin - history, end - begin + history), history,
                       std::span(dead).subspan(begin - history, end - begin + history), part)
              .ok());
      for (size_t i = 0; i < part.size(); ++i) {
        EXPECT_EQ(part[i].ids, whole[begin + i].ids);
        EXPECT_EQ(part[i].live, whole[begin + i].live);
      }
      begin = end;
    }
  }
}

TEST(Hasher, ReleasedSequences) {
  const auto map = TokenMap::FromBytes(ReleasedTokenMapBytes());
  ASSERT_TRUE(map.ok()) << map.status();
  const auto hasher = Hasher::Create(ReleasedShape(), *map);
  ASSERT_TRUE(hasher.ok()) << hasher.status();
  const json::object released = Vectors("hash_released.json");
  for (const auto& item : released.at("cases").as_array()) {
    const auto ids = Numbers<int32_t>(item.at("token_ids"));
    std::vector<uint8_t> dead;
    if (item.as_object().contains("live")) {
      for (const int live : Numbers<int>(item.at("live")))
        dead.push_back(live == 0 ? 1 : 0);
    }
    std::vector<Window> windows(ids.size());
    ASSERT_TRUE(hasher->Windows(ids, 0, dead, windows).ok());
    Sha256 digest;
    for (const Window& window : windows) {
      for (int layer = 0; layer < 2; ++layer) {
        std::vector<uint64_t> rows(24);
        hasher->Rows(layer, window, rows);
        for (const uint64_t row : rows)
          digest.UpdateU64(row);
        std::vector<int> columns = *BalancedColumns(hasher->shape(), 1, 2);
        std::vector<uint32_t> buckets(columns.size());
        hasher->Buckets(layer, window, columns, buckets);
        for (size_t i = 0; i < columns.size(); ++i) {
          const size_t column = static_cast<size_t>(columns[i]);
          EXPECT_EQ(buckets[i] + hasher->layer(layer).offsets[column], rows[column]);
        }
      }
    }
    EXPECT_EQ(Hex(digest.Finish()), item.at("sha256_i64_le_[T][2][24]").as_string().c_str())
        << item.at("name").as_string();
  }
}

TEST(Hasher, RefusesIdsOutsideTheVocabulary) {
  const Hasher hasher = SmallHasher(Vectors("hash_small.json"));
  std::vector<Window> windows(2);
  for (const int32_t bad : {40, -1, 129280}) {
    const std::vector<int32_t> ids = {1, bad};
    EXPECT_FALSE(hasher.Windows(ids, 0, {}, windows).ok());
    // An image position may carry any id: it is dead before the lookup.
    EXPECT_TRUE(hasher.Windows(ids, 0, std::vector<uint8_t>{0, 1}, windows).ok());
    EXPECT_FALSE(windows[1].live);
  }
}

TEST(TokenMap, ReleasedMap) {
  const auto map = TokenMap::FromBytes(ReleasedTokenMapBytes());
  ASSERT_TRUE(map.ok()) << map.status();
  EXPECT_EQ(Hex(map->digest()), Vectors("token_map.json").at("sha256_i32_le").as_string().c_str());
  EXPECT_EQ(map->size(), 129280);
  EXPECT_EQ(map->num_classes(), 99092u);
  for (int32_t id = 128000; id < 129280; ++id)
    EXPECT_EQ(map->Class(id), id - 30188);
}

TEST(TokenMap, RefusesDamage) {
  EXPECT_FALSE(TokenMap::FromBytes(std::vector<uint8_t>{0, 0, 0}).ok());
  EXPECT_FALSE(TokenMap::FromClasses({0, 2, 2}).ok());
  EXPECT_FALSE(TokenMap::FromClasses({0, -1}).ok());
  EXPECT_EQ(TokenMap::FromClasses({0, 1, 0, 2})->num_classes(), 3u);
}

TEST(TokenMap, WithoutMapOrReleasedTokenizerNamesTheTool) {
  const auto map = LoadTokenMap("/nonexistent-model");
  ASSERT_FALSE(map.ok());
  EXPECT_THAT(map.status().message(), HasSubstr("make_token_map"));
}

TEST(RowTable, InvalidCodes) {
  std::vector<uint8_t> weights(256, 0x7e);
  std::vector<uint8_t> scales(8, 254);
  EXPECT_FALSE(HasInvalidCode(weights, scales));
  for (size_t i = 0; i < 256; ++i) {
    for (const int code : {0x7f, 0xff}) {
      weights[i] = static_cast<uint8_t>(code);
      EXPECT_TRUE(HasInvalidCode(weights, scales)) << i;
    }
    weights[i] = static_cast<uint8_t>(i == 0x7f || i == 0xff ? 0 : i);
  }
  EXPECT_FALSE(HasInvalidCode(weights, scales));
  scales[7] = 255;
  EXPECT_TRUE(HasInvalidCode(weights, scales));
}

}  // namespace
}  // namespace twinspark::engram
