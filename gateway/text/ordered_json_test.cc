// Goal: values keep what the model must see (order, long integers, shortest reals) and bad texts
// are refused with a reason. Method: fixed cases from the rules of chat.md 2.6, plus a random round
// trip.
#include "gateway/text/ordered_json.h"

#include <cmath>
#include <cstdlib>
#include <cstring>
#include <random>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace twinspark::gateway {
namespace {

using ::testing::HasSubstr;

std::string Again(std::string_view text) {
  const absl::StatusOr<Json> value = Json::Parse(text);
  return value.ok() ? value->Dump() : "error: " + std::string(value.status().message());
}

TEST(OrderedJson, RendersAsTheModelReads) {
  EXPECT_EQ(Again(R"({"b":[1,2.50,"x",null,true,false],"a":{"c":{}}})"),
            R"({"b": [1, 2.5, "x", null, true, false], "a": {"c": {}}})");
  EXPECT_EQ(Again(R"({"a":1,"b":2,"a":3})"), R"({"a": 3, "b": 2})");
  EXPECT_EQ(Again("12345678901234567890123"), "12345678901234567890123");
  EXPECT_EQ(Again("[-0, -0.0, 0.0]"), "[0, -0.0, 0.0]");
  EXPECT_EQ(
      Again("[1E5, 1e16, 1e15, 123456789012345.0, 1e-4, 1e-5, 1.5e-7, 1e-400]"),
      "[100000.0, 1e+16, 1000000000000000.0, 123456789012345.0, 0.0001, 1e-05, 1.5e-07, 0.0]");
  EXPECT_EQ(Again(R"("\u00e9\/\u0001\u007f\u2028\b")"), "\"é/\\u0001\x7F\u2028\\b\"");
}

TEST(OrderedJson, RefusesWithAReason) {
  EXPECT_THAT(Again("{\"a\":1e400}"), HasSubstr("not finite"));
  EXPECT_THAT(Again("\"\\ud800\""), HasSubstr("surrogate"));
  EXPECT_THAT(Again("\"\\ud800x\""), HasSubstr("surrogate"));
  EXPECT_THAT(Again("\"\\udc00\""), HasSubstr("surrogate"));
  EXPECT_THAT(Again("\"\xFF\""), HasSubstr("UTF-8"));
  for (const char* bad : {"", "{", "[1,]", "{\"a\"}", "nul", "1 2", "01", "1.", "NaN", "'a'",
                          "{\"a\":1}}", "\"\n\"", "// x\n1"}) {
    EXPECT_FALSE(Json::Parse(bad).ok()) << bad;
  }
}

TEST(OrderedJson, DepthIsBounded) {
  const auto nested = [](size_t depth) {
    return std::string(depth, '[') + std::string(depth, ']');
  };
  EXPECT_TRUE(Json::Parse(nested(128)).ok());
  EXPECT_THAT(Again(nested(129)), HasSubstr("128 levels"));
  EXPECT_FALSE(Json::Parse(std::string(1000000, '[')).ok());
}

TEST(OrderedJson, ValuesAreBounded) {
  std::string text = "[";
  for (size_t i = 0; i < Json::kMaxValues; ++i)
    text += "1,";
  text += "1]";
  EXPECT_THAT(Again(text), HasSubstr("values"));
  text = "[" + text.substr(text.size() / 2 + 2);
  EXPECT_TRUE(Json::Parse(text).ok());
}

TEST(OrderedJson, IntegersAndIntegralReals) {
  EXPECT_EQ(Json::Parse("5.0")->ToInt64(), 5);
  EXPECT_EQ(Json::Parse("5.5")->ToInt64(), std::nullopt);
  EXPECT_EQ(Json::Parse("9223372036854775807")->ToInt64(), INT64_MAX);
  EXPECT_EQ(Json::Parse("9223372036854775808")->ToInt64(), std::nullopt);
  EXPECT_FALSE(Json::Parse("5.0")->is_integer());
  EXPECT_EQ(*Json::Parse(R"({"a":1,"b":[2]})"), *Json::Parse(R"({"b":[2],"a":1})"));
  EXPECT_FALSE(*Json::Parse("1") == *Json::Parse("1.0"));
}

TEST(OrderedJson, RandomRealsReadBackTheSame) {
  std::mt19937_64 rng(20261201);
  for (int i = 0; i < 20000; ++i) {
    const uint64_t bits = rng();
    double value;
    std::memcpy(&value, &bits, sizeof(value));
    if (!std::isfinite(value)) continue;
    std::string text;
    AppendJsonReal(value, &text);
    ASSERT_EQ(std::strtod(text.c_str(), nullptr), value) << text;
    ASSERT_EQ(Again(text), text);
  }
}

}  // namespace
}  // namespace twinspark::gateway
