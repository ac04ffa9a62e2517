#include "gateway/text/chat_message.h"

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"

#include "common/status_macros.h"
#include "common/string_view.h"

namespace twinspark::gateway {
namespace {

std::string StringField(const Json& object, std::string_view key) {
  const Json* value = object.Find(key);
  return value != nullptr && value->is_string() ? value->as_string() : std::string();
}

struct Namespace {
  std::string name;
  std::string description;
};

// `namespace` of a tool or call: a string, or {name, description}.
absl::StatusOr<Namespace> ReadNamespace(const Json* value) {
  Namespace result;
  if (value == nullptr || value->is_null()) return result;
  if (value->is_string()) {
    result.name = value->as_string();
  } else if (value->is_object()) {
    result.name = StringField(*value, "name");
    result.description = StringField(*value, "description");
  } else {
    return absl::InvalidArgumentError("namespace must be a string or an object");
  }
  if (result.name.find("::") != std::string::npos) {
    return absl::InvalidArgumentError(absl::StrCat("namespace ", result.name, " contains ::"));
  }
  return result;
}

// The namespace beside `function`, else the one inside it.
absl::StatusOr<Namespace> NamespaceOf(const Json& entry) {
  ASSIGN_OR_RETURN(Namespace beside, ReadNamespace(entry.Find("namespace")));
  const Json* function = entry.Find("function");
  if (!beside.name.empty() || function == nullptr) return beside;
  return ReadNamespace(function->Find("namespace"));
}

void AppendContent(const Json* content, std::vector<ContentPart>* parts) {
  if (content == nullptr || content->is_null()) {
    parts->push_back({});
  } else if (content->is_string()) {
    parts->push_back({false, content->as_string()});
  } else if (content->is_array()) {
    for (const Json& part : content->as_array()) {
      const std::string type = StringField(part, "type");
      if (type == "text") {
        parts->push_back({false, StringField(part, "text")});
      } else if (type == "image_url" || type == "image") {
        parts->push_back({true, {}});
      } else {
        parts->push_back({false, absl::StrCat("[Unsupported ", type, "]")});
      }
    }
  }
}

absl::StatusOr<Role> ReadRole(std::string_view role) {
  if (role == "system") return Role::kSystem;
  if (role == "user") return Role::kUser;
  if (role == "assistant") return Role::kAssistant;
  if (role == "tool") return Role::kTool;
  if (role == "latest_reminder") return Role::kLatestReminder;
  return absl::InvalidArgumentError(absl::StrCat("unknown role ", ToAbsl(role.substr(0, 64))));
}

}  // namespace

absl::StatusOr<std::string> QualifiedName(const Json& entry) {
  const Json* function = entry.Find("function");
  const std::string name = StringField(function == nullptr ? entry : *function, "name");
  ASSIGN_OR_RETURN(const Namespace space, NamespaceOf(entry));
  const size_t mark = name.find("::");
  if (mark == std::string::npos) {
    return space.name.empty() ? name : absl::StrCat(space.name, "::", name);
  }
  if (name.find("::", mark + 2) != std::string::npos) {
    return absl::InvalidArgumentError(absl::StrCat("name ", name, " contains :: twice"));
  }
  if (!space.name.empty() && name.substr(0, mark) != space.name) {
    return absl::InvalidArgumentError(
        absl::StrCat("name ", name, " does not fit namespace ", space.name));
  }
  return name;
}

absl::StatusOr<Json> ToolSchema(const Json& tool) {
  const Json* function = tool.Find("function");
  if (function == nullptr || !function->is_object()) {
    return absl::InvalidArgumentError("a tool has no function object");
  }
  ASSIGN_OR_RETURN(std::string name, QualifiedName(tool));
  ASSIGN_OR_RETURN(const Namespace space, NamespaceOf(tool));
  Json::Object members;
  for (const Json::Member& member : function->as_object()) {
    if (member.first != "namespace") members.push_back(member);
  }
  Json schema = Json::FromObject(std::move(members));
  schema.Set("name", Json::String(std::move(name)));
  if (!space.description.empty()) {
    const std::string own = StringField(schema, "description");
    schema.Set("description",
               Json::String(own.empty() ? space.description : space.description + "\n" + own));
  }
  return schema;
}

absl::StatusOr<ChatMessage> ChatMessageFromJson(const Json& message) {
  if (!message.is_object()) return absl::InvalidArgumentError("a message must be an object");
  ChatMessage result;
  ASSIGN_OR_RETURN(result.role, ReadRole(StringField(message, "role")));
  AppendContent(message.Find("content"), &result.content);
  result.reasoning = StringField(message, "reasoning_content");
  result.tool_call_id = StringField(message, "tool_call_id");
  result.task = StringField(message, "task");
  const Json* wo_eos = message.Find("wo_eos");
  result.wo_eos = wo_eos != nullptr && wo_eos->is_bool() && wo_eos->as_bool();
  const Json* format = message.Find("response_format");
  if (format != nullptr && !format->is_null()) result.response_format = *format;
  if (const Json* tools = message.Find("tools"); tools != nullptr && tools->is_array()) {
    for (const Json& tool : tools->as_array()) {
      ASSIGN_OR_RETURN(Json schema, ToolSchema(tool));
      result.tools.push_back(std::move(schema));
    }
  }
  if (const Json* calls = message.Find("tool_calls"); calls != nullptr && calls->is_array()) {
    for (const Json& call : calls->as_array()) {
      ToolCall entry;
      entry.id = StringField(call, "id");
      ASSIGN_OR_RETURN(entry.name, QualifiedName(call));
      const Json* function = call.Find("function");
      const Json* arguments = (function == nullptr ? call : *function).Find("arguments");
      if (arguments != nullptr) entry.arguments = *arguments;
      result.tool_calls.push_back(std::move(entry));
    }
  }
  return result;
}

}  // namespace twinspark::gateway
