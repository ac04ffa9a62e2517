// Errors in the shape of the OpenAI API (chat.md 4.5 of the specification).
#pragma once

#include <string>
#include <string_view>

#include "absl/status/status.h"

#include "gateway/engine/engine_status.h"
#include "gateway/http/http_message.h"

namespace twinspark::gateway {

struct ApiError {
  int status = 400;
  std::string type = "invalid_request_error";
  std::string param;  // path of the field; empty: null
  std::string code;   // empty: null
  std::string message;

  static ApiError Invalid(std::string param, std::string message) {
    return {400, "invalid_request_error", std::move(param), {}, std::move(message)};
  }
  // An error that the HTTP layer found (400, 408, 413, 431, 503).
  static ApiError OfHttp(int status, std::string_view message);
  // What GenerateService::Submit refused: 400, 429, 503.
  static ApiError OfSubmit(const absl::Status& status, EngineState state);
  // What ended a running request: 500 or 503.
  static ApiError OfEngine(const absl::Status& status, EngineState state);

  // {"error":{...}}
  std::string Body() const;
  // With Retry-After, WWW-Authenticate where the status asks for them.
  HttpResponse Response() const;
};

// The value as an error message may show it: quoted, at most 64 characters.
std::string Quoted(std::string_view value);

}  // namespace twinspark::gateway
