#include "gateway/openai/api_error.h"

#include <utility>

#include "absl/strings/str_cat.h"

#include "common/string_view.h"
#include "gateway/text/ordered_json.h"
#include "gateway/text/utf8.h"

namespace twinspark::gateway {
namespace {

constexpr size_t kMaxQuotedBytes = 64;

void AppendStringOrNull(std::string_view text, std::string* out) {
  if (text.empty()) {
    out->append("null");
  } else {
    AppendJsonString(text, out);
  }
}

}  // namespace

ApiError ApiError::OfHttp(int status, std::string_view message) {
  ApiError error = Invalid({}, std::string(message));
  error.status = status;
  if (status == 408) error.code = "request_timeout";
  if (status == 413) error.code = "request_too_large";
  if (status >= 500) error.type = "server_error";
  if (status == 503) error.code = "not_ready";
  return error;
}

ApiError ApiError::OfSubmit(const absl::Status& status, EngineState state) {
  std::string message(ToStd(status.message()));
  switch (status.code()) {
    case absl::StatusCode::kInvalidArgument:
      return Invalid({}, std::move(message));
    case absl::StatusCode::kResourceExhausted:
      return {429, "rate_limit_error", {}, "queue_full", std::move(message)};
    case absl::StatusCode::kUnavailable:
      return {503,
              "server_error",
              {},
              state == EngineState::kDraining ? "shutting_down" : "not_ready",
              std::move(message)};
    default:
      return {500, "server_error", {}, "engine_error", std::move(message)};
  }
}

ApiError ApiError::OfEngine(const absl::Status& status, EngineState state) {
  if (status.code() == absl::StatusCode::kUnimplemented) {
    return Invalid({}, absl::StrCat("The workers of this server cannot do what the request asks: ",
                                    status.message(), "."));
  }
  if (status.code() != absl::StatusCode::kUnavailable) {
    return {500,
            "server_error",
            {},
            "engine_error",
            "The engine stopped while generating this response."};
  }
  if (state == EngineState::kDraining) {
    return {503, "server_error", {}, "shutting_down", "The server is shutting down."};
  }
  return {503,
          "server_error",
          {},
          "engine_restarting",
          absl::StrCat("The engine stopped while generating this response and is starting again: ",
                       status.message())};
}

std::string ApiError::Body() const {
  std::string body = "{\"error\":{\"message\":";
  std::string text;  // what it quotes may come from a path or header, which can hold any bytes
  AppendUtf8Repaired(message, &text);
  AppendJsonString(text, &body);
  body.append(",\"type\":");
  AppendJsonString(type, &body);
  body.append(",\"param\":");
  AppendStringOrNull(param, &body);
  body.append(",\"code\":");
  AppendStringOrNull(code, &body);
  body.append("}}");
  return body;
}

HttpResponse ApiError::Response() const {
  HttpResponse response;
  response.status = status;
  response.headers.emplace_back("Content-Type", "application/json");
  if (status == 401) response.headers.emplace_back("WWW-Authenticate", "Bearer");
  if (status == 429) response.headers.emplace_back("Retry-After", "1");
  if (status == 503) response.headers.emplace_back("Retry-After", "5");
  response.body = Body();
  return response;
}

std::string Quoted(std::string_view value) {
  size_t end = std::min(value.size(), kMaxQuotedBytes);
  end -= IncompleteUtf8Tail(value.substr(0, end));
  return absl::StrCat("`", ToAbsl(value.substr(0, end)), end < value.size() ? "...`" : "`");
}

}  // namespace twinspark::gateway
