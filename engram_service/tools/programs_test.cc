// The tools as people run them: programs, flags, exit codes and what they leave on the disk. A
// directory made by slim_engram serves the same rows as the checkpoint; synth_table makes the table
// its flags describe; pack_rows on a file system that is full says so and goes on when it is not.
#include <cstdint>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <functional>
#include <iterator>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include <sched.h>
#include <sys/mount.h>
#include <sys/wait.h>
#include <unistd.h>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "boost/json.hpp"
#include "common/safetensors.h"
#include "common/status_macros.h"
#include "common/testing/temp_dir.h"
#include "engram_service/read/local_rows.h"
#include "engram_service/store/native_table.h"
#include "engram_service/store/row_table_writer.h"
#include "engram_service/store/synthetic.h"

namespace twinspark::engram {
namespace {

namespace fs = std::filesystem;
namespace json = boost::json;
using ::testing::HasSubstr;

struct Ran {
  int code = -1;
  std::string output;  // both streams
};

Ran RunTool(const std::string& arguments) {
  // TWINSPARK_RUN: an emulator, in a cross build.
  const std::string command =
      std::string(TWINSPARK_RUN " " TWINSPARK_BIN_DIR "/") + arguments + " 2>&1";
  Ran ran;
  FILE* pipe = popen(command.c_str(), "r");
  if (pipe == nullptr) return ran;
  char buffer[4096];
  size_t n;
  while ((n = fread(buffer, 1, sizeof(buffer), pipe)) > 0)
    ran.output.append(buffer, n);
  const int status = pclose(pipe);
  if (WIFEXITED(status)) ran.code = WEXITSTATUS(status);
  return ran;
}

std::string Content(const fs::path& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}

class ProgramsTest : public ::testing::Test {
 protected:
  // A checkpoint of two tables in `name`.
  std::string Synth(const std::string& name, const std::string& more = "--mib 6 --heads 4") {
    const std::string out = (dir_ / name).string();
    const Ran ran = RunTool(
        "synth_table --out " + out +
        " --config " TWINSPARK_DEMO_MODEL "/config.json --vocab 4096 --classes 1000 " + more);
    EXPECT_EQ(ran.code, 0) << ran.output;
    return out;
  }

  static std::string RowsDigest(const std::string& dir) {
    auto rows = LocalRows::Open({dir, "", 0, 1});
    EXPECT_TRUE(rows.ok()) << rows.status();
    if (!rows.ok()) return "";
    std::vector<int32_t> ids;
    for (int32_t i = 0; i < 400; ++i)
      ids.push_back(i * 31 % 4096);
    const SequenceView view{0, 0, ids, {}};
    EXPECT_TRUE((*rows)->Gather(std::span(&view, 1)).ok());
    Sha256 hash;
    for (int layer = 0; layer < 2; ++layer) {
      hash.Update((*rows)->weights(layer));
      hash.Update((*rows)->scales(layer));
    }
    return Hex(hash.Finish());
  }

  // Adds tensors that the row service has no use for, in a file of their own.
  static void AddOtherWeights(const fs::path& dir) {
    const fs::path index_path = dir / "model.safetensors.index.json";
    json::value index = json::parse(Content(index_path));
    json::object& map = index.at("weight_map").as_object();
    map["layers.1.engram.wkv.weight"] = "other.safetensors";
    map["layers.1.attn.wq.weight"] = "other.safetensors";
    std::ofstream(index_path) << json::serialize(index);
    std::ofstream(dir / "other.safetensors") << "weights";
    std::ofstream(dir / "tokenizer.json") << "{}";
  }

