// What the prompt encoder takes: one message of a conversation in normal form (chat.md 2.1 of the
// specification). gateway/openai fills it from requests; ChatMessageFromJson fills it from the
// reference encoder's own input format (golden data, tools).
#pragma once

#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/statusor.h"

#include "gateway/text/ordered_json.h"

namespace twinspark::gateway {

enum class Role { kSystem, kUser, kAssistant, kTool, kLatestReminder };

struct ContentPart {
  bool is_image = false;
  std::string text;
};

struct ToolCall {
  std::string id;
  std::string name;  // "ns::name" when the call has a namespace
  Json arguments;    // as received: a string that holds JSON, or an object
};

struct ChatMessage {
  Role role = Role::kUser;
  std::vector<ContentPart> content;     // an empty string is one empty part
  std::string reasoning;                // assistant
  std::vector<ToolCall> tool_calls;     // assistant
  bool wo_eos = false;                  // assistant: no end-of-turn token
  std::string tool_call_id;             // tool
  std::string task;                     // user; empty = none
  std::vector<Json> tools;              // system: function objects, as ToolSchema made them
  std::optional<Json> response_format;  // system
};

// The name to render for {"function": {"name", "namespace"?}, "namespace"?}: "ns::name" or "name".
// INVALID_ARGUMENT for a second "::" or two namespaces that differ.
absl::StatusOr<std::string> QualifiedName(const Json& entry);

// The schema to render for one tool entry: its function object with the qualified name and the
// namespace's description in front of its own, key order kept.
absl::StatusOr<Json> ToolSchema(const Json& tool);

// Reads one message of the reference format. Parts of unknown type become "[Unsupported {type}]".
absl::StatusOr<ChatMessage> ChatMessageFromJson(const Json& message);

}  // namespace twinspark::gateway
