#include "gateway/openai/openai_api.h"

#include <algorithm>
#include <array>
#include <chrono>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"

#include "common/clock.h"
#include "common/ids.h"
#include "common/limits.h"
#include "common/log.h"
#include "common/string_view.h"
#include "gateway/openai/generation_job.h"
#include "gateway/openai/prepare_job.h"
#include "gateway/openai/tokenize.h"
#include "gateway/text/ordered_json.h"

namespace twinspark::gateway {
namespace {

constexpr std::string_view kModelPrefix = "/v1/models/";
// Bodies up to this size are read where they arrive: some milliseconds.
constexpr size_t kMaxInlineBodyBytes = 32 << 10;
// Prompts are counted to their end up to twice the context and so many more; what is longer is
// refused without being read on.
constexpr int64_t kMaxIdsBeyond = 65536;
constexpr int kPreflightSeconds = 600;
constexpr size_t kMaxPreparedBytes = 256 << 20;

// Time does not depend on where the strings differ.
bool EqualsInConstantTime(std::string_view a, std::string_view b) {
  unsigned difference = a.size() == b.size() ? 0u : 1u;
  for (size_t i = 0; i < a.size(); ++i) {
    difference |= static_cast<unsigned>(static_cast<uint8_t>(a[i]) ^
                                        static_cast<uint8_t>(i < b.size() ? b[i] : '\0'));
  }
  return difference == 0;
}

std::string RequestIdOf(const HttpHeaders& headers) {
  const std::string* given = FindHeader(headers, "X-Request-Id");
  return given != nullptr && IsRequestId(*given) ? *given : Hex16(RandomU64()) + Hex16(RandomU64());
}

// 415 when the body is declared to be something else than JSON as it stands.
std::optional<ApiError> CheckContentType(const HttpHeaders& headers) {
  const std::string* type = FindHeader(headers, "Content-Type");
  if (type != nullptr) {
    const std::string_view name = std::string_view(*type).substr(0, type->find(';'));
    const absl::string_view trimmed = absl::StripAsciiWhitespace(ToAbsl(name));
    if (!trimmed.empty() && !absl::EqualsIgnoreCase(trimmed, "application/json")) {
      return ApiError::OfHttp(
          415, absl::StrCat("Content-Type must be application/json, not ", Quoted(*type), "."));
    }
  }
  const std::string* encoding = FindHeader(headers, "Content-Encoding");
  if (encoding != nullptr && !encoding->empty() && !absl::EqualsIgnoreCase(*encoding, "identity")) {
    return ApiError::OfHttp(415, "Content-Encoding is not supported.");
  }
  return std::nullopt;
}

// The body as an object; 400 with the reason otherwise.
std::optional<Json> ReadBody(const std::string& body, std::optional<ApiError>* error) {
  absl::StatusOr<Json> json = Json::Parse(body, limits::kMaxJsonDepth);
  if (!json.ok()) {
    const std::string reason(ToStd(json.status().message()));
    *error = ApiError::Invalid(
        {}, reason.find("surrogate") != std::string::npos
                ? absl::StrCat("The request body has text that is not valid Unicode: ", reason, ".")
                : absl::StrCat("The request body is not valid JSON: ", reason, "."));
    return std::nullopt;
  }
  if (!json->is_object()) {
    *error = ApiError::Invalid({}, "The request body must be a JSON object.");
    return std::nullopt;
  }
  return *std::move(json);
}

}  // namespace

enum class OpenAiApi::Route {
  kChat,
  kCompletions,
  kTokenize,
  kDetokenize,
  kNotBuilt,
  kModels,
  kHealth,
  kLive,
  kStatus,
  kMetrics,
  kVersion,
  kLoad,
};

struct OpenAiApi::RouteInfo {
  std::string_view path;
  Route route;
  bool is_post;
  bool needs_key;
};

const OpenAiApi::RouteInfo* OpenAiApi::FindRoute(std::string_view path) {
  static constexpr std::array<RouteInfo, 22> kRoutes = {{
      {"/v1/chat/completions", Route::kChat, true, true},
      {"/chat/completions", Route::kChat, true, true},
      {"/beta/chat/completions", Route::kChat, true, true},
      {"/v1/completions", Route::kCompletions, true, true},
      {"/completions", Route::kCompletions, true, true},
      {"/beta/completions", Route::kCompletions, true, true},
      {"/tokenize", Route::kTokenize, true, true},
      {"/detokenize", Route::kDetokenize, true, true},
      {"/v1/responses", Route::kNotBuilt, true, true},
      {"/v1/messages", Route::kNotBuilt, true, true},
      {"/anthropic/v1/messages", Route::kNotBuilt, true, true},
      {"/v1/models", Route::kModels, false, true},
      {"/models", Route::kModels, false, true},
      {"/beta/models", Route::kModels, false, true},
      {"/health", Route::kHealth, false, false},
      {"/ready", Route::kHealth, false, false},
      {"/ping", Route::kHealth, false, false},
      {"/live", Route::kLive, false, false},
      {"/status", Route::kStatus, false, false},
      {"/metrics", Route::kMetrics, false, false},
      {"/version", Route::kVersion, false, false},
      {"/load", Route::kLoad, false, false},
  }};
  static constexpr RouteInfo kOneModel = {kModelPrefix, Route::kModels, false, true};
  if (path.size() > kModelPrefix.size() && path.substr(0, kModelPrefix.size()) == kModelPrefix) {
    return &kOneModel;
  }
  const auto it = std::find_if(kRoutes.begin(), kRoutes.end(),
                               [path](const RouteInfo& route) { return route.path == path; });
  return it == kRoutes.end() ? nullptr : &*it;
}

OpenAiApi::OpenAiApi(OpenAiOptions options,
                     const TextModel& text,
                     GenerateService& service,
                     Metrics& metrics)
    : options_(std::move(options)),
      text_(text),
      service_(service),
      metrics_(metrics),
      created_(UnixTimeUs() / 1000000),
      http_metrics_(std::make_shared<HttpMetrics>(metrics)),
      worker_(kMaxPreparedBytes) {}

std::string OpenAiApi::HttpErrorBody(int status, std::string_view message) {
  return ApiError::OfHttp(status, message).Body();
}

void OpenAiApi::Handle(std::shared_ptr<HttpExchange> exchange) {
  const HttpRequest& request = exchange->request();
  const RouteInfo* route = FindRoute(request.path);
  const std::string id = RequestIdOf(request.headers);
  HttpHeaders cors_headers = CorsHeaders(request.headers);
  const auto observed = std::make_shared<ObservedExchange>(std::move(exchange), http_metrics_,
                                                           route == nullptr ? "other" : route->path,
                                                           id, std::move(cors_headers));
  if (route == nullptr) {
    AnswerError(*observed,
                ApiError::OfHttp(404, absl::StrCat("Not Found: ", Quoted(request.path), ".")));
    return;
  }
  if (request.method == "OPTIONS" && !options_.cors_origins.empty()) {
    AnswerPreflight(*route, *observed);
    return;
  }
  const bool is_get = request.method == "GET" || request.method == "HEAD";
  if (route->is_post ? request.method != "POST" : !is_get) {
    HttpResponse response = ApiError::OfHttp(405, "Method Not Allowed.").Response();
    response.headers.emplace_back("Allow", route->is_post ? "POST" : "GET, HEAD");
    Answer(*observed, std::move(response));
    return;
  }
  if (route->needs_key && !IsAuthorized(request.headers)) {
    AnswerError(*observed, {401,
                            "authentication_error",
                            {},
                            "invalid_api_key",
                            "A valid API key is needed: Authorization: Bearer KEY."});
    return;
  }
  if (route->is_post) {
    HandlePost(*route, id, observed);
  } else {
    HandleGet(*route, *observed);
  }
}

HttpHeaders OpenAiApi::CorsHeaders(const HttpHeaders& request) const {
  if (options_.cors_origins.empty()) return {};
  const std::vector<std::string>& allowed = options_.cors_origins;
  const auto is_allowed = [&](const std::string& origin) {
    return std::find(allowed.begin(), allowed.end(), origin) != allowed.end();
  };
  HttpHeaders headers;
  if (is_allowed("*")) {
    headers.emplace_back("Access-Control-Allow-Origin", "*");
  } else {
    headers.emplace_back("Vary", "Origin");  // caches must not mix the answers
    const std::string* origin = FindHeader(request, "Origin");
    if (origin == nullptr || !is_allowed(*origin)) return headers;
    headers.emplace_back("Access-Control-Allow-Origin", *origin);
  }
  headers.emplace_back("Access-Control-Expose-Headers",
                       "X-Request-Id, openai-processing-ms, Retry-After");
  return headers;
}

// A browser asks before it sends a page's request; the answer needs no key.
void OpenAiApi::AnswerPreflight(const RouteInfo& route, HttpExchange& exchange) const {
  HttpResponse response;
  response.headers.emplace_back("Access-Control-Allow-Methods",
                                route.is_post ? "POST, OPTIONS" : "GET, HEAD, OPTIONS");
  // The names that OpenAI's clients send; "*" would not cover Authorization.
  const std::string* asked =
      FindHeader(exchange.request().headers, "Access-Control-Request-Headers");
  response.headers.emplace_back(
      "Access-Control-Allow-Headers",
      asked != nullptr ? *asked : "Authorization, Content-Type, X-Request-Id, x-api-key");
  response.headers.emplace_back("Access-Control-Max-Age", absl::StrCat(kPreflightSeconds));
  Answer(exchange, std::move(response));
}

bool OpenAiApi::IsAuthorized(const HttpHeaders& headers) const {
  if (options_.api_keys.empty()) return true;
  std::string_view key;
  constexpr std::string_view kBearer = "Bearer ";
  if (const std::string* header = FindHeader(headers, "Authorization");
      header != nullptr && header->size() > kBearer.size() &&
      absl::EqualsIgnoreCase(header->substr(0, kBearer.size()), ToAbsl(kBearer))) {
    key = std::string_view(*header).substr(kBearer.size());
  } else if (const std::string* x_key = FindHeader(headers, "x-api-key")) {
    key = *x_key;
  }
  bool is_known = false;
  for (const std::string& accepted : options_.api_keys) {
    is_known |= EqualsInConstantTime(accepted, key);
  }
  return is_known;
}

void OpenAiApi::HandleGet(const RouteInfo& route, HttpExchange& exchange) const {
  const std::string path = exchange.request().path;
  switch (route.route) {
    case Route::kModels:
      if (route.path == kModelPrefix) {
        AnswerModel(path.substr(kModelPrefix.size()), exchange);
      } else {
        AnswerJson(exchange, ModelsJson());
      }
      return;
    case Route::kHealth: {
      const EngineStatus status = service_.GetStatus();
      AnswerJson(exchange, EngineHealthJson(status), status.ready() ? 200 : 503);
      return;
    }
    case Route::kLive: {
      const bool alive = service_.GetStatus().alive;
      AnswerJson(exchange, alive ? "{\"status\":\"alive\"}" : "{\"status\":\"stuck\"}",
                 alive ? 200 : 503);
      return;
    }
    case Route::kStatus:
      AnswerJson(exchange, EngineStatusJson(service_.GetStatus()));
      return;
    case Route::kMetrics: {
      HttpResponse response;
      response.headers.emplace_back("Content-Type", "text/plain; version=0.0.4; charset=utf-8");
      response.body = metrics_.Text();
      Answer(exchange, std::move(response));
      return;
    }
    case Route::kVersion: {
      std::string body = "{\"version\":";
      AppendJsonString(options_.build_id, &body);
      AnswerJson(exchange, body + "}");
      return;
    }
    case Route::kLoad:
      AnswerJson(exchange,
                 absl::StrCat("{\"server_load\":", http_metrics_->num_in_flight.load(), "}"));
      return;
    default:
      break;
  }
}

void OpenAiApi::HandlePost(const RouteInfo& route,
                           const std::string& id,
                           std::shared_ptr<HttpExchange> exchange) {
  const std::optional<ApiError> error = CheckContentType(exchange->request().headers);
  if (error.has_value()) {
    AnswerError(*exchange, *error);
    return;
  }
  auto body = std::make_shared<std::string>(std::move(exchange->request().body));
  if (body->size() <= kMaxInlineBodyBytes) {
    Proceed(Prepare(route, *body, id, /*is_gone=*/nullptr), std::move(exchange));
    return;
  }
  const auto is_gone = std::make_shared<std::atomic<bool>>(false);
  exchange->OnGone([is_gone] { is_gone->store(true); });
  PrepareWorker::Task task;
  task.num_bytes = body->size();
  task.is_gone = is_gone;
  task.run = [this, &route, body, id, exchange, is_gone] {
    auto prepared = std::make_shared<Prepared>(Prepare(route, *body, id, is_gone.get()));
    exchange->Post([this, prepared, exchange] { Proceed(std::move(*prepared), exchange); });
  };
  if (!worker_.Run(std::move(task))) {
    AnswerError(*exchange, {429,
                            "rate_limit_error",
                            {},
                            "queue_full",
                            "Too many large requests are being read; try again."});
  }
}

OpenAiApi::Prepared OpenAiApi::Prepare(const RouteInfo& route,
                                       const std::string& body,
                                       const std::string& request_id,
                                       const std::atomic<bool>* is_gone) const {
  Prepared result;
  const std::optional<Json> json = ReadBody(body, &result.error);
  if (!json.has_value()) return result;
  const EngineStatus engine = service_.GetStatus();
  const int64_t max_context =
      engine.limits.max_context > 0 ? engine.limits.max_context : int64_t{limits::kMaxContext};
  JobContext context{options_, text_, engine, request_id, {}};
  context.budget.max_ids = static_cast<size_t>(2 * max_context + kMaxIdsBeyond);
  context.budget.cancelled = is_gone;
  switch (route.route) {
    case Route::kChat:
      result.job = PrepareChat(*json, context, &result.error);
      break;
    case Route::kCompletions:
      result.job = PrepareCompletions(*json, context, &result.error);
      break;
    case Route::kTokenize:
      result.answer =
          Tokenize(*json, text_, engine.limits.max_context, context.budget, &result.error);
      break;
    case Route::kDetokenize:
      result.answer = Detokenize(*json, text_, FieldLimitsOf(context).vocab_size, &result.error);
      break;
    default:
      result.error = ApiError::Invalid({}, absl::StrCat(std::string(route.path),
                                                        " is not supported by this server; use "
                                                        "/v1/chat/completions."));
  }
  return result;
}

void OpenAiApi::Proceed(Prepared prepared, std::shared_ptr<HttpExchange> exchange) {
  if (exchange->is_gone()) return;
  if (prepared.error.has_value()) {
    AnswerError(*exchange, *prepared.error);
  } else if (prepared.job.has_value()) {
    GenerationJob::Start(std::move(exchange), service_, text_, *std::move(prepared.job));
  } else {
    AnswerJson(*exchange, std::move(prepared.answer));
  }
}

std::string OpenAiApi::ModelJson(const std::string& name) const {
  std::string out = "{\"id\":";
  AppendJsonString(name, &out);
  absl::StrAppend(&out, ",\"object\":\"model\",\"created\":", created_,
                  ",\"owned_by\":\"twinspark\",\"root\":");
  AppendJsonString(options_.model_root.empty() ? options_.model_names.front() : options_.model_root,
                   &out);
  absl::StrAppend(&out,
                  ",\"parent\":null,\"max_model_len\":", service_.GetStatus().limits.max_context,
                  ",\"permission\":[],\"capabilities\":{\"vision\":false,\"tools\":true,"
                  "\"reasoning\":true}}");
  return out;
}

std::string OpenAiApi::ModelsJson() const {
  std::string list;
  for (const std::string& name : options_.model_names) {
    absl::StrAppend(&list, list.empty() ? "" : ",", ModelJson(name));
  }
  return absl::StrCat("{\"object\":\"list\",\"data\":[", list, "]}");
}

void OpenAiApi::AnswerModel(const std::string& id, HttpExchange& exchange) const {
  const auto& names = options_.model_names;
  if (std::find(names.begin(), names.end(), id) != names.end()) {
    AnswerJson(exchange, ModelJson(id));
    return;
  }
  AnswerError(exchange, {404, "invalid_request_error", "model", "model_not_found",
                         absl::StrCat("The model ", Quoted(id), " does not exist.")});
}

void OpenAiApi::Answer(HttpExchange& exchange, HttpResponse response) const {
  exchange.Respond(std::move(response));
}

void OpenAiApi::AnswerJson(HttpExchange& exchange, std::string body, int status) const {
  HttpResponse response;
  response.status = status;
  response.headers.emplace_back("Content-Type", "application/json");
  if (status == 503) response.headers.emplace_back("Retry-After", "5");
  response.body = std::move(body);
  Answer(exchange, std::move(response));
}

void OpenAiApi::AnswerError(HttpExchange& exchange, const ApiError& error) const {
  Answer(exchange, error.Response());
}

}  // namespace twinspark::gateway
