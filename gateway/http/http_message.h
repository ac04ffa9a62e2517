// Requests and responses of HTTP as plain values; nothing of the library that reads them shows.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace twinspark::gateway {

using HttpHeaders = std::vector<std::pair<std::string, std::string>>;

// The value of the first header of that name (ASCII case does not matter), or a null pointer.
const std::string* FindHeader(const HttpHeaders& headers, std::string_view name);

struct HttpRequest {
  std::string method;
  std::string path;   // of the target, percent-decoded, without the query
  std::string query;  // after '?', as sent
  HttpHeaders headers;
  std::string body;
  bool keep_alive = true;
  bool is_http_1_1 = true;  // chunked responses are understood
};

struct HttpResponse {
  int status = 200;
  HttpHeaders headers;  // without Content-Length, Date, Server, Connection, Transfer-Encoding
  std::string body;
};

// "OK", "Not Found", ...
std::string_view HttpReason(int status);

// The target before '?' with %XX decoded; bytes that are not valid escapes stay as they are.
std::string PercentDecode(std::string_view text);

}  // namespace twinspark::gateway
