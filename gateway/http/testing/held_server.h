// What tests of the server share: a server on a free port, a handler that keeps its exchanges for
// the test to answer, waiting with a bound.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <string_view>
#include <thread>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"

#include "common/check.h"
#include "gateway/http/http_server.h"

namespace twinspark::gateway {

// Waits until `condition` holds, at most 30 s.
template <class F>
bool Eventually(F condition) {
  for (int i = 0; i < 30000; ++i) {
    if (condition()) return true;
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  return false;
}

// Keeps exchanges so that the test can answer them from its own thread.
class Holder {
 public:
  HttpHandler Handler() {
    return [this](std::shared_ptr<HttpExchange> exchange) {
      exchange->OnGone([this] { ++num_gone; });
      const std::lock_guard<std::mutex> lock(mutex_);
      exchanges_.push_back(std::move(exchange));
      changed_.notify_all();
    };
  }
  std::shared_ptr<HttpExchange> Next() {
    std::unique_lock<std::mutex> lock(mutex_);
    CHECK(changed_.wait_for(lock, std::chrono::seconds(30), [&] { return !exchanges_.empty(); }));
    std::shared_ptr<HttpExchange> exchange = exchanges_.front();
    exchanges_.erase(exchanges_.begin());
    return exchange;
  }
  void Clear() {
    const std::lock_guard<std::mutex> lock(mutex_);
    exchanges_.clear();
  }
  std::atomic<int> num_gone{0};

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<std::shared_ptr<HttpExchange>> exchanges_;
};

inline HttpServerOptions TestOptions() {
  HttpServerOptions options;
  options.address = "127.0.0.1";
  options.error_body = [](int status, std::string_view) { return absl::StrCat("error ", status); };
  return options;
}

inline std::unique_ptr<HttpServer> StartServer(HttpServerOptions options, HttpHandler handler) {
  absl::StatusOr<std::unique_ptr<HttpServer>> server =
      HttpServer::Start(std::move(options), std::move(handler));
  CHECK(server.ok()) << server.status();
  return *std::move(server);
}

}  // namespace twinspark::gateway
