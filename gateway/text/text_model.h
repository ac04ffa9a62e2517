// The text side of one model directory: its tokenizer and control tokens, loaded together. Made by
// the composition root; every request reads it.
#pragma once

#include <memory>
#include <string>
#include <utility>

#include "absl/status/statusor.h"

#include "common/status_macros.h"
#include "gateway/text/control_tokens.h"
#include "gateway/text/tokenizer.h"

namespace twinspark::gateway {

// Immutable; thread-safe.
struct TextModel {
  std::unique_ptr<const Tokenizer> tokenizer;
  ControlTokens tokens;

  // Reads model_dir/tokenizer.json. Errors name the file and what is wrong with it (exit code 65).
  static absl::StatusOr<TextModel> Load(const std::string& model_dir) {
    TextModel model;
    ASSIGN_OR_RETURN(model.tokenizer, Tokenizer::Load(model_dir + "/tokenizer.json"));
    ASSIGN_OR_RETURN(model.tokens, ControlTokens::Find(*model.tokenizer));
    return model;
  }
};

}  // namespace twinspark::gateway
