// The released and the demo configuration are read; whatever would change the mathematics is
// refused by key, value and expectation.
#include "common/model_config.h"

#include <boost/json.hpp>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "common/file_util.h"

namespace twinspark {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

std::string ReleasedText() {
  return *ReadFile(TWINSPARK_SOURCE_DIR "/tests/golden/data/released/config.json", 1 << 20);
}

// The released file with one key of text_config (or of the top, with a leading '/') replaced; JSON
// null as "-" erases it.
absl::StatusOr<ModelConfig> With(const std::string& key, const std::string& json) {
  boost::json::value root = boost::json::parse(ReleasedText());
  const bool is_top = key[0] == '/';
  boost::json::object& object =
      is_top ? root.as_object() : root.as_object().at("text_config").as_object();
  const std::string name = is_top ? key.substr(1) : key;
  if (json == "-") {
    object.erase(name);
  } else {
    object[name] = boost::json::parse(json);
  }
  return ParseModelConfig(boost::json::serialize(root), "x/config.json");
}

std::string Error(const std::string& key, const std::string& json) {
  const auto config = With(key, json);
  return config.ok() ? "accepted" : std::string(config.status().message());
}

TEST(ModelConfigTest, ReleasedModel) {
  const auto config = ParseModelConfig(ReleasedText(), "x");
  ASSERT_TRUE(config.ok()) << config.status();
  EXPECT_EQ(config->num_layers, 40);
  EXPECT_EQ(config->engram_num_columns(), 24);
  const auto& layers = config->layers;
  EXPECT_EQ(layers[1].ratio, 0);
  EXPECT_EQ(layers[1].engram_module, 0);
  EXPECT_TRUE(layers[14].owns_kv && layers[14].owns_index);
  EXPECT_EQ(layers[14].engram_module, 1);
  EXPECT_EQ(layers[19].kv_source, 14);
  EXPECT_TRUE(layers[20].makes_candidates && !layers[20].uses_candidates);
  EXPECT_TRUE(layers[28].uses_candidates && layers[28].owns_index && !layers[28].owns_kv);
  EXPECT_EQ(layers[31].kv_source, 20);
  EXPECT_EQ(layers[31].index_source, 28);
  EXPECT_EQ(layers[38].draft_tap, 1);
  EXPECT_TRUE(CheckTensorParallel(*config, 1).ok());
  EXPECT_TRUE(CheckTensorParallel(*config, 2).ok());
  EXPECT_FALSE(CheckTensorParallel(*config, 3).ok());
}

TEST(ModelConfigTest, DemoModel) {
  const auto config = LoadModelConfig(TWINSPARK_SOURCE_DIR "/deploy/demo_model");
  ASSERT_TRUE(config.ok()) << config.status();
  EXPECT_THAT(config->kv_source_layer_ids, ElementsAre(2, 4, 5));
  EXPECT_TRUE(CheckTensorParallel(*config, 2).ok());
}

TEST(ModelConfigTest, KeysThatWouldBeAnotherNetworkAreRefused) {
  EXPECT_THAT(Error("hidden_act", "\"gelu\""),
              HasSubstr("text_config.hidden_act is \"gelu\", expected \"silu\""));
  EXPECT_THAT(Error("scoring_func", "\"softmax\""), HasSubstr("scoring_func"));
  EXPECT_THAT(Error("n_shared_experts", "2"), HasSubstr("n_shared_experts is 2"));
  EXPECT_THAT(Error("tie_word_embeddings", "true"), HasSubstr("tie_word_embeddings"));
  EXPECT_THAT(Error("new_kind_of_norm", "1"), HasSubstr("new_kind_of_norm"));
  EXPECT_THAT(Error("/model_type", "\"llama\""), HasSubstr("model_type is \"llama\""));
  EXPECT_THAT(Error("/virtual_heads_from", "[64, 8]"), HasSubstr("virtual_heads_from"));
  EXPECT_THAT(Error("rope_scaling", R"({"rope_type":"linear","factor":2})"),
              HasSubstr("rope_type"));
}

TEST(ModelConfigTest, WrongValuesAreNamed) {
  EXPECT_THAT(Error("hidden_size", "-"), HasSubstr("hidden_size is missing"));
  EXPECT_THAT(Error("hidden_size", "-5"), HasSubstr("hidden_size is -5"));
  EXPECT_THAT(Error("hidden_size", "\"big\""), HasSubstr("hidden_size is \"big\""));
  EXPECT_THAT(Error("hidden_size", "5120.5"), HasSubstr("5.1205E3"));
  EXPECT_THAT(Error("rms_norm_eps", "1e300"), HasSubstr("rms_norm_eps"));
  EXPECT_THAT(Error("num_experts_per_tok", "385"), HasSubstr("num_experts_per_tok is 385"));
  EXPECT_THAT(Error("head_dim", "500"), HasSubstr("head_dim is 500, expected a multiple of 32"));
  EXPECT_THAT(Error("compress_ratios", "[0,0]"), HasSubstr("compress_ratios has 2 entries"));
  EXPECT_THAT(Error("kv_source_layer_ids", "[8,2,14,20]"), HasSubstr("ascend"));
  EXPECT_THAT(Error("kv_source_layer_ids", "[2,8,14,21]"), HasSubstr("21"));
  EXPECT_THAT(Error("index_source_layer_ids", "[2,8,14]"), HasSubstr("20"));
  EXPECT_THAT(Error("engram_num_embeddings", "[1]"), HasSubstr("engram_num_embeddings has 1"));
  EXPECT_THAT(Error("candidate_source_layer_id", "3"), HasSubstr("candidate_source_layer_id 3"));
}

TEST(ModelConfigTest, NotJson) {
  EXPECT_THAT(std::string(ParseModelConfig("{", "x/config.json").status().message()),
              HasSubstr("x/config.json"));
  EXPECT_THAT(std::string(ParseModelConfig("[]", "x/config.json").status().message()),
              HasSubstr("not a JSON object"));
  EXPECT_THAT(std::string(ParseModelConfig(R"({"model_type":"a","model_type":"deepseek_v41"})", "x")
                              .status()
                              .message()),
              HasSubstr("named twice"));
  EXPECT_EQ(LoadModelConfig("/no/such/dir").status().code(), absl::StatusCode::kNotFound);
}

}  // namespace
}  // namespace twinspark
