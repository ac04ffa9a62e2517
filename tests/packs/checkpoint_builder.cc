#include "tests/packs/checkpoint_builder.h"

#include <bit>
#include <cmath>
#include <cstring>
#include <filesystem>
#include <fstream>

#include <boost/json.hpp>

#include "common/check.h"
#include "common/file_util.h"
#include "kernels/dtype.h"
#include "kernels/exl3/exl3_linear.h"

namespace twinspark::packs {
namespace {

constexpr size_t kMaxFileBytes = size_t{64} << 20;

template <class T>
T At(const std::string& bytes, int64_t index) {
  T value;
  std::memcpy(&value, bytes.data() + static_cast<size_t>(index) * sizeof(T), sizeof(T));
  return value;
}

template <class T>
std::string Bytes(const std::vector<T>& values) {
  return {reinterpret_cast<const char*>(values.data()), values.size() * sizeof(T)};
}

bool Ends(const std::string& name, const std::string& suffix) {
  return name.size() > suffix.size() &&
         name.compare(name.size() - suffix.size(), suffix.size(), suffix) == 0;
}

// In place, blocks of 128 along a stride: H / sqrt(128), in double.
void Hadamard(std::vector<double>& values, int64_t first, int64_t stride) {
  for (int64_t h = 1; h < 128; h *= 2) {
    for (int64_t i = 0; i < 128; ++i) {
      if ((i & h) != 0) continue;
      double& a = values[static_cast<size_t>(first + i * stride)];
      double& b = values[static_cast<size_t>(first + (i + h) * stride)];
      const double sum = a + b;
      b = a - b;
      a = sum;
    }
  }
  for (int64_t i = 0; i < 128; ++i)
    values[static_cast<size_t>(first + i * stride)] /= std::sqrt(128.0);
}

}  // namespace

CheckpointBuilder CheckpointBuilder::Read(const std::string& dir) {
  CheckpointBuilder builder;
  const auto config = ReadFile(dir + "/config.json", kMaxFileBytes);
  CHECK(config.ok()) << config.status();
  builder.config_json = *config;
  for (const char* name : {"token_map_i32.bin", "engram_constants.json"}) {
    const auto content = ReadFile(dir + "/" + name, kMaxFileBytes);
    if (content.ok()) builder.other_files[name] = *content;
  }
  const auto checkpoint = Checkpoint::Open(dir);
  CHECK(checkpoint.ok()) << checkpoint.status();
  for (const std::string& name : (*checkpoint)->names()) {
    const StoredTensor* tensor = (*checkpoint)->Find(name);
    const auto bytes = (*checkpoint)->ReadAll(*tensor);
    CHECK(bytes.ok()) << bytes.status();
    builder.tensors[name] = {
        StoredTypeName(tensor->type), tensor->shape,
        std::string(reinterpret_cast<const char*>(bytes->data()), bytes->size())};
  }
  return builder;
}

std::string CheckpointBuilder::SafetensorsBytes() const {
  boost::json::object header;
  std::string data;
  for (const auto& [name, entry] : tensors) {
    const int64_t begin = static_cast<int64_t>(data.size());
    data += entry.bytes;
    header[name] = {{"dtype", entry.dtype},
                    {"shape", boost::json::array(entry.shape.begin(), entry.shape.end())},
                    {"data_offsets", {begin, static_cast<int64_t>(data.size())}}};
  }
  const std::string text = boost::json::serialize(header);
  const uint64_t length = text.size();
  return std::string(reinterpret_cast<const char*>(&length), sizeof(length)) + text + data;
}

void CheckpointBuilder::Write(const std::string& dir) const {
  std::filesystem::create_directories(dir);
  boost::json::object map;
  for (const auto& [name, entry] : tensors)
    map[name] = "model.safetensors";
  std::ofstream(dir + "/config.json") << config_json;
  std::ofstream(dir + "/model.safetensors.index.json")
      << boost::json::serialize(boost::json::object{{"weight_map", map}});
  std::ofstream(dir + "/model.safetensors", std::ios::binary) << SafetensorsBytes();
  for (const auto& [name, content] : other_files)
    std::ofstream(dir + "/" + name, std::ios::binary) << content;
}

std::vector<std::string> CheckpointBuilder::Names(const std::string& prefix) const {
  std::vector<std::string> names;
  for (auto it = tensors.lower_bound(prefix); it != tensors.end() && it->first.starts_with(prefix);
       ++it)
    names.push_back(it->first);
  return names;
}

void CheckpointBuilder::ErasePrefix(const std::string& prefix) {
  for (const std::string& name : Names(prefix))
    tensors.erase(name);
}

void CheckpointBuilder::TakeMatrix(const CheckpointBuilder& from, const std::string& matrix) {
  ErasePrefix(matrix + ".");
  for (const std::string& name : from.Names(matrix + "."))
    tensors[name] = from.tensors.at(name);
}

Entry DenseOfExl3(const CheckpointBuilder& checkpoint, const std::string& matrix) {
  const Entry& trellis = checkpoint.tensors.at(matrix + ".trellis");
  const int64_t k = trellis.shape[0] * 16;
  const int64_t n = trellis.shape[1] * 16;
  const Entry& suh = checkpoint.tensors.at(matrix + ".suh");
  const Entry& svh = checkpoint.tensors.at(matrix + ".svh");
  Exl3Source source;
  source.k = k;
  source.n = n;
  source.bits = static_cast<int>(trellis.shape[2] / 16);
  source.codebook = checkpoint.tensors.contains(matrix + ".mcg")    ? Exl3Codebook::kMcg
                    : checkpoint.tensors.contains(matrix + ".mul1") ? Exl3Codebook::kMul1
                                                                    : Exl3Codebook::k3Inst;
  source.trellis = reinterpret_cast<const uint16_t*>(trellis.bytes.data());
  source.suh = reinterpret_cast<const F16*>(suh.bytes.data());
  source.svh = reinterpret_cast<const F16*>(svh.bytes.data());
  const auto weights = Exl3Weights::Prepare(source);
  CHECK(weights.ok()) << weights.status();
  std::vector<F16> decoded(static_cast<size_t>(k * n));
  Exl3Decode(*weights, decoded);
  std::vector<double> w(decoded.size());
  for (size_t i = 0; i < w.size(); ++i)
    w[i] = ToF32(decoded[i]);
  for (int64_t column = 0; column < n; ++column) {
    for (int64_t block = 0; block < k; block += 128)
      Hadamard(w, block * n + column, n);
  }
  for (int64_t row = 0; row < k; ++row) {
    for (int64_t block = 0; block < n; block += 128)
      Hadamard(w, row * n + block, 1);
  }
  std::vector<float> dense(w.size());  // [out, in]
  for (int64_t row = 0; row < k; ++row) {
    for (int64_t column = 0; column < n; ++column) {
      const double scale =
          double{ToF32(At<F16>(suh.bytes, row))} * ToF32(At<F16>(svh.bytes, column));
      dense[static_cast<size_t>(column * k + row)] =
          static_cast<float>(scale * w[static_cast<size_t>(row * n + column)]);
    }
  }
  return {"F32", {n, k}, Bytes(dense)};
}

Entry DenseOfScaled(const CheckpointBuilder& checkpoint, const std::string& matrix) {
  const Entry& weight = checkpoint.tensors.at(matrix + ".weight");
  const Entry& scale = checkpoint.tensors.at(matrix + ".scale");
  const bool is_fp4 = weight.dtype == "I8";
  const int64_t out = weight.rows();
  const int64_t in = weight.cols() * (is_fp4 ? 2 : 1);
  std::vector<uint16_t> dense(static_cast<size_t>(out * in));
  for (int64_t r = 0; r < out; ++r) {
    for (int64_t c = 0; c < in; ++c) {
      const uint8_t byte = At<uint8_t>(weight.bytes, is_fp4 ? (r * in + c) / 2 : r * in + c);
      const float value =
          is_fp4 ? E2M1ToF32(static_cast<uint8_t>((c & 1) != 0 ? byte >> 4 : byte & 15))
                 : E4M3ToF32(byte);
      const int64_t scale_row = is_fp4 ? r : r / 32;
      const float factor = E8M0ToF32(At<uint8_t>(scale.bytes, scale_row * scale.cols() + c / 32));
      const Bf16 rounded = ToBf16(value * factor);
      CHECK_EQ(ToF32(rounded), value * factor) << matrix << ": not exact in bf16";
      dense[static_cast<size_t>(r * in + c)] = rounded.bits;
    }
  }
  return {"BF16", {out, in}, Bytes(dense)};
}

CheckpointBuilder Dequantised(const CheckpointBuilder& checkpoint) {
  CheckpointBuilder plain = checkpoint;
  std::map<std::string, std::map<int, Entry>> slices;  // of wo_a
  for (const auto& [name, entry] : checkpoint.tensors) {
    if (Ends(name, ".trellis")) {
      const std::string matrix = name.substr(0, name.size() - 8);
      const Entry dense = DenseOfExl3(checkpoint, matrix);
      plain.ErasePrefix(matrix + ".");
      if (const size_t slice = matrix.find(".slice."); slice != std::string::npos) {
        slices[matrix.substr(0, slice)][std::stoi(matrix.substr(slice + 7))] = dense;
      } else {
        plain.tensors[matrix + ".weight"] = dense;
      }
    } else if (Ends(name, ".scale") && !Ends(name, ".embed.scale")) {
      const std::string matrix = name.substr(0, name.size() - 6);
      plain.tensors[matrix + ".weight"] = DenseOfScaled(checkpoint, matrix);
      plain.tensors.erase(name);
    }
  }
  for (const auto& [name, parts] : slices) {
    Entry whole = parts.at(0);
    for (size_t g = 1; g < parts.size(); ++g) {
      whole.shape[0] += parts.at(static_cast<int>(g)).shape[0];
      whole.bytes += parts.at(static_cast<int>(g)).bytes;
    }
    plain.tensors[name + ".weight"] = whole;
  }
  return plain;
}

}  // namespace twinspark::packs