  TempDir dir_;
};

TEST_F(ProgramsTest, SlimKeepsTheTablesAndNothingElse) {
  const fs::path from = Synth("checkpoint");
  const std::string digest = RowsDigest(from.string());
  AddOtherWeights(from);
  const fs::path out = dir_ / "slim";
  for (int i = 0; i < 2; ++i) {  // the second time over what is there
    const Ran ran = RunTool("slim_engram --from " + from.string() + " --out " + out.string());
    ASSERT_EQ(ran.code, 0) << ran.output;
    EXPECT_THAT(ran.output, HasSubstr("2 table files linked, 4 tensors in the index"));
  }
  std::set<std::string> names;
  for (const auto& entry : fs::directory_iterator(out))
    names.insert(entry.path().filename().string());
  EXPECT_EQ(names, (std::set<std::string>{"config.json", "engram-00001-of-00002.safetensors",
                                          "engram-00002-of-00002.safetensors",
                                          "model.safetensors.index.json", "token_map_i32.bin",
                                          "tokenizer.json"}));
  for (const char* name : {"engram-00001-of-00002.safetensors", "config.json"}) {
    EXPECT_TRUE(fs::equivalent(from / name, out / name)) << "a link, not a copy";
  }
  const json::value index = json::parse(Content(out / "model.safetensors.index.json"));
  for (const auto& item : index.at("weight_map").as_object()) {
    EXPECT_THAT(std::string(item.key()), HasSubstr(".engram.embed."));
  }
  EXPECT_EQ(index.at("weight_map").as_object().size(), 4u);
  // It outlives the checkpoint and serves the same rows.
  fs::remove_all(from);
  EXPECT_EQ(RowsDigest(out.string()), digest);
}

TEST_F(ProgramsTest, SlimFollowsLinksAndFoldersOfTheIndex) {
  const fs::path from = Synth("checkpoint");
  const std::string digest = RowsDigest(from.string());
  // As download caches lay them out: names that link to blobs, one of them in a folder.
  fs::create_directory(from / "blobs");
  fs::create_directory(from / "parts");
  fs::rename(from / "engram-00001-of-00002.safetensors", from / "blobs/one");
  fs::create_symlink("../blobs/one", from / "parts/engram-00001-of-00002.safetensors");
  json::value index = json::parse(Content(from / "model.safetensors.index.json"));
  for (auto& item : index.at("weight_map").as_object()) {
    const std::string file(item.value().get_string());
    if (file.find("00001-of") != std::string::npos) item.value() = "parts/" + file;
  }
  std::ofstream(from / "model.safetensors.index.json") << json::serialize(index);
  const fs::path out = dir_ / "slim";
  const Ran ran = RunTool("slim_engram --from " + from.string() + " --out " + out.string());
  ASSERT_EQ(ran.code, 0) << ran.output;
  EXPECT_TRUE(fs::equivalent(out / "engram-00001-of-00002.safetensors", from / "blobs/one"));
  EXPECT_FALSE(fs::is_symlink(out / "engram-00001-of-00002.safetensors"));
  EXPECT_EQ(RowsDigest(out.string()), digest);
}

TEST_F(ProgramsTest, SlimRefusesWhatItCannotDo) {
  const fs::path from = Synth("checkpoint");
  const std::string out = (dir_ / "slim").string();
  EXPECT_EQ(RunTool("slim_engram").code, 78);
  EXPECT_EQ(RunTool("slim_engram --from " + from.string()).code, 78);
  EXPECT_EQ(RunTool("slim_engram --frm x --out y").code, 78);
  const Ran nothing = RunTool("slim_engram --from " + dir_.path() + " --out " + out);
  EXPECT_EQ(nothing.code, 65);
  EXPECT_THAT(nothing.output, HasSubstr("model.safetensors.index.json"));
  const std::string index = Content(from / "model.safetensors.index.json");
  for (const std::string& text :
       {std::string("not json"), std::string("[]"), std::string("{\"weight_map\": 3}"),
        std::string("{\"weight_map\": {\"layers.1.attn.wq.weight\": \"other.safetensors\"}}")}) {
    std::ofstream(from / "model.safetensors.index.json") << text;
    EXPECT_EQ(RunTool("slim_engram --from " + from.string() + " --out " + out).code, 65) << text;
  }
  std::ofstream(from / "model.safetensors.index.json") << index;
  fs::remove(from / "engram-00002-of-00002.safetensors");
  EXPECT_NE(RunTool("slim_engram --from " + from.string() + " --out " + out).code, 0);
}

TEST_F(ProgramsTest, SynthMakesTheTableItsFlagsDescribe) {
  const std::string out = Synth("a", "--mib 6 --heads 4 --head-dim 128");
  const auto tables = TableSet::Open({out, "", 0, 1});
  ASSERT_TRUE(tables.ok()) << tables.status();
  EXPECT_EQ((*tables)->num_layers(), 2);
  EXPECT_EQ((*tables)->columns().size(), 12u);
  EXPECT_EQ((*tables)->shape().vocab_size, 4096);
  EXPECT_EQ((*tables)->table(0).row_weight_bytes(), 128u);
  EXPECT_EQ((*tables)->table(0).row_scale_bytes(), 4u);
  uint64_t bytes = 0;
  for (int layer = 0; layer < 2; ++layer) {
    const RowTable& table = (*tables)->table(layer);
    bytes += table.file(0).bytes;
    // Every row follows from its number.
    std::vector<uint8_t> row(132);
    std::vector<uint8_t> want(132);
    const LayerHash& hash = (*tables)->hasher().layer(layer);
    for (int column = 0; column < 12; ++column) {
      const size_t c = static_cast<size_t>(column);
      for (uint32_t bucket = 0; bucket < hash.primes[c]; bucket += 97) {
        ASSERT_TRUE(table.ReadRow(column, bucket, row).ok());
        SyntheticRow(hash.offsets[c] + bucket, std::span(want).first(128),
                     std::span(want).subspan(128));
        ASSERT_EQ(row, want) << column << " " << bucket;
      }
    }
  }
  EXPECT_NEAR(static_cast<double>(bytes) / (1 << 20), 6, 0.3);
  const std::string again = Synth("b", "--mib 6 --heads 4 --head-dim 128");
  for (const auto& entry : fs::directory_iterator(out)) {
    EXPECT_EQ(Content(entry.path()), Content(again / entry.path().filename()));
  }
}

TEST_F(ProgramsTest, SynthRefusesBadFlags) {
  const std::string config = " --config " TWINSPARK_DEMO_MODEL "/config.json";
  const std::string out = " --out " + (dir_ / "x").string();
  EXPECT_EQ(RunTool("synth_table").code, 78);
  EXPECT_EQ(RunTool("synth_table" + out).code, 78);
  EXPECT_EQ(RunTool("synth_table" + out + config + " --mib 0").code, 78);
  EXPECT_EQ(RunTool("synth_table" + out + config + " --mib many").code, 78);
  EXPECT_EQ(RunTool("synth_table" + out + config + " --megabytes 3").code, 78);
  EXPECT_EQ(RunTool("synth_table" + out + " --config /nowhere.json").code, 65);
  const std::string wrong = (dir_ / "wrong.json").string();
  std::ofstream(wrong) << "{}";
  const Ran ran = RunTool("synth_table" + out + " --config " + wrong);
  EXPECT_EQ(ran.code, 78);
  EXPECT_THAT(ran.output, HasSubstr("text_config"));
}

TEST_F(ProgramsTest, HelpSaysWhatEveryFlagMeans) {
  const std::pair<const char*, std::vector<const char*>> tools[] = {
      {"pack_rows", {"--out DIR", "--rank R", "(default: egpack)", "--force"}},
      {"verify_rows", {"--packed-dir DIR", "--mode MODE", "(default: quick)"}},
      {"gather", {"--ids A,B,...", "--rows"}},
      {"slim_engram", {"--from DIR", "not while a cluster serves"}},
      {"synth_table", {"--config FILE", "(default: 64)"}},
      {"make_token_map", {"--tokenizer FILE", "--check FILE"}},
  };
  for (const auto& [tool, parts] : tools) {
    const std::string name = tool;
    for (const std::string asked : {" --help", " -h", " --out x --help"}) {
      const Ran help = RunTool(name + asked);
      EXPECT_EQ(help.code, 0) << name << asked << help.output;
      EXPECT_THAT(help.output, HasSubstr("usage: " + name));
      for (const char* part : parts)
        EXPECT_THAT(help.output, HasSubstr(part));
    }
    const Ran unknown = RunTool(name + " --nothing x");
    EXPECT_EQ(unknown.code, 78);
    EXPECT_THAT(unknown.output, HasSubstr(name + ": cannot use '--nothing'; --help lists"));
    EXPECT_EQ(RunTool(name).code, 78);
  }
  const Ran valueless = RunTool("pack_rows --model-dir x --out");
  EXPECT_EQ(valueless.code, 78);
  EXPECT_THAT(valueless.output, HasSubstr("--out wants a value: DIR"));
}

TEST_F(ProgramsTest, MakeTokenMapWritesTheDemoMapAndSeesAnother) {
  const std::string demo = TWINSPARK_DEMO_MODEL;
  const std::string tool = "make_token_map --tokenizer " + demo + "/tokenizer.json ";
  const std::string map = (dir_ / "token_map_i32.bin").string();
  EXPECT_EQ(RunTool(tool + "--out " + map).code, 0);
  EXPECT_EQ(Content(map), Content(demo + "/token_map_i32.bin"));
  EXPECT_EQ(RunTool(tool + "--check " + map).code, 0);
  std::ofstream(map, std::ios::app) << "more";
  EXPECT_EQ(RunTool(tool + "--check " + map).code, 1);
  EXPECT_EQ(RunTool("make_token_map --tokenizer " + map + " --out " + map).code, 65);
  EXPECT_EQ(RunTool(tool + "--out " + map + " --check " + map).code, 78);
}

// Native tables lie beside in every case: none may stand in for the packed ones that were named.
TEST_F(ProgramsTest, APackedDirectoryThatIsNamedMustHoldThisRank) {
  const std::string from = Synth("checkpoint");
  const std::string packed = (dir_ / "made" / "packed").string();  // pack_rows makes it
  const std::string typo = (dir_ / "pakced").string();
  const std::string of_model = " --model-dir " + from + " --packed-dir ";
  const auto expect_refused = [](const Ran& ran, const std::string& dir, const std::string& there) {
    EXPECT_EQ(ran.code, 65) << ran.output;
    EXPECT_THAT(ran.output, HasSubstr(dir + " has no packed tables of rank 0 of 1"));
    EXPECT_THAT(ran.output, HasSubstr(there));
  };
  for (const std::string tool : {"verify_rows", "gather --ids 1,2,3"}) {
    expect_refused(RunTool(tool + of_model + typo), typo, "No such file or directory");
    expect_refused(RunTool(tool + of_model + from), from, "no packed files there, 5 others");
  }
  ASSERT_EQ(RunTool("pack_rows --rank 1 --world 2 --model-dir " + from + " --out " + packed).code,
            0);
  for (const std::string tool : {"verify_rows", "gather --ids 1,2,3"}) {
    expect_refused(RunTool(tool + of_model + packed), packed,
                   "engram-l01.n1of2.bal.egp, engram-l04.n1of2.bal.egp");
    const Ran right = RunTool(tool + of_model + packed + " --rank 1 --world 2");
    EXPECT_EQ(right.code, 0) << right.output;
    EXPECT_THAT(right.output, HasSubstr("tier packed"));
    const Ran native = RunTool(tool + " --model-dir " + from);
    EXPECT_EQ(native.code, 0) << native.output;
    EXPECT_THAT(native.output, HasSubstr("tier native"));
    const Ran nobody = RunTool(tool + of_model + packed + " --rank 2 --world 2");
    EXPECT_EQ(nobody.code, 78);
    EXPECT_THAT(nobody.output, HasSubstr("rank 2 is not in 0..1 (world 2)"));
  }
  // A layer that is missing is not made up for either.
  fs::remove(packed + "/engram-l04.n1of2.bal.egp");
  const Ran half = RunTool("verify_rows --rank 1 --world 2" + of_model + packed);
  EXPECT_EQ(half.code, 65) << half.output;
  EXPECT_THAT(half.output, HasSubstr("engram-l04.n1of2.bal.egp"));
  // The service: a wrong setting.
  const Ran service = RunTool("engram_service --engram-listen 127.0.0.1:0 --engram-packed-dir " +
                              typo + " --model-dir " + from);
  EXPECT_EQ(service.code, 78) << service.output;
  EXPECT_THAT(service.output, HasSubstr("ENGRAM_PACKED_DIR " + typo + " has no packed tables"));
}

// A file system of its own, in a mount namespace of this process: gone with it, whatever happens.
class FullDiskTest : public ProgramsTest {
 protected:
  void SetUp() override {
    ProgramsTest::SetUp();
    disk_ = dir_ / "disk";
    fs::create_directory(disk_);
    if (geteuid() != 0 || unshare(CLONE_NEWNS) != 0 ||
        mount("none", "/", nullptr, MS_REC | MS_PRIVATE, nullptr) != 0 ||
        mount("rows", disk_.c_str(), "tmpfs", 0, "size=2m") != 0) {
      GTEST_SKIP() << "no right to mount a file system";
    }
    mounted_ = true;
  }
  void TearDown() override {
    if (mounted_) umount(disk_.c_str());
    ProgramsTest::TearDown();
  }
  void Resize(const std::string& size) const {
    ASSERT_EQ(mount("rows", disk_.c_str(), "tmpfs", MS_REMOUNT, ("size=" + size).c_str()), 0);
  }
  // Writes until nothing more fits.
  void FillUp() const {
    std::ofstream ballast(disk_ / "ballast", std::ios::binary);
    const std::string block(4096, 'x');
    while (ballast.write(block.data(), 4096) && ballast.flush()) {
    }
  }
  Ran Pack(const std::string& from) const {
    return RunTool("pack_rows --model-dir " + from + " --out " + disk_.string());
  }
  std::string Packed() const { return (disk_ / "engram-l01.n0of1.all.egp").string(); }

