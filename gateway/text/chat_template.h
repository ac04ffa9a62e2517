// The prompt encoder (layer E; chat.md 2 of the specification): a conversation to segments, each a
// control token or plain text, and those to ids. Every byte here is fixed by the model's training;
// nothing that a message says can become a control token, except an image part and the grounding
// marks in the assistant's own text.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"

#include "gateway/text/chat_message.h"
#include "gateway/text/control_tokens.h"
#include "gateway/text/tokenizer.h"

namespace twinspark::gateway {

// Either a control token (text empty) or plain text (control < 0). No two plain ones are
// neighbours.
struct PromptSegment {
  int32_t control = -1;
  std::string text;
};

struct ChatOptions {
  bool thinking = true;
  int effort = 75;  // 1..100; the words low, high, max are 50, 75, 100
  bool drop_thinking = true;
  bool add_bos = true;
  // Absent: the reference encoder's own rule. True: always a header at the end. False: none.
  std::optional<bool> add_generation_prompt;
  bool continue_final = false;  // the last message, an assistant's, is to be extended
  bool force_calls = false;     // append the opening of a calls block
};

// INVALID_ARGUMENT: continue_final without an assistant message at the end or with tool calls in
// it, an unknown task word.
absl::StatusOr<std::vector<PromptSegment>> EncodeChat(std::span<const ChatMessage> messages,
                                                      const ChatOptions& options,
                                                      const ControlTokens& tokens);

// Appends the ids; false when `budget` ended it early.
bool SegmentIds(std::span<const PromptSegment> segments,
                const Tokenizer& tokenizer,
                std::vector<int32_t>* ids,
                const EncodeBudget& budget = {});
// The prompt as text, control tokens by their spelling.
std::string SegmentText(std::span<const PromptSegment> segments, const Tokenizer& tokenizer);

// Repeats the i-th image token h * (w + 1) + 2 times for the patch grid {w, h} = grids[i].
// INVALID_ARGUMENT when the number of images differs.
absl::StatusOr<std::vector<int32_t>> ExpandImages(std::span<const int32_t> ids,
                                                  int32_t image_token,
                                                  std::span<const std::pair<int, int>> grids);

}  // namespace twinspark::gateway
