// The routes of the gateway: every path of the HTTP server, authentication, and the handlers that
// read a request and start its work (chat.md 4 of the specification). main makes one and gives
// Handle() to HttpServer.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "common/metrics.h"
#include "gateway/engine/generate_request.h"
#include "gateway/http/http_server.h"
#include "gateway/openai/generation_job.h"
#include "gateway/openai/observed_exchange.h"
#include "gateway/openai/openai_options.h"
#include "gateway/openai/prepare_worker.h"
#include "gateway/text/text_model.h"

namespace twinspark::gateway {

// Thread-safe. Borrows text, service and metrics, which must outlive every request.
class OpenAiApi {
 public:
  OpenAiApi(OpenAiOptions options,
            const TextModel& text,
            GenerateService& service,
            Metrics& metrics);

  // Answers one request; runs on its connection's executor.
  void Handle(std::shared_ptr<HttpExchange> exchange);

  // Body of errors that the HTTP server answers by itself, for HttpServerOptions::error_body.
  static std::string HttpErrorBody(int status, std::string_view message);

 private:
  enum class Route;
  struct RouteInfo;

  static const RouteInfo* FindRoute(std::string_view path);
  bool IsAuthorized(const HttpHeaders& headers) const;
  void HandleGet(const RouteInfo& route, HttpExchange& exchange) const;
  void HandlePost(const RouteInfo& route,
                  const std::string& id,
                  std::shared_ptr<HttpExchange> exchange);
  // Headers that tell a browser that the page may read the answer.
  HttpHeaders CorsHeaders(const HttpHeaders& request) const;
  void AnswerPreflight(const RouteInfo& route, HttpExchange& exchange) const;
  // A request read and encoded: one of the three.
  struct Prepared {
    std::optional<ApiError> error;
    std::string answer;
    std::optional<JobOptions> job;
  };
  // `is_gone`: the client has left and nobody needs the result; may be null.
  Prepared Prepare(const RouteInfo& route,
                   const std::string& body,
                   const std::string& request_id,
                   const std::atomic<bool>* is_gone) const;
  void Proceed(Prepared prepared, std::shared_ptr<HttpExchange> exchange);
  std::string ModelJson(const std::string& name) const;
  std::string ModelsJson() const;
  void AnswerModel(const std::string& id, HttpExchange& exchange) const;
  void Answer(HttpExchange& exchange, HttpResponse response) const;
  void AnswerJson(HttpExchange& exchange, std::string body, int status = 200) const;
  void AnswerError(HttpExchange& exchange, const ApiError& error) const;

  const OpenAiOptions options_;
  const TextModel& text_;
  GenerateService& service_;
  Metrics& metrics_;
  const int64_t created_;
  const std::shared_ptr<HttpMetrics> http_metrics_;
  PrepareWorker worker_;  // last: its tasks use everything above
};

}  // namespace twinspark::gateway
