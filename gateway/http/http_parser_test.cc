// Goal: requests come out the same however the bytes are cut, and what is out of bounds is refused
// with the right status. Method: each request is fed whole, byte by byte, and in random pieces.
#include "gateway/http/http_parser.h"

#include <gtest/gtest.h>

#include "common/testing/seeded_rng.h"

namespace twinspark::gateway {
namespace {

constexpr HttpParser::Limits kLimits{1024, 4096};

TEST(HttpParser, CutsDoNotMatter) {
  const std::string bytes =
      "POST /v1/a%20b?x=1 HTTP/1.1\r\nHost: h\r\nContent-Length: 5\r\n\r\nhello"
      "GET / HTTP/1.1\r\nHost: h\r\nConnection: close\r\n\r\n"
      "POST /c HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked\r\n\r\n"
      "3\r\nabc\r\n4;ext=1\r\ndefg\r\n0\r\n\r\n";
  SeededRng rng(TestSeed(1));
  for (int round = 0; round < 200; ++round) {
    HttpParser parser(kLimits);
    std::vector<HttpRequest> requests;
    for (size_t pos = 0; pos < bytes.size();) {
      const size_t n = round == 0   ? bytes.size()
                       : round == 1 ? 1
                                    : static_cast<size_t>(rng.Int(1, 40));
      parser.Feed(std::string_view(bytes).substr(pos, n));
      pos += n;
      while (parser.state() == HttpParser::State::kComplete) {
        requests.push_back(parser.TakeRequest());
      }
      ASSERT_NE(parser.state(), HttpParser::State::kError) << parser.error_message();
    }
    ASSERT_EQ(requests.size(), 3u);
    EXPECT_EQ(requests[0].path, "/v1/a b");
    EXPECT_EQ(requests[0].query, "x=1");
    EXPECT_EQ(requests[0].body, "hello");
    EXPECT_TRUE(requests[0].keep_alive);
    EXPECT_FALSE(requests[1].keep_alive);
    EXPECT_EQ(requests[2].body, "abcdefg");
    EXPECT_TRUE(parser.IsIdle());
  }
}

int ErrorOf(std::string_view bytes) {
  HttpParser parser(kLimits);
  return parser.Feed(bytes) == HttpParser::State::kError ? parser.error_status() : 0;
}

TEST(HttpParser, RefusesWhatIsOutOfBounds) {
  EXPECT_EQ(ErrorOf("POST / HTTP/1.1\r\nHost: h\r\nContent-Length: 4097\r\n\r\n"), 413);
  EXPECT_EQ(ErrorOf("GET / HTTP/1.1\r\nX: " + std::string(2000, 'a') + "\r\n\r\n"), 431);
  EXPECT_EQ(ErrorOf("GET / HTTP/1.1\r\nX: " + std::string(2000, 'a')), 431);
  std::string flood = "GET / HTTP/1.1\r\n";
  for (int i = 0; i < 200; ++i)
    flood += "X: 12345\r\n";
  EXPECT_EQ(ErrorOf(flood), 431);
  EXPECT_EQ(ErrorOf(flood + "\r\n"), 431);
  EXPECT_EQ(ErrorOf("GET / HTTP/9.9\r\n\r\n"), 505);
  std::string chunks = "POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n";
  for (int i = 0; i < 5; ++i)
    chunks += "400\r\n" + std::string(1024, 'x') + "\r\n";
  EXPECT_EQ(ErrorOf(chunks), 413);
}

TEST(HttpParser, RefusesMalformedRequests) {
  for (const char* bytes :
       {"\x16\x03\x01\x02\r\n\r\n", "GET\r\n\r\n", "GET / HTTP/1.1\r\nno colon\r\n\r\n",
        "POST / HTTP/1.1\r\nContent-Length: x\r\n\r\n",
        "POST / HTTP/1.1\r\nContent-Length: -1\r\n\r\n",
        "POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
        "POST / HTTP/1.1\r\nContent-Length: 3\r\nContent-Length: 4\r\n\r\nabcd",
        "POST / HTTP/1.1\r\nContent-Length: 3\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n"}) {
    EXPECT_EQ(ErrorOf(bytes), 400) << bytes;
  }
}

TEST(HttpParser, AbsoluteTargets) {
  HttpParser parser(kLimits);
  parser.Feed("GET http://host:1/v1/models?a HTTP/1.1\r\n\r\nGET http://host HTTP/1.1\r\n\r\n");
  const HttpRequest request = parser.TakeRequest();
  EXPECT_EQ(request.path, "/v1/models");
  EXPECT_EQ(request.query, "a");
  EXPECT_EQ(parser.TakeRequest().path, "/");
}

TEST(HttpParser, ContinueIsAskedForOnlyBeforeTheBody) {
  HttpParser parser(kLimits);
  parser.Feed("POST / HTTP/1.1\r\nContent-Length: 2\r\nExpect: 100-Continue\r\n\r\n");
  EXPECT_EQ(parser.state(), HttpParser::State::kBody);
  EXPECT_TRUE(parser.ExpectsContinue());
  EXPECT_EQ(parser.Feed("ok"), HttpParser::State::kComplete);
  EXPECT_FALSE(parser.ExpectsContinue());
}

TEST(PercentDecode, LeavesBrokenEscapesAlone) {
  EXPECT_EQ(PercentDecode("/a%2Fb%20c%7e"), "/a/b c~");
  EXPECT_EQ(PercentDecode("%"), "%");
  EXPECT_EQ(PercentDecode("%2"), "%2");
  EXPECT_EQ(PercentDecode("%zz%41"), "%zzA");
}

}  // namespace
}  // namespace twinspark::gateway
