// Token ids of one choice to what the client sees: reasoning and content (layer P; chat.md 3 of the
// specification), with stop strings matched in content. Markers count only as tokens: a model that
// spells "</think>" in letters does not end its reasoning. Tool markup is not taken apart: it is
// content, by its spelling.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "gateway/text/control_tokens.h"
#include "gateway/text/detokenizer.h"
#include "gateway/text/stop_matcher.h"
#include "gateway/text/tokenizer.h"

namespace twinspark::gateway {

struct OutputEvent {
  enum class Kind : uint8_t { kReasoning, kContent };
  Kind kind = Kind::kContent;
  std::string text;
};

struct OutputOptions {
  // Chat: text is split by the thinking markers. Otherwise (completions) all text is content, and
  // markers are text or dropped like other added tokens.
  bool is_chat = true;
  bool starts_in_reasoning = false;
  bool skip_special_tokens = true;
  std::vector<std::string> stop;
  bool include_stop = false;  // the matched string is part of the content
  int32_t min_tokens = 0;     // stop strings are not looked for before so many tokens
};

// Thread-compatible; one per choice.
class OutputParser {
 public:
  OutputParser(const Tokenizer& tokenizer, const ControlTokens& tokens, OutputOptions options);

  // Takes the next token; appends at most a few events, one kind each, none empty. After done() no
  // more tokens may be pushed.
  void Push(int32_t id, std::vector<OutputEvent>* events);
  // Counts a token that is not shown: a stop id of the request.
  void PushHidden(int32_t id);
  // The output ended (at a stop id, a limit): emits what was held back.
  void Finish(std::vector<OutputEvent>* events);

  // A stop string matched; the sequence can be ended.
  bool done() const { return stopped_by_.has_value(); }
  const std::optional<std::string>& stopped_by() const { return stopped_by_; }
  bool in_reasoning() const { return in_reasoning_; }
  int32_t num_tokens() const { return num_tokens_; }
  int32_t num_reasoning_tokens() const { return num_reasoning_tokens_; }

 private:
  void Emit(std::string_view text, std::vector<OutputEvent>* events);
  void EndText(std::vector<OutputEvent>* events);

  const Tokenizer& tokenizer_;
  const ControlTokens& tokens_;
  const OutputOptions options_;
  Detokenizer detokenizer_;
  StopMatcher stops_;
  bool in_reasoning_;
  std::optional<std::string> stopped_by_;
  int32_t num_tokens_ = 0;
  int32_t num_reasoning_tokens_ = 0;
};

}  // namespace twinspark::gateway
