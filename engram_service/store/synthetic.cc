// Rows are made in blocks of a few MiB and written in order; nothing is kept.
#include "engram_service/store/synthetic.h"

#include <algorithm>
#include <cerrno>
#include <vector>

#include <fcntl.h>
#include <sys/stat.h>

#include "absl/strings/str_cat.h"

#include "boost/json.hpp"
#include "common/file_util.h"
#include "common/status_macros.h"
#include "engram_service/store/file_io.h"

namespace twinspark::engram {
namespace {

namespace json = boost::json;

constexpr uint64_t kRowsPerWrite = 16384;

std::string TableFileName(size_t layer_idx, size_t num_layers) {
  return absl::StrCat("engram-0000", layer_idx + 1, "-of-0000", num_layers, ".safetensors");
}

absl::Status WriteTable(const std::string& path, const EngramShape& shape, const LayerHash& layer) {
  const uint64_t width = static_cast<uint64_t>(shape.row_weight_bytes());
  const uint64_t groups = static_cast<uint64_t>(shape.row_scale_bytes());
  const std::string name = absl::StrCat("layers.", layer.layer_id, ".engram.embed.");
  const uint64_t weight_bytes = layer.num_rows * width;
  json::object header;
  header[name + "weight"] = {{"dtype", "F8_E4M3"},
                             {"shape", {layer.num_rows, width}},
                             {"data_offsets", {0, weight_bytes}}};
  header[name + "scale"] = {
      {"dtype", "F8_E8M0"},
      {"shape", {layer.num_rows, groups}},
      {"data_offsets", {weight_bytes, weight_bytes + layer.num_rows * groups}}};
  std::string text = json::serialize(header);
  while (text.size() % 8 != 0)
    text.push_back(' ');
  const Fd fd(open(path.c_str(), O_CREAT | O_TRUNC | O_WRONLY | O_CLOEXEC, 0644));
  if (!fd.valid()) return ErrnoStatus(errno, path);
  std::vector<uint8_t> head(8 + text.size());
  for (size_t i = 0; i < 8; ++i)
    head[i] = static_cast<uint8_t>(text.size() >> (8 * i));
  std::copy(text.begin(), text.end(), head.begin() + 8);
  RETURN_IF_ERROR(WriteExactly(fd.get(), 0, head, path));
  std::vector<uint8_t> weights(kRowsPerWrite * width);
  std::vector<uint8_t> scales(kRowsPerWrite * groups);
  for (uint64_t row = 0; row < layer.num_rows; row += kRowsPerWrite) {
    const uint64_t count = std::min(kRowsPerWrite, layer.num_rows - row);
    for (uint64_t i = 0; i < count; ++i) {
      SyntheticRow(row + i, std::span(weights).subspan(i * width, width),
                   std::span(scales).subspan(i * groups, groups));
    }
    RETURN_IF_ERROR(WriteExactly(fd.get(), head.size() + row * width,
                                 std::span(weights).first(count * width), path));
    RETURN_IF_ERROR(WriteExactly(fd.get(), head.size() + weight_bytes + row * groups,
                                 std::span(scales).first(count * groups), path));
  }
  return absl::OkStatus();
}

absl::StatusOr<std::string> ConfigText(const EngramShape& shape,
                                       const std::vector<LayerHash>& layers,
                                       const std::string& config_template) {
  boost::system::error_code error;
  json::value config = json::parse(config_template, error);
  if (error || !config.is_object() || !config.as_object().contains("text_config") ||
      !config.at("text_config").is_object()) {
    return absl::InvalidArgumentError("the template is not a config.json with a text_config");
  }
  json::object& text = config.at("text_config").as_object();
  json::array rows;
  for (const LayerHash& layer : layers)
    rows.push_back(layer.num_rows);
  text["engram_layer_ids"] = json::value_from(shape.layer_ids);
  text["engram_num_embeddings"] = rows;
  text["engram_max_ngram_size"] = shape.max_ngram_size;
  text["engram_vocab_size"] = shape.bucket_start;
  text["engram_n_heads"] = shape.num_heads;
  text["engram_head_dim"] = shape.head_dim;
  text["engram_pad_token_id"] = shape.pad_token_id;
  text["engram_compressed_vocab_size"] = shape.num_classes;
  text["vocab_size"] = shape.vocab_size;
  return json::serialize(config);
}

}  // namespace

void SyntheticRow(uint64_t row, std::span<uint8_t> weights, std::span<uint8_t> scales) {
  uint32_t h = static_cast<uint32_t>(row) * 2654435761u;
  for (uint8_t& weight : weights) {
    weight = static_cast<uint8_t>(h >> 7);
    if ((weight & 0x7f) == 0x7f) weight = 0x7e;
    h += 40503u;
  }
  for (size_t s = 0; s < scales.size(); ++s) {
    h = static_cast<uint32_t>(row) * 2654435761u + static_cast<uint32_t>(256 + s) * 40503u;
    scales[s] = static_cast<uint8_t>(100 + (h >> 9) % 40);
  }
}

absl::Status WriteSyntheticModel(const std::string& dir,
                                 const EngramShape& shape,
                                 const std::string& config_template) {
  ASSIGN_OR_RETURN(const std::vector<LayerHash> layers, DeriveLayerHashes(shape));
  ASSIGN_OR_RETURN(const std::string config, ConfigText(shape, layers, config_template));
  if (mkdir(dir.c_str(), 0755) != 0 && errno != EEXIST) return ErrnoStatus(errno, dir);
  RETURN_IF_ERROR(WriteFileAtomically(dir + "/config.json", config));
  std::string map;
  for (int32_t id = 0; id < shape.vocab_size; ++id) {
    const uint32_t value = static_cast<uint32_t>(static_cast<uint64_t>(id) % shape.num_classes);
    for (int i = 0; i < 4; ++i)
      map.push_back(static_cast<char>(value >> (8 * i)));
  }
  RETURN_IF_ERROR(WriteFileAtomically(dir + "/token_map_i32.bin", map));
  json::object weight_map;
  for (size_t i = 0; i < layers.size(); ++i) {
    const std::string file = TableFileName(i, layers.size());
    RETURN_IF_ERROR(WriteTable(dir + "/" + file, shape, layers[i]));
    const std::string name = absl::StrCat("layers.", layers[i].layer_id, ".engram.embed.");
    weight_map[name + "weight"] = file;
    weight_map[name + "scale"] = file;
  }
  return WriteFileAtomically(dir + "/model.safetensors.index.json",
                             json::serialize(json::object{{"weight_map", weight_map}}));
}

}  // namespace twinspark::engram
