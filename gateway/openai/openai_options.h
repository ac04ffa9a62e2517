// What the operator chose for the API; read from the settings by the composition root.
#pragma once

#include <string>
#include <vector>

namespace twinspark::gateway {

struct OpenAiOptions {
  std::vector<std::string> model_names;  // at least one; the first is the primary
  std::vector<std::string> api_keys;     // empty: open to everyone
  // Whose pages browsers may let call us ("https://host:port", or "*"); empty: nobody's.
  std::vector<std::string> cors_origins;
  double default_temperature = 1.0;
  double default_top_p = 0.95;
  std::string model_root;  // `root` of /v1/models
  std::string build_id;
};

}  // namespace twinspark::gateway
