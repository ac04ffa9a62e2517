// The bytes of one connection to requests, one after the other. Knows no sockets, so that it can be
// fuzzed; Boost.Beast does the grammar and stays inside the .cc file. Bounds: limits.h.
#pragma once

#include <cstddef>
#include <memory>
#include <string>
#include <string_view>

#include "gateway/http/http_message.h"

namespace twinspark::gateway {

// Thread-compatible.
class HttpParser {
 public:
  struct Limits {
    size_t header_bytes;
    size_t body_bytes;
  };
  enum class State {
    kHeader,    // the header block is not complete
    kBody,      // the header is there, the body is not
    kComplete,  // TakeRequest() may be called
    kError,     // the connection is lost: answer error_status() and close
  };

  explicit HttpParser(const Limits& limits);
  ~HttpParser();

  // Takes bytes of the connection. Bytes after a complete request are kept for the next one.
  State Feed(std::string_view bytes);
  State state() const { return state_; }

  // The request; afterwards the parser is at the next one, which may already be complete.
  HttpRequest TakeRequest();

  // In kBody: true when the client waits for "100 Continue" before it sends the body.
  bool ExpectsContinue() const;
  // True when not a single byte of the next request is there.
  bool IsIdle() const;
  // Bytes kept: of a request that is not complete, or after one.
  size_t num_buffered() const { return buffer_.size(); }

  int error_status() const { return error_status_; }  // 400, 413, 431, 505
  const std::string& error_message() const { return error_message_; }

 private:
  struct Impl;  // the Beast parser of the current request

  State Parse();
  State Fail(int status, std::string message);

  const Limits limits_;
  std::unique_ptr<Impl> impl_;
  std::string buffer_;  // not yet taken by the Beast parser
  State state_ = State::kHeader;
  int error_status_ = 0;
  std::string error_message_;
};

}  // namespace twinspark::gateway
