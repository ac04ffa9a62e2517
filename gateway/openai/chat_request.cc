#include "gateway/openai/chat_request.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"

#include "common/limits.h"
#include "gateway/openai/chat_messages.h"

namespace twinspark::gateway {
namespace {

struct Effort {
  int value = 75;
  bool is_off = false;  // "none"
};

// chat.md 2.10: words and integers; anything else fails.
std::optional<Effort> ReadEffort(FieldReader& reader, std::string_view key) {
  const Json* value = reader.Get(key);
  if (value == nullptr) return std::nullopt;
  if (value->is_integer()) {
    const std::optional<int64_t> number = value->ToInt64();
    if (number.has_value() && *number >= 1 && *number <= 100) {
      return Effort{static_cast<int>(*number), false};
    }
    reader.Fail(key, absl::StrCat("`reasoning_effort` must be between 1 and 100, not ",
                                  Quoted(value->Dump()), "."));
    return std::nullopt;
  }
  const std::string word = value->is_string() ? value->as_string() : std::string();
  if (word == "none") return Effort{75, true};
  if (word == "minimal" || word == "low") return Effort{50, false};
  if (word == "medium" || word == "high" || word == "xhigh") return Effort{75, false};
  if (word == "max" || word == "ultra") return Effort{100, false};
  reader.Fail(key,
              "`reasoning_effort` must be none, minimal, low, medium, high, xhigh, max, ultra "
              "or an integer from 1 to 100.");
  return std::nullopt;
}

// The thinking switch and the effort, from wherever the request has them.
void ReadThinking(FieldReader& reader, ChatOptions* options) {
  std::optional<bool> kwargs_switch;
  std::optional<Effort> effort;
  if (const Json* kwargs = reader.Object("chat_template_kwargs")) {
    std::optional<ApiError> error;
    FieldReader inner(*kwargs, reader.Path("chat_template_kwargs."), &error);
    const std::optional<bool> thinking = inner.Bool("thinking");
    const std::optional<bool> enable = inner.Bool("enable_thinking");
    if (thinking.has_value() || enable.has_value()) {
      kwargs_switch = thinking.value_or(false) || enable.value_or(false);
    }
    options->drop_thinking = inner.Bool("drop_thinking").value_or(true);
    effort = ReadEffort(inner, "reasoning_effort");
    if (error.has_value()) reader.FailAt(error->param, error->message);
  }
  const std::optional<Effort> own_effort = ReadEffort(reader, "reasoning_effort");
  if (!effort.has_value()) effort = own_effort;

  std::optional<bool> type_switch;
  if (const Json* thinking = reader.Object("thinking")) {
    const Json* type = thinking->Find("type");
    const std::string word = type != nullptr && type->is_string() ? type->as_string() : "";
    if (word == "enabled" || word == "adaptive") {
      type_switch = true;
    } else if (word == "disabled") {
      type_switch = false;
    } else {
      reader.Fail("thinking.type", "`thinking.type` must be `enabled`, `disabled` or `adaptive`.");
    }
  }
  const std::optional<bool> top_switch = reader.Bool("enable_thinking");
  options->effort = effort.has_value() ? effort->value : 75;
  if (kwargs_switch.has_value()) {
    options->thinking = *kwargs_switch;
  } else if (type_switch.has_value()) {
    options->thinking = *type_switch;
  } else if (top_switch.has_value()) {
    options->thinking = *top_switch;
  } else {
    options->thinking = !(effort.has_value() && effort->is_off);
  }
}

// Name in {"type":"function","function":{"name":N}} or {"type":"function","name":N}.
std::string NamedChoice(const Json& choice) {
  const Json* function = choice.Find("function");
  const Json* name = (function != nullptr ? *function : choice).Find("name");
  return name != nullptr && name->is_string() ? name->as_string() : std::string();
}

// True when the tools are to be rendered. Enforcing a call is not built.
bool ReadToolChoice(FieldReader& reader, const std::vector<DeclaredTool>& tools) {
  const Json* choice = reader.Get("tool_choice");
  if (choice == nullptr) return true;
  const std::string word = choice->is_string() ? choice->as_string() : std::string();
  if (word == "none") return false;
  if (tools.empty()) {
    reader.Fail("tool_choice", "`tool_choice` is only allowed when `tools` are given.");
  } else if (word == "auto") {
    return true;
  } else if (choice->is_object()) {
    const std::string name = NamedChoice(*choice);
    const bool is_known = std::any_of(tools.begin(), tools.end(),
                                      [&](const DeclaredTool& tool) { return tool.name == name; });
    reader.Fail("tool_choice",
                is_known || name.empty()
                    ? "`tool_choice` with a function or a list of tools is not supported by this "
                      "server; use `auto` or `none`."
                    : absl::StrCat("`tool_choice` names the function ", Quoted(name),
                                   ", which is not in `tools`."));
  } else if (word == "required") {
    reader.Fail("tool_choice",
                "`tool_choice` `required` is not supported by this server; use `auto` or `none`.");
  } else {
    reader.Fail("tool_choice", "`tool_choice` must be `auto`, `none`, `required` or an object.");
  }
  return true;
}

std::optional<Json> ReadResponseFormat(FieldReader& reader) {
  const Json* format = reader.Object("response_format");
  if (format == nullptr) return std::nullopt;
  const Json* type = format->Find("type");
  const std::string word = type != nullptr && type->is_string() ? type->as_string() : "";
  if (word == "text") return std::nullopt;
  if (word == "json_object") {
    return Json::FromObject({{"type", Json::String("json_object")}});
  }
  if (word == "json_schema") {
    const Json* outer = format->Find("json_schema");
    const Json* schema = outer == nullptr ? nullptr : outer->Find("schema");
    const Json* name = outer == nullptr ? nullptr : outer->Find("name");
    if (schema != nullptr && schema->is_object() && name != nullptr && name->is_string()) {
      return *schema;
    }
    reader.Fail("response_format.json_schema",
                "`response_format.json_schema` needs a `name` and a `schema`.");
    return std::nullopt;
  }
  if (word == "structural_tag") {
    reader.Fail("response_format.type",
                "`response_format` `structural_tag` is not supported by this server.");
    return std::nullopt;
  }
  reader.Fail("response_format.type",
              absl::StrCat("Unknown response format ", Quoted(word),
                           "; `text`, `json_object` and `json_schema` are known."));
  return std::nullopt;
}

void ReadStructuredOutputs(FieldReader& reader, bool has_format) {
  for (const std::string_view key :
       {"guided_json", "guided_regex", "guided_choice", "guided_grammar"}) {
    if (reader.Get(key) != nullptr) {
      reader.Fail(key, absl::StrCat("`", std::string(key), "` is not supported by this server."));
    }
  }
  const Json* outputs = reader.Object("structured_outputs");
  if (outputs == nullptr) return;
  std::vector<std::string> kinds;
  for (const std::string_view key :
       {"json", "regex", "choice", "grammar", "json_object", "structural_tag"}) {
    const Json* value = outputs->Find(key);
    if (value != nullptr && !value->is_null()) kinds.emplace_back(key);
  }
  if (kinds.empty()) return;
  if (kinds.size() > 1) {
    reader.Fail("structured_outputs", "`structured_outputs` must have exactly one constraint.");
  } else if (has_format) {
    reader.Fail("structured_outputs",
                "`structured_outputs` cannot be combined with `response_format`.");
  } else {
    reader.Fail(
        "structured_outputs." + kinds[0],
        absl::StrCat("`structured_outputs.", kinds[0], "` is not supported by this server."));
  }
}

// Whether the last message is to be continued; also checks the three fields that say so.
void ReadContinuation(FieldReader& reader, ChatRequest* request) {
  const std::optional<bool> header = reader.Bool("add_generation_prompt");
  bool continues = reader.Bool("continue_final_message").value_or(false);
  const bool ends_in_assistant =
      !request->messages.empty() && request->messages.back().role == Role::kAssistant;
  if (continues && header == true) {
    reader.Fail("continue_final_message",
                "`continue_final_message` and `add_generation_prompt` cannot both be true.");
  } else if (continues && !ends_in_assistant) {
    reader.Fail("continue_final_message",
                "`continue_final_message` needs an assistant message at the end.");
  }
  if (const Json::Array* messages = reader.Array("messages"); messages != nullptr) {
    for (size_t i = 0; i < messages->size(); ++i) {
      const Json* prefix = (*messages)[i].Find("prefix");
      if (prefix == nullptr || !prefix->is_bool() || !prefix->as_bool()) continue;
      if (i + 1 != messages->size() || !ends_in_assistant) {
        reader.Fail(absl::StrCat("messages[", i, "].prefix"),
                    "`prefix` may only be set on the last message, an assistant's.");
      }
      continues = true;
    }
  }
  if (continues && ends_in_assistant) {
    const ChatMessage& last = request->messages.back();
    if (!last.tool_calls.empty()) {
      reader.Fail(absl::StrCat("messages[", request->messages.size() - 1, "]"),
                  "A message with tool calls cannot be continued.");
    }
    for (const ContentPart& part : last.content)
      request->continued_content += part.text;
    request->continues_reasoning = !last.reasoning.empty() && request->continued_content.empty();
  }
  request->options.continue_final = continues;
  request->options.add_generation_prompt =
      continues ? std::nullopt : std::optional<bool>(header.value_or(true));
}

// Known fields of the chat API that are refused when they ask for something.
void RefuseUnbuiltChatFields(FieldReader& reader) {
  if (reader.Get("chat_template") != nullptr) {
    reader.Fail("chat_template", "`chat_template` is not supported by this server.");
  }
  if (reader.Get("truncate_prompt_tokens") != nullptr) {
    reader.Fail("truncate_prompt_tokens",
                "`truncate_prompt_tokens` would destroy the chat format.");
  }
  const std::optional<int64_t> budget =
      reader.Integer("thinking_token_budget", -1, limits::kMaxContext);
  if (budget.value_or(-1) != -1) {
    reader.Fail("thinking_token_budget",
                "`thinking_token_budget` is not supported by this server.");
  }
  if (!reader.Bool("parallel_tool_calls").value_or(true)) {
    reader.Fail("parallel_tool_calls",
                "`parallel_tool_calls` false is not supported by this server.");
  }
}

void ReadLogprobs(FieldReader& reader, SamplingParams* sampling) {
  const bool wants = reader.Bool("logprobs").value_or(false);
  const std::optional<int64_t> top = reader.Integer("top_logprobs", 0, limits::kMaxTopLogprobs);
  if (top.value_or(0) > 0 && !wants) {
    reader.Fail("top_logprobs", "`top_logprobs` needs `logprobs` true.");
  }
  if (wants) sampling->num_logprobs = static_cast<int32_t>(top.value_or(0));
}

}  // namespace

void CheckModel(FieldReader& reader, const std::vector<std::string>& model_names) {
  const std::string* model = reader.String("model");
  if (model == nullptr ||
      std::find(model_names.begin(), model_names.end(), *model) != model_names.end()) {
    return;
  }
  reader.FailNotFound("model", absl::StrCat("The model ", Quoted(*model), " does not exist."),
                      "model_not_found");
}

void ReadChatPrompt(FieldReader& reader, ChatRequest* request) {
  request->messages = ReadMessages(reader);
  std::vector<DeclaredTool> tools = ReadTools(reader);
  const bool has_tools = !tools.empty();
  if (!ReadToolChoice(reader, tools)) tools.clear();
  std::optional<Json> format = ReadResponseFormat(reader);
  ReadThinking(reader, &request->options);
  ReadContinuation(reader, request);
  if (reader.failed()) return;
  if (has_tools) request->options.drop_thinking = false;
  request->has_rendered_tools = !tools.empty();
  request->wants_format = format.has_value();
  if (tools.empty() && !format.has_value()) return;
  std::vector<ChatMessage>& messages = request->messages;
  if (messages.empty() || messages.front().role != Role::kSystem) {
    ChatMessage system;
    system.role = Role::kSystem;
    messages.insert(messages.begin(), std::move(system));
  }
  for (DeclaredTool& tool : tools)
    messages.front().tools.push_back(std::move(tool.schema));
  messages.front().response_format = std::move(format);
}

ChatRequest ReadChatRequest(const Json& body,
                            const TextModel& text,
                            const FieldLimits& limits,
                            const std::vector<std::string>& model_names,
                            std::optional<ApiError>* error) {
  ChatRequest request;
  FieldReader reader(body, "", error);
  CheckModel(reader, model_names);
  request.common = ReadCommonFields(reader, text, limits);
  const std::optional<int64_t> max_tokens = reader.Integer("max_tokens", 1, INT32_MAX);
  const std::optional<int64_t> max_completion =
      reader.Integer("max_completion_tokens", 1, INT32_MAX);
  const std::optional<int64_t> chosen = max_completion.has_value() ? max_completion : max_tokens;
  if (chosen.has_value()) request.common.max_tokens = static_cast<int32_t>(*chosen);
  if (chosen.has_value() && request.common.sampling.min_tokens > *chosen) {
    reader.Fail("min_tokens", "`min_tokens` must not be larger than `max_tokens`.");
  }
  ReadLogprobs(reader, &request.common.sampling);
  request.include_reasoning = reader.Bool("include_reasoning").value_or(true);
  request.echo = reader.Bool("echo").value_or(false);
  request.return_prompt_text = reader.Bool("return_prompt_text").value_or(false);
  ReadChatPrompt(reader, &request);
  RefuseUnbuiltChatFields(reader);
  ReadStructuredOutputs(reader, request.wants_format);
  return request;
}

}  // namespace twinspark::gateway
