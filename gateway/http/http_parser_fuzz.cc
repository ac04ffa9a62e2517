// HttpParser on any bytes, cut at places that the input itself chooses: it ends in an error or in
// requests within the bounds, and never keeps more bytes than a header block and a chunk.
#include "gateway/http/http_parser.h"

#include "common/check.h"
#include "common/testing/fuzz_driver.h"

namespace {

constexpr twinspark::gateway::HttpParser::Limits kLimits{512, 2048};

std::vector<std::string> Seeds() {
  return {
      "GET /v1/models HTTP/1.1\r\nHost: a\r\n\r\n",
      "POST /a?b=%20 HTTP/1.1\r\nHost: a\r\nContent-Length: 3\r\nExpect: 100-continue\r\n\r\nabc",
      "POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nab\r\n10;x=y\r\n0123456789abcdef"
      "\r\n0\r\nTrailer: x\r\n\r\nGET / HTTP/1.0\r\n\r\n"};
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using twinspark::gateway::HttpParser;
  HttpParser parser(kLimits);
  const std::string_view bytes(reinterpret_cast<const char*>(data), size);
  for (size_t pos = 0; pos < size;) {
    const size_t n = std::min<size_t>(size - pos, 1 + data[pos] % 37);
    parser.Feed(bytes.substr(pos, n));
    pos += n;
    while (parser.state() == HttpParser::State::kComplete) {
      const auto request = parser.TakeRequest();
      CHECK(request.body.size() <= kLimits.body_bytes) << request.body.size();
      CHECK(!request.method.empty());
    }
    if (parser.state() == HttpParser::State::kError) {
      CHECK(parser.error_status() >= 400 && !parser.error_message().empty());
      return 0;
    }
    CHECK(parser.num_buffered() <= 4 * kLimits.header_bytes + kLimits.body_bytes)
        << parser.num_buffered();
  }
  return 0;
}

TWINSPARK_FUZZ_MAIN(Seeds())