  fs::path disk_;
  bool mounted_ = false;
};

TEST_F(FullDiskTest, PackingOnAFullDiskSaysSoAndGoesOnOnceThereIsRoom) {
  const std::string from = Synth("checkpoint");  // 3 MiB a table
  // Too small for the first file: said before anything is written.
  const Ran small = Pack(from);
  EXPECT_EQ(small.code, 75) << small.output;
  EXPECT_THAT(small.output, HasSubstr("No space left"));
  EXPECT_FALSE(fs::exists(Packed()));
  // Room for it, but somebody else fills the disk first.
  Resize("16m");
  FillUp();
  EXPECT_EQ(Pack(from).code, 75);
  EXPECT_FALSE(fs::exists(Packed()));
  fs::remove(disk_ / "ballast");
  const Ran done = Pack(from);
  ASSERT_EQ(done.code, 0) << done.output;
  const Ran verified = RunTool("verify_rows --model-dir " + from + " --packed-dir " +
                               disk_.string() + " --mode source-full");
  EXPECT_EQ(verified.code, 0) << verified.output;
}

// Takes the rest of the disk right after the packer has preallocated its file: its journal is the
// first thing that finds no room.
class FillingFiles : public PackFiles {
 public:
  explicit FillingFiles(std::function<void()> fill_up) : fill_up_(std::move(fill_up)) {}
  absl::Status Allocate(int fd, uint64_t bytes, const std::string& path) override {
    RETURN_IF_ERROR(PackFiles::Allocate(fd, bytes, path));
    fill_up_();
    return absl::OkStatus();
  }

