// The `messages` and `tools` arrays of a request to ChatMessages (chat.md 2.10 and 4.4 of the
// specification), with an error that names the exact place.
#pragma once

#include <string>
#include <vector>

#include "gateway/openai/field_reader.h"
#include "gateway/text/chat_message.h"

namespace twinspark::gateway {

// `messages`: roles mapped, empty system messages removed. At least one must be given.
std::vector<ChatMessage> ReadMessages(FieldReader& reader);

// One declared tool: its qualified name and the schema to render.
struct DeclaredTool {
  std::string name;
  Json schema;
};
std::vector<DeclaredTool> ReadTools(FieldReader& reader);

}  // namespace twinspark::gateway
