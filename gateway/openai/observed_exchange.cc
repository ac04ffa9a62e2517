#include "gateway/openai/observed_exchange.h"

#include <utility>

#include "absl/strings/str_cat.h"

namespace twinspark::gateway {

void HttpMetrics::Observe(std::string_view handler,
                          std::string_view method,
                          int status,
                          double seconds) {
  // What a client sends is no label.
  const std::string_view known_method = method == "GET"    ? std::string_view("GET")
                                        : method == "POST" ? std::string_view("POST")
                                                           : std::string_view("other");
  const int status_class = status / 100;
  const std::lock_guard<std::mutex> lock(mutex_);
  prometheus::Counter*& requests = requests_[{handler, known_method, status_class}];
  if (requests == nullptr) {
    requests = &metrics_.Counter(
        "http_requests_total", "HTTP requests by handler and status class.",
        {{"method", std::string(known_method)},
         {"handler", std::string(handler)},
         {"status", status_class == 0 ? "gone" : absl::StrCat(status_class, "xx")}});
  }
  prometheus::Histogram*& histogram = seconds_[handler];
  if (histogram == nullptr) {
    histogram = &metrics_.Histogram("http_request_duration_seconds",
                                    "From a request read to its answer complete.",
                                    {0.001, 0.005, 0.01, 0.05, 0.1, 0.5, 1, 5, 10, 60, 300},
                                    {{"handler", std::string(handler)}});
  }
  requests->Increment();
  histogram->Observe(seconds);
}

ObservedExchange::ObservedExchange(std::shared_ptr<HttpExchange> inner,
                                   std::shared_ptr<HttpMetrics> metrics,
                                   std::string_view handler,
                                   std::string request_id,
                                   HttpHeaders cors_headers)
    : inner_(std::move(inner)),
      metrics_(std::move(metrics)),
      handler_(handler),
      request_id_(std::move(request_id)),
      cors_headers_(std::move(cors_headers)),
      start_(std::chrono::steady_clock::now()) {
  metrics_->num_in_flight.fetch_add(1);
}

ObservedExchange::~ObservedExchange() {
  metrics_->num_in_flight.fetch_sub(1);
  metrics_->Observe(handler_, inner_->request().method, status_, Seconds());
}

void ObservedExchange::Respond(HttpResponse response) {
  Decorate(&response);
  inner_->Respond(std::move(response));
}

void ObservedExchange::StartStream(HttpResponse head, std::string keepalive) {
  Decorate(&head);
  inner_->StartStream(std::move(head), std::move(keepalive));
}

double ObservedExchange::Seconds() const {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start_).count();
}

void ObservedExchange::Decorate(HttpResponse* response) {
  status_ = response->status;
  response->headers.emplace_back("X-Request-Id", request_id_);
  response->headers.emplace_back("openai-processing-ms",
                                 absl::StrCat(static_cast<int64_t>(Seconds() * 1000)));
  response->headers.insert(response->headers.end(), cors_headers_.begin(), cors_headers_.end());
}

}  // namespace twinspark::gateway