 private:
  std::function<void()> fill_up_;
};

TEST_F(FullDiskTest, ADiskThatFillsUpWhilePackingLosesNothing) {
  const std::string from = Synth("checkpoint");
  Resize("16m");
  const auto hasher = LoadHasher(from);
  const auto checkpoint = Checkpoint::Open(from);
  ASSERT_TRUE(hasher.ok() && checkpoint.ok());
  const auto table =
      NativeTable::Open(**checkpoint, (*hasher)->shape(), (*hasher)->layer(0), false);
  ASSERT_TRUE(table.ok()) << table.status();
  PackOptions options;
  options.out_dir = disk_.string();
  options.target = {0, 1, kSchemeAll, *BalancedColumns((*hasher)->shape(), 0, 1)};
  const auto pack = [&](PackFiles& files) {
    return PackTable(**table, SourceOf(**table), **hasher, 0, options, files);
  };
  FillingFiles filling([this] { FillUp(); });
  const auto full = pack(filling);
  EXPECT_EQ(full.status().code(), absl::StatusCode::kResourceExhausted) << full.status();
  EXPECT_FALSE(fs::exists(Packed()));
  PackFiles files;
  EXPECT_FALSE(pack(files).ok()) << "still full";
  EXPECT_FALSE(fs::exists(Packed()));
  fs::remove(disk_ / "ballast");
  const auto done = pack(files);
  ASSERT_TRUE(done.ok()) << done.status();
  EXPECT_EQ(RunTool("pack_rows --model-dir " + from + " --out " + disk_.string()).code, 0)
      << "the other layer";
  EXPECT_EQ(RunTool("verify_rows --model-dir " + from + " --packed-dir " + disk_.string() +
                    " --mode source-full")
                .code,
            0);
}

}  // namespace
}  // namespace twinspark::engram
