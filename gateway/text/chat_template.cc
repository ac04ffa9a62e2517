// Three steps, as in the specification: merge messages into turns (2.2), decide what is dropped,
// and write turn after turn (2.3). Segments are collected by PromptBuilder, which joins plain text,
// so that template and message text meet inside one piece of the tokenizer.
#include "gateway/text/chat_template.h"

#include <algorithm>

#include "absl/container/flat_hash_map.h"
#include "absl/status/status.h"
#include "absl/strings/str_cat.h"

#include "common/status_macros.h"

namespace twinspark::gateway {
namespace {

// The tools text of 2.4 around the schemas. "\x01" stands for the DSML token, "\x02" for <think>,
// "\x03" for </think>.
constexpr std::string_view kToolsHead =
    "## Tools\n\n"
    "You have access to a set of tools to help answer the user's question. You can invoke tools by "
    "writing a \"<\x01 calls>\" block like the following:\n\n"
    "<\x01 calls>\n"
    "<\x01 invoke name=\"$TOOL_NAME\">\n"
    "<\x01 parameter name=\"$PARAMETER_NAME\" string=\"true|false\">$PARAMETER_VALUE</\x01 "
    "parameter>\n"
    "...\n"
    "</\x01 invoke>\n"
    "<\x01 invoke name=\"$TOOL_NAME2\">\n"
    "...\n"
    "</\x01 invoke>\n"
    "</\x01 calls>\n\n"
    "String parameters should be specified as is and set `string=\"true\"`. For all other types "
    "(numbers, booleans, arrays, objects), pass the value in JSON format and set "
    "`string=\"false\"`.\n\n"
    "If thinking_mode is enabled (triggered by \x02), you MUST output your complete reasoning "
    "inside \x02...\x03 BEFORE any tool calls or final response.\n\n"
    "Otherwise, output directly after \x03 with tool calls or final response.\n\n"
    "### Available Tool Schemas\n\n";
constexpr std::string_view kToolsTail =
    "\n\nYou MUST strictly follow the above defined tool name and parameter schemas to invoke tool "
    "calls.\n";
constexpr std::string_view kResponseFormat =
    "\n\n## Response Format:\n\nYou MUST strictly adhere to the following schema to reply:\n";

// One block of a user turn: text, an image, or a tool result.
struct Block {
  bool is_result = false;
  std::string tool_call_id;        // of a result
  std::vector<ContentPart> parts;  // exactly one unless a result
};

// A message after merging. Everything but user turns is a view of one message.
struct Turn {
  const ChatMessage* message = nullptr;  // the first one of a user turn
  bool is_user = false;
  std::string task;
  std::vector<Block> blocks;  // of a user turn

  Role role() const { return is_user ? Role::kUser : message->role; }
};

std::vector<Turn> MergeTurns(std::span<const ChatMessage> messages) {
  std::vector<Turn> turns;
  for (const ChatMessage& message : messages) {
    const bool is_result = message.role == Role::kTool;
    if (message.role != Role::kUser && !is_result) {
      turns.push_back({&message, false, {}, {}});
      continue;
    }
    const bool joins =
        !turns.empty() && turns.back().is_user && (is_result || turns.back().task.empty());
    if (!joins) turns.push_back({&message, true, is_result ? std::string() : message.task, {}});
    std::vector<Block>& blocks = turns.back().blocks;
    if (is_result) {
      blocks.push_back({true, message.tool_call_id, message.content});
    } else {
      for (const ContentPart& part : message.content)
        blocks.push_back({false, {}, {part}});
    }
  }
  return turns;
}

// Puts the results of each user turn into the order of the calls they answer (unknown ids first).
void SortResults(std::vector<Turn>* turns) {
  absl::flat_hash_map<std::string, size_t> position;
  for (Turn& turn : *turns) {
    if (!turn.is_user) {
      if (turn.role() != Role::kAssistant || turn.message->tool_calls.empty()) continue;
      position.clear();
      for (size_t i = 0; i < turn.message->tool_calls.size(); ++i) {
        position[turn.message->tool_calls[i].id] = i;
      }
      continue;
    }
    std::vector<Block> results;
    for (const Block& block : turn.blocks) {
      if (block.is_result) results.push_back(block);
    }
    const auto rank = [&](const Block& block) {
      const auto it = position.find(block.tool_call_id);
      return it == position.end() ? size_t{0} : it->second;
    };
    std::stable_sort(results.begin(), results.end(),
                     [&](const Block& a, const Block& b) { return rank(a) < rank(b); });
    auto next = results.begin();
    for (Block& block : turn.blocks) {
      if (block.is_result) block = std::move(*next++);
    }
  }
}

class PromptBuilder {
 public:
  explicit PromptBuilder(const ControlTokens& tokens) : tokens_(tokens) {}

