// A TCP client of a few lines for tests: sends bytes as given, reads responses apart. Every wait is
// bounded; a broken expectation is a CHECK.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace twinspark::gateway {

class RawClient {
 public:
  struct Response {
    int status = 0;  // 0: the connection ended before a response
    std::vector<std::pair<std::string, std::string>> headers;
    std::string body;  // chunks joined
    std::string Header(std::string_view name) const;
  };

  explicit RawClient(uint16_t port);
  ~RawClient();
  RawClient(const RawClient&) = delete;
  RawClient& operator=(const RawClient&) = delete;

  // False when the server has closed the connection.
  bool Send(std::string_view bytes);
  void SendRequest(std::string_view method,
                   std::string_view path,
                   std::string_view body = {},
                   std::string_view extra_headers = {});
  // Reads one whole response (Content-Length, chunked, or until the end).
  Response Read();
  // Reads until `text` has been received (in everything received so far and not yet taken by Read);
  // false when the connection ended first.
  bool ReadUntil(std::string_view text);
  const std::string& received() const { return received_; }
  // Waits for the server to close; false after the timeout.
  bool WaitClosed();
  // Ends the connection: at once with a reset, or only the sending side.
  void Reset();
  void ShutdownSend();
  // For socket options.
  int fd() const { return fd_; }

 private:
  bool Fill();

  int fd_ = -1;
  std::string received_;
};

}  // namespace twinspark::gateway
