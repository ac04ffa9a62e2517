#include "gateway/openai/chat_messages.h"

#include <algorithm>
#include <utility>

#include "absl/container/flat_hash_set.h"
#include "absl/strings/str_cat.h"

#include "common/limits.h"
#include "common/string_view.h"

namespace twinspark::gateway {
namespace {

constexpr size_t kMaxMessages = 16384;
constexpr size_t kMaxToolNameBytes = 256;

// Reads one message of the array; `reader` is at "messages[i].".
class MessageReader {
 public:
  MessageReader(const Json& message, std::string path, std::optional<ApiError>* error)
      : reader_(message, path + ".", error), path_(std::move(path)) {}

  ChatMessage Read() {
    ReadRole();
    ReadContent();
    if (message_.role == Role::kAssistant) ReadAssistant();
    if (message_.role == Role::kTool) {
      if (const std::string* id = reader_.String("tool_call_id")) message_.tool_call_id = *id;
    }
    if (reader_.Get("task") != nullptr) {
      reader_.Fail("task", "`task` is an internal field and not accepted.");
    }
    return std::move(message_);
  }

 private:
  void ReadRole() {
    const std::string* role = reader_.String("role");
    if (role == nullptr) {
      reader_.Fail("role", "`role` is missing.");
    } else if (*role == "system" || *role == "developer") {
      message_.role = Role::kSystem;
    } else if (*role == "user") {
      message_.role = Role::kUser;
    } else if (*role == "assistant") {
      message_.role = Role::kAssistant;
    } else if (*role == "tool" || *role == "function") {
      message_.role = Role::kTool;
    } else {
      reader_.Fail("role", absl::StrCat("Unknown role ", Quoted(*role), "."));
    }
  }

  void ReadContent() {
    const Json* content = reader_.Get("content");
    if (content == nullptr) {
      message_.content.push_back({});
    } else if (content->is_string()) {
      message_.content.push_back({false, content->as_string()});
      has_content_ = true;
    } else if (content->is_array()) {
      for (size_t i = 0; i < content->as_array().size(); ++i) {
        ReadPart(content->as_array()[i], absl::StrCat(path_, ".content[", i, "]"));
      }
      has_content_ = !content->as_array().empty();
    } else {
      reader_.Fail("content", "`content` must be a string or an array of content parts.");
    }
  }

  void ReadPart(const Json& part, const std::string& path) {
    const Json* type = part.Find("type");
    const std::string name =
        type != nullptr && type->is_string() ? type->as_string() : std::string();
    const bool is_assistant = message_.role == Role::kAssistant;
    if (name == "text" || name == "refusal" || (name == "thinking" && is_assistant)) {
      const Json* text = part.Find(name);
      if (text == nullptr || !text->is_string()) {
        reader_.FailAt(absl::StrCat(path, ".", name),
                       absl::StrCat("`", name, "` must be a string."));
      } else if (name == "thinking") {
        message_.reasoning.append(text->as_string());
      } else {
        message_.content.push_back({false, text->as_string()});
      }
    } else if (name == "image_url") {
      ReadImage(part, path);
    } else {
      reader_.FailAt(path + ".type",
                     absl::StrCat("Unsupported content part type ", Quoted(name), "."));
    }
  }

  void ReadImage(const Json& part, const std::string& path) {
    if (message_.role != Role::kUser && message_.role != Role::kTool) {
      reader_.FailAt(path, "An image may only stand in a user or tool message.");
      return;
    }
    const Json* image = part.Find("image_url");
    const Json* url = image != nullptr && image->is_object() ? image->Find("url") : image;
    if (url == nullptr || !url->is_string()) {
      reader_.FailAt(path + ".image_url.url", "The `url` of the image is missing.");
      return;
    }
    reader_.FailAt(path, "This server does not accept images.");
  }

  void ReadAssistant() {
    const std::string* reasoning = reader_.String("reasoning_content");
    if (reasoning == nullptr) reasoning = reader_.String("reasoning");
    if (reasoning != nullptr) message_.reasoning = *reasoning;
    if (const Json::Array* calls = reader_.Array("tool_calls")) {
      for (size_t i = 0; i < calls->size(); ++i) {
        ReadCall((*calls)[i], absl::StrCat(path_, ".tool_calls[", i, "]"), /*nested=*/true);
      }
    }
    if (const Json* call = reader_.Object("function_call")) {
      ReadCall(*call, path_ + ".function_call", /*nested=*/false);
    }
    const bool is_prefix = reader_.Bool("prefix").value_or(false);
    if (!has_content_ && reasoning == nullptr && message_.tool_calls.empty() && !is_prefix &&
        message_.reasoning.empty()) {
      reader_.FailAt(path_, "An assistant message needs content, reasoning or tool calls.");
    }
  }

  void ReadCall(const Json& call, const std::string& path, bool nested) {
    const Json* function = nested ? call.Find("function") : &call;
    const Json* name = function == nullptr ? nullptr : function->Find("name");
    const std::string where = nested ? path + ".function" : path;
    if (name == nullptr || !name->is_string() || name->as_string().empty()) {
      reader_.FailAt(where + ".name", "The `name` of the called function is missing.");
      return;
    }
    ToolCall entry;
    const Json* id = call.Find("id");
    if (id != nullptr && id->is_string()) entry.id = id->as_string();
    const absl::StatusOr<std::string> qualified = QualifiedName(call);
    if (!qualified.ok()) {
      reader_.FailAt(where + ".name", std::string(ToStd(qualified.status().message())));
      return;
    }
    entry.name = *qualified;
    const Json* arguments = function->Find("arguments");
    if (arguments == nullptr || arguments->is_null()) {
      entry.arguments = Json::String("{}");
    } else if (arguments->is_string() || arguments->is_object()) {
      entry.arguments = *arguments;
    } else {
      reader_.FailAt(where + ".arguments", "`arguments` must be a string or an object.");
    }
    message_.tool_calls.push_back(std::move(entry));
  }