  void Control(int32_t id) { segments_.push_back({id, {}}); }
  void Plain(std::string_view text) {
    if (text.empty()) return;
    if (segments_.empty() || segments_.back().control >= 0) segments_.emplace_back();
    segments_.back().text.append(text);
  }
  // Our own text, in which the bytes 1 to 3 stand for markers.
  void Template(std::string_view text) {
    size_t start = 0;
    for (size_t i = 0; i < text.size(); ++i) {
      if (text[i] < '\x01' || text[i] > '\x03') continue;
      Plain(text.substr(start, i - start));
      start = i + 1;
      Control(text[i] == '\x01'   ? tokens_.dsml
              : text[i] == '\x02' ? tokens_.think_open
                                  : tokens_.think_close);
    }
    Plain(text.substr(start));
  }
  // What the assistant said: grounding marks are the tokens they came from.
  void AssistantText(std::string_view text) {
    size_t start = 0;
    for (size_t i = 0; i < text.size(); ++i) {
      if (text[i] != '<') continue;
      for (const auto& [spelling, id] : tokens_.grounding) {
        if (text.substr(i, spelling.size()) != spelling) continue;
        Plain(text.substr(start, i - start));
        Control(id);
        start = i + spelling.size();
        i = start - 1;
        break;
      }
    }
    Plain(text.substr(start));
  }
  void Parts(std::span<const ContentPart> parts, bool is_assistant = false) {
    for (size_t i = 0; i < parts.size(); ++i) {
      if (i > 0) Plain("\n\n");
      if (parts[i].is_image) {
        Control(tokens_.image);
      } else if (is_assistant) {
        AssistantText(parts[i].text);
      } else {
        Plain(parts[i].text);
      }
    }
  }
  std::vector<PromptSegment> Take() { return std::move(segments_); }

 private:
  const ControlTokens& tokens_;
  std::vector<PromptSegment> segments_;
};

// The members to write as parameters: `arguments` parsed, at most twice while it is a string.
Json::Object CallParameters(const Json& arguments) {
  Json value = arguments;
  for (int i = 0; i < 2 && value.is_string(); ++i) {
    absl::StatusOr<Json> parsed = Json::Parse(value.as_string());
    if (!parsed.ok()) break;
    value = *std::move(parsed);
  }
  if (value.is_object()) return value.as_object();
  return {{"arguments", arguments}};
}

void WriteCalls(const std::vector<ToolCall>& calls, PromptBuilder* out) {
  out->Template("<\x01 calls>\n");
  for (const ToolCall& call : calls) {
    out->Template("<\x01 invoke name=\"");
    out->Plain(call.name);
    out->Plain("\">\n");
    bool is_first = true;
    for (const auto& [key, value] : CallParameters(call.arguments)) {
      if (!is_first) out->Plain("\n");
      is_first = false;
      out->Template("<\x01 parameter name=\"");
      out->Plain(key);
      out->Plain(value.is_string() ? "\" string=\"true\">" : "\" string=\"false\">");
      out->Plain(value.is_string() ? value.as_string() : value.Dump());
      out->Template("</\x01 parameter>");
    }
    out->Template("\n</\x01 invoke>\n");
  }
  out->Template("</\x01 calls>");
}

void WriteSystem(const ChatMessage& message, PromptBuilder* out) {
  out->Parts(message.content);
  if (!message.tools.empty()) {
    out->Plain("\n\n");
    out->Template(kToolsHead);
    for (size_t i = 0; i < message.tools.size(); ++i) {
      if (i > 0) out->Plain("\n");
      out->Plain(message.tools[i].Dump());
    }
    out->Plain(kToolsTail);
  }
  if (message.response_format.has_value()) {
    out->Plain(kResponseFormat);
    out->Plain(message.response_format->Dump());
  }
}

void WriteUser(const Turn& turn, const ControlTokens& tokens, PromptBuilder* out) {
  out->Control(tokens.user);
  for (size_t i = 0; i < turn.blocks.size(); ++i) {
    if (i > 0) out->Plain("\n\n");
    if (turn.blocks[i].is_result) out->Plain("<tool_result>");
    out->Parts(turn.blocks[i].parts);
    if (turn.blocks[i].is_result) out->Plain("</tool_result>");
  }
}

// Writes turns; knows the whole conversation because headers and reasoning depend on neighbours.
class TurnWriter {
 public:
  TurnWriter(std::span<const Turn> turns,
             bool has_tools,
             const ChatOptions& options,
             const ControlTokens& tokens,
             PromptBuilder* out)
      : turns_(turns),
        options_(options),
        tokens_(tokens),
        drop_(options.drop_thinking && !has_tools),
        out_(out) {
    for (size_t i = 0; i < turns.size(); ++i) {
      if (turns[i].is_user || (turns[i].role() == Role::kSystem && i > 0)) {
        last_user_ = static_cast<ptrdiff_t>(i);
      }
    }
  }

