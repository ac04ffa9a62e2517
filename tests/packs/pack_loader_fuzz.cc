// The pack loader on a micro pack whose header bytes, index or configuration are mutated: an error
// or a loaded model, never a crash. Input: one byte that says which file, then its content. The
// data of the shard stays as it is.
#include <fstream>

#include "common/check.h"
#include "common/testing/fuzz_driver.h"
#include "common/testing/temp_dir.h"
#include "kernels/thread_pool.h"
#include "shard_worker/model/model.h"
#include "tests/packs/checkpoint_builder.h"

namespace {

using twinspark::packs::CheckpointBuilder;

// One small pack on disk; each input replaces one of its files.
class Pack {
 public:
  Pack()
      : pack_(CheckpointBuilder::Read(TWINSPARK_SOURCE_DIR "/tests/golden/data/model/micro-exl3")) {
    // Fewer tensors, more inputs per second: what is missing is an error at the end, the rest is
    // read before it.
    pack_.Write(dir_);
    const std::string bytes = pack_.SafetensorsBytes();
    uint64_t length = 0;
    std::memcpy(&length, bytes.data(), sizeof(length));
    header_ = bytes.substr(0, 8 + length);
  }

  std::vector<std::string> Seeds() const {
    return {"h" + header_, "c" + pack_.config_json, "i" + Read("model.safetensors.index.json")};
  }

  void Load(char which, const std::string& content) {
    const std::string name = which == 'c'   ? "config.json"
                             : which == 'i' ? "model.safetensors.index.json"
                                            : "model.safetensors";
    const std::string path = dir_ + "/" + name;
    std::string before;
    if (which == 'h') {  // in place: the header region only
      std::fstream file(path, std::ios::in | std::ios::out | std::ios::binary);
      file << content.substr(0, header_.size());
    } else {
      before = Read(name);
      std::ofstream(path, std::ios::binary) << content;
    }
    twinspark::ModelOptions options;
    options.limits.num_slots = 1;
    options.limits.num_pages = 4;
    options.limits.max_step_rows = 16;
    const auto model = twinspark::Model::Load(dir_, options, pool_);
    if (!model.ok()) CHECK(!model.status().message().empty());
    if (which == 'h') {
      std::fstream file(path, std::ios::in | std::ios::out | std::ios::binary);
      file << header_;
    } else {
      std::ofstream(path, std::ios::binary) << before;
    }
  }

 private:
  std::string Read(const std::string& name) const {
    std::ifstream file(dir_ + "/" + name, std::ios::binary);
    return std::string((std::istreambuf_iterator<char>(file)), std::istreambuf_iterator<char>());
  }

  twinspark::TempDir temp_dir_;
  const std::string& dir_ = temp_dir_.path();
  CheckpointBuilder pack_;
  std::string header_;
  twinspark::ThreadPool pool_{1};
};

Pack& ThePack() {
  static Pack pack;
  return pack;
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  if (size == 0) return 0;
  ThePack().Load(static_cast<char>(data[0]),
                 std::string(reinterpret_cast<const char*>(data) + 1, size - 1));
  return 0;
}

TWINSPARK_FUZZ_MAIN(ThePack().Seeds())
