// What is counted about HTTP requests, and the exchange that counts: it passes everything on to the
// server's, adds the headers that every answer has, and says at its end how the request ended.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <tuple>

#include "absl/base/thread_annotations.h"
#include "absl/functional/function_ref.h"

#include "common/metrics.h"
#include "gateway/http/http_server.h"

namespace twinspark::gateway {

// Thread-safe. Shared by the API and the exchanges, which may outlive it.
class HttpMetrics {
 public:
  explicit HttpMetrics(Metrics& metrics) : metrics_(metrics) {}

  // `handler` is a path of ours and lives for ever; `status` 0: the client left before an answer.
  void Observe(std::string_view handler, std::string_view method, int status, double seconds);

  std::atomic<int> num_in_flight{0};  // requests not answered yet

 private:
  Metrics& metrics_;
  std::mutex mutex_;
  // Made when first wanted, then found here: the registry takes microseconds for a look-up.
  std::map<std::tuple<std::string_view, std::string_view, int>, prometheus::Counter*> requests_
      ABSL_GUARDED_BY(mutex_);  // by handler, method, status class
  std::map<std::string_view, prometheus::Histogram*> seconds_ ABSL_GUARDED_BY(mutex_);
};

class ObservedExchange : public HttpExchange {
 public:
  ObservedExchange(std::shared_ptr<HttpExchange> inner,
                   std::shared_ptr<HttpMetrics> metrics,
                   std::string_view handler,
                   std::string request_id,
                   HttpHeaders cors_headers);
  ~ObservedExchange() override;

  HttpRequest& request() override { return inner_->request(); }
  void Post(std::function<void()> task) override { inner_->Post(std::move(task)); }
  bool TryRun(absl::FunctionRef<void()> task) override { return inner_->TryRun(task); }
  void After(int64_t delay_ms, std::function<void()> task) override {
    inner_->After(delay_ms, std::move(task));
  }
  void OnGone(std::function<void()> callback) override { inner_->OnGone(std::move(callback)); }
  void Respond(HttpResponse response) override;
  void StartStream(HttpResponse head, std::string keepalive) override;
  void Write(std::string_view piece) override { inner_->Write(piece); }
  void EndStream(bool close) override { inner_->EndStream(close); }
  bool is_started() const override { return inner_->is_started(); }
  bool is_gone() const override { return inner_->is_gone(); }

 private:
  double Seconds() const;
  void Decorate(HttpResponse* response);

  const std::shared_ptr<HttpExchange> inner_;
  const std::shared_ptr<HttpMetrics> metrics_;
  const std::string_view handler_;
  const std::string request_id_;
  const HttpHeaders cors_headers_;
  const std::chrono::steady_clock::time_point start_;
  int status_ = 0;
};

}  // namespace twinspark::gateway
