// Goal: the match that ends first wins, however the text is cut, and only real beginnings of a
// match are held back. Method: a search over the whole text, written independently, for random
// strings over two letters.
#include "gateway/text/stop_matcher.h"

#include <gtest/gtest.h>

#include "common/testing/seeded_rng.h"

namespace twinspark::gateway {
namespace {

// Text before the match that ends first, the longest of those that end there; all when none does.
std::string Reference(const std::string& text, const std::vector<std::string>& stops, bool* found) {
  for (size_t end = 1; end <= text.size(); ++end) {
    size_t longest = 0;
    for (const std::string& stop : stops) {
      if (stop.size() <= end && text.compare(end - stop.size(), stop.size(), stop) == 0) {
        longest = std::max(longest, stop.size());
      }
    }
    if (longest > 0) {
      *found = true;
      return text.substr(0, end - longest);
    }
  }
  *found = false;
  return text;
}

TEST(StopMatcher, CutsDoNotMatter) {
  SeededRng rng(TestSeed(11));
  const auto word = [&](int64_t max) {
    std::string out;
    for (int64_t i = rng.Int(1, max); i > 0; --i)
      out.push_back(rng.OneIn(2) ? 'a' : 'b');
    return out;
  };
  for (int round = 0; round < 20000; ++round) {
    std::vector<std::string> stops;
    for (int64_t i = rng.Int(1, 4); i > 0; --i)
      stops.push_back(word(7));
    const std::string text = word(20);
    StopMatcher matcher(stops);
    std::string out;
    bool stopped = false;
    for (size_t pos = 0; pos < text.size() && !stopped;) {
      const size_t n = static_cast<size_t>(rng.Int(1, 6));
      stopped = matcher.Push(std::string_view(text).substr(pos, n), &out);
      pos += n;
    }
    if (!stopped) matcher.Flush(&out);
    bool expected_stop = false;
    const std::string expected = Reference(text, stops, &expected_stop);
    ASSERT_EQ(stopped, expected_stop) << text;
    ASSERT_EQ(out, expected) << text;
  }
}

TEST(StopMatcher, HoldsBackOnlyBeginnings) {
  StopMatcher matcher({"STOP"});
  std::string out;
  EXPECT_FALSE(matcher.Push("a STO", &out));
  EXPECT_EQ(out, "a ");
  EXPECT_FALSE(matcher.Push("ck", &out));
  EXPECT_EQ(out, "a STOck");
  EXPECT_TRUE(matcher.Push("xSTOPy", &out));
  EXPECT_EQ(out, "a STOckx");
  EXPECT_EQ(matcher.matched_string(), "STOP");
}

}  // namespace
}  // namespace twinspark::gateway
