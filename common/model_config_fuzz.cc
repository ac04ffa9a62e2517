// ParseModelConfig on any bytes: an error that names its origin, or a configuration whose derived
// topology is consistent.
#include "common/model_config.h"

#include "common/check.h"
#include "common/file_util.h"
#include "common/testing/fuzz_driver.h"

namespace {

std::vector<std::string> Seeds() {
  std::vector<std::string> seeds = {"{}", R"({"model_type":"deepseek_v41","text_config":{}})"};
  for (const char* path :
       {"/deploy/demo_model/config.json", "/tests/golden/data/released/config.json"}) {
    const auto text = twinspark::ReadFile(std::string(TWINSPARK_SOURCE_DIR) + path, 1 << 20);
    CHECK(text.ok()) << text.status();
    seeds.push_back(*text);
  }
  return seeds;
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const std::string text(reinterpret_cast<const char*>(data), size);
  const auto config = twinspark::ParseModelConfig(text, "fuzz/config.json");
  if (!config.ok()) {
    CHECK(config.status().message().find("fuzz/config.json") != absl::string_view::npos)
        << config.status();
    return 0;
  }
  CHECK_EQ(config->layers.size(), static_cast<size_t>(config->num_layers));
  for (int layer = 0; layer < config->num_layers; ++layer) {
    const twinspark::LayerTopology& topology = config->layers[static_cast<size_t>(layer)];
    if (topology.ratio == 0) continue;
    CHECK(topology.kv_source >= 0 && topology.kv_source <= layer) << layer;
    CHECK(topology.index_source >= topology.kv_source && topology.index_source <= layer) << layer;
    CHECK_EQ(config->layers[static_cast<size_t>(topology.kv_source)].ratio, topology.ratio);
  }
  (void)twinspark::CheckTensorParallel(*config, 2);
  return 0;
}

TWINSPARK_FUZZ_MAIN(Seeds())