  FieldReader reader_;
  const std::string path_;
  ChatMessage message_;
  bool has_content_ = false;
};

bool IsEmptySystem(const ChatMessage& message) {
  return message.role == Role::kSystem &&
         std::all_of(message.content.begin(), message.content.end(),
                     [](const ContentPart& part) { return part.text.empty(); });
}

bool IsToolName(std::string_view name) {
  return !name.empty() && name.size() <= kMaxToolNameBytes &&
         std::all_of(name.begin(), name.end(), [](char c) {
           return static_cast<uint8_t>(c) >= 0x20 && c != '"' && c != '<' && c != '>' &&
                  c != '\x7f';
         });
}

// The tool with its function object reduced to name, description, parameters, in that order.
Json Reduced(const Json& tool, const Json& function) {
  Json::Object members = {{"name", *function.Find("name")}};
  const Json* description = function.Find("description");
  members.emplace_back("description", description != nullptr && description->is_string()
                                          ? *description
                                          : Json::String(""));
  const Json* parameters = function.Find("parameters");
  members.emplace_back("parameters", parameters != nullptr && parameters->is_object()
                                         ? *parameters
                                         : Json::FromObject({}));
  if (const Json* space = function.Find("namespace")) members.emplace_back("namespace", *space);
  Json result;
  result.Set("function", Json::FromObject(std::move(members)));
  if (const Json* space = tool.Find("namespace")) result.Set("namespace", *space);
  return result;
}

}  // namespace

std::vector<ChatMessage> ReadMessages(FieldReader& reader) {
  std::vector<ChatMessage> messages;
  const Json::Array* array = reader.Array("messages");
  if (array == nullptr) {
    reader.Fail("messages", "`messages` is missing.");
    return messages;
  }
  if (array->empty() || array->size() > kMaxMessages) {
    reader.Fail("messages", array->empty() ? std::string("`messages` must not be empty.")
                                           : absl::StrCat("`messages` may have at most ",
                                                          kMaxMessages, " entries."));
    return messages;
  }
  for (size_t i = 0; i < array->size() && !reader.failed(); ++i) {
    const std::string path = reader.Path(absl::StrCat("messages[", i, "]"));
    std::optional<ApiError> error;
    if (!(*array)[i].is_object()) {
      reader.FailAt(path, "A message must be an object.");
      return messages;
    }
    ChatMessage message = MessageReader((*array)[i], path, &error).Read();
    if (error.has_value()) reader.FailAt(error->param, error->message);
    if (!IsEmptySystem(message)) messages.push_back(std::move(message));
  }
  return messages;
}

std::vector<DeclaredTool> ReadTools(FieldReader& reader) {
  std::vector<DeclaredTool> tools;
  const Json::Array* array = reader.Array("tools");
  if (array == nullptr) return tools;
  if (array->empty()) {
    reader.Fail("tools",
                "`tools` must not be an empty array. Either provide at least one tool or "
                "omit the field entirely.");
    return tools;
  }
  if (array->size() > limits::kMaxTools) {
    reader.Fail("tools", absl::StrCat("At most ", limits::kMaxTools, " tools are allowed."));
    return tools;
  }
  absl::flat_hash_set<std::string> names;
  size_t total_bytes = 0;
  for (size_t i = 0; i < array->size() && !reader.failed(); ++i) {
    const Json& tool = (*array)[i];
    const std::string path = reader.Path(absl::StrCat("tools[", i, "]"));
    const Json* type = tool.Find("type");
    if (type != nullptr && (!type->is_string() || type->as_string() != "function")) {
      reader.FailAt(
          path + ".type",
          absl::StrCat("Unsupported tool type ",
                       Quoted(type->is_string() ? type->as_string() : type->Dump()), "."));
      break;
    }
    const Json* function = tool.Find("function");
    const Json* name = function == nullptr ? nullptr : function->Find("name");
    if (name == nullptr || !name->is_string() || !IsToolName(name->as_string())) {
      reader.FailAt(path + ".function.name",
                    absl::StrCat("The `name` of a tool must have 1 to ", kMaxToolNameBytes,
                                 " characters without quotes, angle brackets and control "
                                 "characters."));
      break;
    }
    const Json* parameters = function->Find("parameters");
    if (parameters != nullptr && !parameters->is_null() && !parameters->is_object()) {
      reader.FailAt(path + ".function.parameters", "`parameters` must be an object.");
      break;
    }
    absl::StatusOr<Json> schema = ToolSchema(Reduced(tool, *function));
    if (!schema.ok()) {
      reader.FailAt(path + ".function.name", std::string(ToStd(schema.status().message())));
      break;
    }
    DeclaredTool entry{schema->Find("name")->as_string(), *std::move(schema)};
    if (!names.insert(entry.name).second) {
      reader.FailAt(path + ".function.name",
                    absl::StrCat("The tool name ", Quoted(entry.name), " is used twice."));
    }
    total_bytes += entry.schema.Dump().size();
    tools.push_back(std::move(entry));
  }
  if (total_bytes > limits::kMaxToolSchemaBytes) {
    reader.Fail("tools", absl::StrCat("The tools are ", total_bytes, " bytes long, at most ",
                                      limits::kMaxToolSchemaBytes, " are allowed."));
  }
  return tools;
}

}  // namespace twinspark::gateway
