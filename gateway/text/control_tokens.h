// The control tokens of the chat format by name (chat.md 1.3 and 1.6 of the specification), looked
// up by spelling in one tokenizer, and the classes that decide what happens to an added token in
// output.
#pragma once

#include <cstdint>
#include <optional>
#include <string_view>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"

#include "gateway/text/tokenizer.h"

namespace twinspark::gateway {

// What the output side does with a token.
enum class OutputClass : uint8_t {
  kOrdinary,    // text
  kThinkOpen,   // marker: reasoning begins
  kThinkClose,  // marker: reasoning ends
  kDsml,        // marker: inside every tag of the tool markup
  kEnd,         // ends the turn; never text
  kLiteral,     // added token that is shown by its spelling (grounding marks and two more)
  kDropped,     // any other added token: shown only without skip_special_tokens
};

// Immutable; thread-safe.
struct ControlTokens {
  int32_t bos = 0;
  int32_t eos = 0;
  int32_t system = 0;
  int32_t user = 0;
  int32_t assistant = 0;
  int32_t think_open = 0;
  int32_t think_close = 0;
  int32_t dsml = 0;
  int32_t latest_reminder = 0;
  int32_t image = 0;
  // Task word (action, query, authority, domain, title, read_url) and its token.
  std::vector<std::pair<std::string_view, int32_t>> tasks;
  // Spelling and token of the eight grounding marks, which assistant text may contain.
  std::vector<std::pair<std::string_view, int32_t>> grounding;
  // Ids that no request should ever see sampled, ascending (reserved place-holders; chat.md 1.6).
  std::vector<int32_t> reserved;
  std::vector<OutputClass> classes;  // by id

  OutputClass ClassOf(int32_t id) const {
    return id >= 0 && static_cast<size_t>(id) < classes.size() ? classes[static_cast<size_t>(id)]
                                                               : OutputClass::kDropped;
  }
  std::optional<int32_t> TaskToken(std::string_view task) const;

  // INVALID_ARGUMENT names the first spelling that the tokenizer lacks.
  static absl::StatusOr<ControlTokens> Find(const Tokenizer& tokenizer);
};

}  // namespace twinspark::gateway
