// See http_client.h.
#include "deploy/local_cluster/http_client.h"

#include <cstdlib>
#include <memory>

#include <curl/curl.h>

#include "absl/strings/str_cat.h"

#include "common/api_keys.h"

namespace twinspark {
namespace {

constexpr size_t kMaxBodyBytes = size_t{16} << 20;

struct Receiver {
  HttpReply reply;
  std::string pending;  // a line of the event stream that is not complete yet
  const std::function<void(std::string_view)>* on_data = nullptr;

  void TakeLines() {
    size_t begin = 0;
    for (size_t end; (end = pending.find('\n', begin)) != std::string::npos; begin = end + 1) {
      std::string_view line(pending.data() + begin, end - begin);
      if (line.ends_with('\r')) line.remove_suffix(1);
      if (line.starts_with("data: ")) (*on_data)(line.substr(6));
    }
    pending.erase(0, begin);
  }
};

size_t OnBytes(char* data, size_t size, size_t count, void* user) {
  auto* receiver = static_cast<Receiver*>(user);
  const size_t bytes = size * count;
  if (receiver->reply.body.size() + bytes > kMaxBodyBytes)
    return 0;  // ends the transfer with an error
  receiver->reply.body.append(data, bytes);
  if (receiver->on_data != nullptr) {
    receiver->pending.append(data, bytes);
    receiver->TakeLines();
  }
  return bytes;
}

absl::StatusOr<HttpReply> Perform(CURL* curl,
                                  const std::string& url,
                                  int timeout_ms,
                                  Receiver& receiver) {
  curl_easy_setopt(curl, CURLOPT_URL, url.c_str());
  curl_easy_setopt(curl, CURLOPT_NOPROXY, "*");
  curl_easy_setopt(curl, CURLOPT_NOSIGNAL, 1L);
  curl_easy_setopt(curl, CURLOPT_TIMEOUT_MS, static_cast<long>(timeout_ms));
  curl_easy_setopt(curl, CURLOPT_WRITEFUNCTION, OnBytes);
  curl_easy_setopt(curl, CURLOPT_WRITEDATA, &receiver);
  const CURLcode code = curl_easy_perform(curl);
  if (code != CURLE_OK)
    return absl::UnavailableError(absl::StrCat(url, ": ", curl_easy_strerror(code)));
  long status = 0;
  curl_easy_getinfo(curl, CURLINFO_RESPONSE_CODE, &status);
  receiver.reply.status = static_cast<int>(status);
  return std::move(receiver.reply);
}

using Handle = std::unique_ptr<CURL, decltype(&curl_easy_cleanup)>;
using Headers = std::unique_ptr<curl_slist, decltype(&curl_slist_free_all)>;

Headers MakeHeaders() {
  curl_slist* list = curl_slist_append(nullptr, "Content-Type: application/json");
  const char* path = std::getenv("API_KEY_FILE");
  if (path != nullptr && *path != '\0') {
    if (const auto keys = ReadApiKeys(path); keys.ok())
      list = curl_slist_append(list, absl::StrCat("Authorization: Bearer ", keys->front()).c_str());
  }
  return Headers(list, curl_slist_free_all);
}

}  // namespace

absl::StatusOr<HttpReply> HttpGet(const std::string& url, int timeout_ms) {
  const Handle curl(curl_easy_init(), curl_easy_cleanup);
  const Headers headers = MakeHeaders();
  curl_easy_setopt(curl.get(), CURLOPT_HTTPHEADER, headers.get());
  Receiver receiver;
  return Perform(curl.get(), url, timeout_ms, receiver);
}

absl::StatusOr<HttpReply> HttpPostEvents(
    const std::string& url,
    const std::string& json,
    int timeout_ms,
    const std::function<void(std::string_view payload)>& on_data) {
  const Handle curl(curl_easy_init(), curl_easy_cleanup);
  const Headers headers = MakeHeaders();
  curl_easy_setopt(curl.get(), CURLOPT_HTTPHEADER, headers.get());
  curl_easy_setopt(curl.get(), CURLOPT_POSTFIELDS, json.c_str());
  Receiver receiver;
  receiver.on_data = &on_data;
  return Perform(curl.get(), url, timeout_ms, receiver);
}

}  // namespace twinspark
