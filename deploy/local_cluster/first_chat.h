// The first questions a fresh cluster is asked: the answer proves the whole path, and the figures
// are the first a newcomer sees.
#pragma once

#include <functional>
#include <string>
#include <string_view>

#include "absl/status/statusor.h"

namespace twinspark {

struct ChatAnswer {
  std::string text;
  double ttft_ms = 0;            // request sent to first text
  double tokens_per_second = 0;  // over the whole request
  int completion_tokens = 0;
  std::string finish_reason;
};

// The id of the model that is served, from /v1/models.
absl::StatusOr<std::string> ServedModel(const std::string& base_url);

// One streamed chat at temperature 0, thinking off. `on_text` gets the text as it comes. The error
// text names what the server said.
absl::StatusOr<ChatAnswer> AskChat(const std::string& base_url,
                                   const std::string& model,
                                   const std::string& question,
                                   int max_tokens,
                                   const std::function<void(std::string_view)>& on_text);

}  // namespace twinspark
