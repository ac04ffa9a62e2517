// Beast's parser takes a header block only when it is there as a whole, so unread bytes are kept in
// one buffer and offered again; body bytes are taken as they come.
#include "gateway/http/http_parser.h"

#include <boost/beast/http/parser.hpp>
#include <boost/beast/http/string_body.hpp>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"

#include "common/check.h"

namespace twinspark::gateway {

namespace http = boost::beast::http;

struct HttpParser::Impl {
  http::request_parser<http::string_body> parser;
  size_t header_bytes = 0;  // taken so far; Beast's own limit is per call

  explicit Impl(const Limits& limits) {
    parser.header_limit(static_cast<std::uint32_t>(limits.header_bytes));
    parser.body_limit(limits.body_bytes);
  }
};

HttpParser::HttpParser(const Limits& limits)
    : limits_(limits), impl_(std::make_unique<Impl>(limits)) {}

HttpParser::~HttpParser() = default;

HttpParser::State HttpParser::Feed(std::string_view bytes) {
  buffer_.append(bytes);
  return state_ == State::kHeader || state_ == State::kBody ? Parse() : state_;
}

HttpParser::State HttpParser::Parse() {
  http::request_parser<http::string_body>& parser = impl_->parser;
  size_t used = 0;
  boost::beast::error_code ec;
  while (!parser.is_done() && used < buffer_.size()) {
    const bool in_header = !parser.is_header_done();
    const size_t n =
        parser.put(boost::asio::const_buffer(buffer_.data() + used, buffer_.size() - used), ec);
    used += n;
    if (in_header) {
      impl_->header_bytes += n;
      if (parser.is_header_done()) parser.eager(true);  // until here one call takes no body
    }
    if (ec) break;
  }
  buffer_.erase(0, used);
  const size_t header_bytes = impl_->header_bytes + (parser.is_header_done() ? 0 : buffer_.size());
  if ((!ec || ec == http::error::need_more) && header_bytes > limits_.header_bytes) {
    ec = http::error::header_limit;
  }
  if (ec == http::error::need_more) ec = {};
  if (ec == http::error::header_limit) {
    return Fail(431,
                absl::StrCat("The header block is longer than ", limits_.header_bytes, " bytes."));
  }
  if (ec == http::error::body_limit) {
    return Fail(413,
                absl::StrCat("The request body is longer than ", limits_.body_bytes, " bytes."));
  }
  if (ec == http::error::bad_version) return Fail(505, "Only HTTP/1.0 and HTTP/1.1 are spoken.");
  if (ec) return Fail(400, absl::StrCat("Malformed HTTP request: ", ec.message(), "."));
  state_ = parser.is_done()          ? State::kComplete
           : parser.is_header_done() ? State::kBody
                                     : State::kHeader;
  return state_;
}

HttpRequest HttpParser::TakeRequest() {
  CHECK(state_ == State::kComplete) << "no request is complete";
  http::request<http::string_body> message = impl_->parser.release();
  HttpRequest request;
  request.method = std::string(message.method_string());
  std::string_view target(message.target().data(), message.target().size());
  constexpr std::string_view kScheme = "http://";  // the form that proxies use
  if (target.substr(0, kScheme.size()) == kScheme) {
    const size_t slash = target.find('/', kScheme.size());
    target = slash == std::string_view::npos ? std::string_view("/") : target.substr(slash);
  }
  const size_t mark = target.find('?');
  request.path = PercentDecode(target.substr(0, mark));
  if (mark != std::string_view::npos) request.query = std::string(target.substr(mark + 1));
  for (const auto& field : message) {
    request.headers.emplace_back(std::string(field.name_string()), std::string(field.value()));
  }
  request.body = std::move(message.body());
  request.keep_alive = message.keep_alive();
  request.is_http_1_1 = message.version() >= 11;

  impl_ = std::make_unique<Impl>(limits_);
  state_ = State::kHeader;
  if (!buffer_.empty()) Parse();
  return request;
}

bool HttpParser::ExpectsContinue() const {
  const auto& message = impl_->parser.get();
  return state_ == State::kBody &&
         absl::EqualsIgnoreCase(std::string(message[http::field::expect]), "100-continue");
}

bool HttpParser::IsIdle() const {
  return state_ == State::kHeader && buffer_.empty();
}

HttpParser::State HttpParser::Fail(int status, std::string message) {
  error_status_ = status;
  error_message_ = std::move(message);
  buffer_.clear();
  state_ = State::kError;
  return state_;
}

}  // namespace twinspark::gateway