  absl::Status Write(size_t i) {
    const Turn& turn = turns_[i];
    const bool is_last = i + 1 == turns_.size();
    if (i == 0) WriteFirst(turn);
    switch (turn.role()) {
      case Role::kSystem:
        if (i > 0) out_->Control(tokens_.system);
        WriteSystem(*turn.message, out_);
        break;
      case Role::kLatestReminder:
        out_->Control(tokens_.latest_reminder);
        out_->Parts(turn.message->content);
        break;
      case Role::kAssistant:
        WriteAssistant(i, is_last && options_.continue_final);
        break;
      default:
        WriteUser(turn, tokens_, out_);
    }
    if (is_last && options_.continue_final) return absl::OkStatus();
    if (is_last && options_.add_generation_prompt == false) return absl::OkStatus();
    bool has_header = false;
    if (is_last || turns_[i + 1].role() == Role::kAssistant ||
        turns_[i + 1].role() == Role::kLatestReminder) {
      ASSIGN_OR_RETURN(has_header, WriteHeader(i));
    }
    if (is_last && !has_header && options_.add_generation_prompt == true) {
      WriteAssistantMark(options_.thinking);
    }
    return absl::OkStatus();
  }

 private:
  void WriteFirst(const Turn& turn) {
    if (options_.thinking || turn.role() == Role::kSystem) out_->Control(tokens_.system);
    if (!options_.thinking) return;
    out_->Plain(absl::StrCat("Reasoning Effort: ", options_.effort,
                             " (range 1-100, the higher the value, the more thorough the "
                             "reasoning)\n\n"));
  }

  void WriteAssistant(size_t i, bool is_continued) {
    const ChatMessage& message = *turns_[i].message;
    const bool has_content = std::any_of(message.content.begin(), message.content.end(),
                                         [](const ContentPart& p) { return !p.text.empty(); });
    const bool after_task = i > 0 && !turns_[i - 1].task.empty();
    const bool keeps = !drop_ || static_cast<ptrdiff_t>(i) > last_user_;
    if (options_.thinking && !after_task && keeps) {
      out_->AssistantText(message.reasoning);
      const bool goes_on_thinking =
          is_continued && !message.reasoning.empty() && !has_content && message.tool_calls.empty();
      if (!goes_on_thinking) out_->Control(tokens_.think_close);
    }
    out_->Parts(message.content, /*is_assistant=*/true);
    if (!message.tool_calls.empty()) {
      out_->Plain("\n\n");
      WriteCalls(message.tool_calls, out_);
    }
    if (!message.wo_eos && !is_continued) out_->Control(tokens_.eos);
  }

