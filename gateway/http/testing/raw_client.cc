#include "gateway/http/testing/raw_client.h"

#include <algorithm>
#include <cerrno>
#include <cstdlib>

#include <arpa/inet.h>
#include <netinet/in.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"

#include "common/check.h"
#include "common/string_view.h"

namespace twinspark::gateway {
namespace {

constexpr int kTimeoutMs = 30000;

}  // namespace

std::string RawClient::Response::Header(std::string_view name) const {
  for (const auto& [key, value] : headers) {
    if (absl::EqualsIgnoreCase(key, ToAbsl(name))) return value;
  }
  return {};
}

RawClient::RawClient(uint16_t port) {
  fd_ = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  CHECK_GE(fd_, 0);
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_port = htons(port);
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  CHECK_EQ(connect(fd_, reinterpret_cast<const sockaddr*>(&address), sizeof(address)), 0)
      << "errno " << errno;
}

RawClient::~RawClient() {
  if (fd_ >= 0) close(fd_);
}

bool RawClient::Send(std::string_view bytes) {
  while (!bytes.empty()) {
    const ssize_t n = send(fd_, bytes.data(), bytes.size(), MSG_NOSIGNAL);
    if (n <= 0) return false;
    bytes.remove_prefix(static_cast<size_t>(n));
  }
  return true;
}

void RawClient::SendRequest(std::string_view method,
                            std::string_view path,
                            std::string_view body,
                            std::string_view extra_headers) {
  std::string text = absl::StrCat(ToAbsl(method), " ", ToAbsl(path), " HTTP/1.1\r\nHost: test\r\n",
                                  ToAbsl(extra_headers));
  if (!body.empty()) absl::StrAppend(&text, "Content-Length: ", body.size(), "\r\n");
  Send(absl::StrCat(text, "\r\n", ToAbsl(body)));
}

bool RawClient::Fill() {
  pollfd wait{fd_, POLLIN, 0};
  const int ready = poll(&wait, 1, kTimeoutMs);
  CHECK_EQ(ready, 1) << "no answer in time; received so far: " << received_;
  char buffer[16384];
  const ssize_t n = recv(fd_, buffer, sizeof(buffer), 0);
  if (n <= 0) return false;
  received_.append(buffer, static_cast<size_t>(n));
  return true;
}

bool RawClient::ReadUntil(std::string_view text) {
  while (received_.find(text) == std::string::npos) {
    if (!Fill()) return false;
  }
  return true;
}

RawClient::Response RawClient::Read() {
  Response response;
  if (!ReadUntil("\r\n\r\n")) return response;
  const size_t head_end = received_.find("\r\n\r\n");
  std::string head = received_.substr(0, head_end);
  received_.erase(0, head_end + 4);
  CHECK(absl::StartsWith(head, "HTTP/1.1 ")) << head;
  response.status = std::atoi(head.c_str() + 9);
  for (size_t pos = head.find("\r\n"); pos != std::string::npos;) {
    const size_t end = head.find("\r\n", pos + 2);
    const std::string line = head.substr(pos + 2, end - pos - 2);
    const size_t colon = line.find(": ");
    CHECK(colon != std::string::npos) << line;
    response.headers.emplace_back(line.substr(0, colon), line.substr(colon + 2));
    pos = end;
  }
  if (response.status == 100) return response;
  if (response.Header("Transfer-Encoding") == "chunked") {
    for (;;) {
      if (!ReadUntil("\r\n")) return response;
      const size_t length = std::strtoul(received_.c_str(), nullptr, 16);
      const size_t begin = received_.find("\r\n") + 2;
      while (received_.size() < begin + length + 2) {
        if (!Fill()) return response;
      }
      response.body.append(received_, begin, length);
      received_.erase(0, begin + length + 2);
      if (length == 0) return response;
    }
  }
  const std::string length_text = response.Header("Content-Length");
  size_t length = std::string::npos;
  if (!length_text.empty()) length = std::strtoul(length_text.c_str(), nullptr, 10);
  while (received_.size() < length && Fill()) {
  }
  length = std::min(length, received_.size());
  response.body = received_.substr(0, length);
  received_.erase(0, length);
  return response;
}

bool RawClient::WaitClosed() {
  for (;;) {
    pollfd wait{fd_, POLLIN, 0};
    if (poll(&wait, 1, kTimeoutMs) != 1) return false;
    char buffer[16384];
    if (recv(fd_, buffer, sizeof(buffer), 0) <= 0) return true;
  }
}

void RawClient::Reset() {
  const linger now{1, 0};
  setsockopt(fd_, SOL_SOCKET, SO_LINGER, &now, sizeof(now));
  close(fd_);
  fd_ = -1;
}

void RawClient::ShutdownSend() {
  shutdown(fd_, SHUT_WR);
}

}  // namespace twinspark::gateway