  // The header after turn i, if there is one for such a turn.
  absl::StatusOr<bool> WriteHeader(size_t i) {
    const Turn& turn = turns_[i];
    if (!turn.task.empty()) {
      const std::optional<int32_t> task = tokens_.TaskToken(turn.task);
      if (!task.has_value()) {
        return absl::InvalidArgumentError(absl::StrCat("unknown task ", turn.task));
      }
      if (turn.task == "action") WriteAssistantMark(options_.thinking);
      out_->Control(*task);
      return true;
    }
    if (!turn.is_user && !(turn.role() == Role::kSystem && i > 0)) return false;
    WriteAssistantMark(options_.thinking && (!drop_ || static_cast<ptrdiff_t>(i) >= last_user_));
    return true;
  }

  void WriteAssistantMark(bool thinks) {
    out_->Control(tokens_.assistant);
    out_->Control(thinks ? tokens_.think_open : tokens_.think_close);
  }

  std::span<const Turn> turns_;
  const ChatOptions& options_;
  const ControlTokens& tokens_;
  bool drop_;
  ptrdiff_t last_user_ = -1;
  PromptBuilder* out_;
};

}  // namespace

absl::StatusOr<std::vector<PromptSegment>> EncodeChat(std::span<const ChatMessage> messages,
                                                      const ChatOptions& options,
                                                      const ControlTokens& tokens) {
  if (options.continue_final && (messages.empty() || messages.back().role != Role::kAssistant)) {
    return absl::InvalidArgumentError("the message to continue must be an assistant message");
  }
  if (options.continue_final && !messages.back().tool_calls.empty()) {
    return absl::InvalidArgumentError("a message with tool calls cannot be continued");
  }
  std::vector<Turn> turns = MergeTurns(messages);
  SortResults(&turns);
  const bool has_tools = std::any_of(messages.begin(), messages.end(),
                                     [](const ChatMessage& m) { return !m.tools.empty(); });
  PromptBuilder out(tokens);
  if (options.add_bos) out.Control(tokens.bos);
  TurnWriter writer(turns, has_tools, options, tokens, &out);
  for (size_t i = 0; i < turns.size(); ++i) {
    RETURN_IF_ERROR(writer.Write(i));
  }
  if (options.force_calls) out.Template("\n\n<\x01 calls>\n");
  return out.Take();
}

bool SegmentIds(std::span<const PromptSegment> segments,
                const Tokenizer& tokenizer,
                std::vector<int32_t>* ids,
                const EncodeBudget& budget) {
  for (const PromptSegment& segment : segments) {
    if (segment.control >= 0) {
      ids->push_back(segment.control);
    } else if (!tokenizer.EncodePlain(segment.text, ids, budget)) {
      return false;
    }
  }
  return budget.Allows(ids->size());
}

std::string SegmentText(std::span<const PromptSegment> segments, const Tokenizer& tokenizer) {
  std::string text;
  for (const PromptSegment& segment : segments) {
    text.append(segment.control >= 0 ? tokenizer.TokenBytes(segment.control)
                                     : std::string_view(segment.text));
  }
  return text;
}

absl::StatusOr<std::vector<int32_t>> ExpandImages(std::span<const int32_t> ids,
                                                  int32_t image_token,
                                                  std::span<const std::pair<int, int>> grids) {
  std::vector<int32_t> expanded;
  size_t num_images = 0;
  for (const int32_t id : ids) {
    if (id != image_token) {
      expanded.push_back(id);
      continue;
    }
    if (num_images == grids.size()) {
      return absl::InvalidArgumentError(
          absl::StrCat("more images in the prompt than the ", grids.size(), " given"));
    }
    const auto [w, h] = grids[num_images++];
    expanded.insert(expanded.end(), static_cast<size_t>(h * (w + 1) + 2), image_token);
  }
  if (num_images != grids.size()) {
    return absl::InvalidArgumentError(
        absl::StrCat(num_images, " images in the prompt, ", grids.size(), " given"));
  }
  return expanded;
}

}  // namespace twinspark::gateway
