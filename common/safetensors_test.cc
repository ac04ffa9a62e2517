// Files that are right are read; files that are wrong in any structure are one clear error. Beside
// it, safetensors_fuzz.
#include "common/safetensors.h"

#include <filesystem>
#include <fstream>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "common/testing/seeded_rng.h"
#include "common/testing/temp_dir.h"

namespace twinspark {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

constexpr char kHeader[] =
    R"({"__metadata__":{"format":"pt"},"b":{"dtype":"I16","shape":[2,2],"data_offsets":[4,12]},"a":{"dtype":"F32","shape":[],"data_offsets":[0,4]}})";

class SafetensorsTest : public ::testing::Test {
 protected:
  std::string Write(const std::string& name, const std::string& header, const std::string& data) {
    std::string bytes(8, '\0');
    const uint64_t length = header.size();
    std::memcpy(bytes.data(), &length, sizeof(length));
    return WriteRaw(name, bytes + header + data);
  }
  std::string WriteRaw(const std::string& name, const std::string& bytes) {
    const std::string path = dir_ + "/" + name;
    std::filesystem::create_directories(std::filesystem::path(path).parent_path());
    std::ofstream(path, std::ios::binary) << bytes;
    return path;
  }
  static std::string Message(const absl::Status& status) { return std::string(status.message()); }

  const TempDir temp_dir_;
  const std::string& dir_ = temp_dir_.path();
  const std::string data_ =
      std::string("\x00\x00\x80\x3f", 4) + std::string("\x01\x00\x02\x00\x03\x00\x04\x00", 8);
};

TEST_F(SafetensorsTest, ReadsTensorsAndSlices) {
  const auto file = SafetensorsFile::Open(Write("m.safetensors", kHeader, data_));
  ASSERT_TRUE(file.ok()) << file.status();
  ASSERT_EQ((*file)->tensors().size(), 2u);
  const StoredTensor* a = (*file)->Find("a");
  const StoredTensor* b = (*file)->Find("b");
  ASSERT_TRUE(a != nullptr && b != nullptr);
  EXPECT_EQ((*file)->Find("c"), nullptr);
  EXPECT_THAT(b->shape, ElementsAre(2, 2));
  EXPECT_EQ(b->ShapeText(), "[2, 2]");
  EXPECT_EQ(a->num_elements(), 1);
  float one = 0;
  ASSERT_TRUE((*file)->Read(*a, 0, std::as_writable_bytes(std::span(&one, 1))).ok());
  EXPECT_EQ(one, 1.0f);
  int16_t middle[2] = {};
  ASSERT_TRUE((*file)->Read(*b, 2, std::as_writable_bytes(std::span(middle))).ok());
  EXPECT_THAT(middle, ElementsAre(2, 3));
  EXPECT_FALSE((*file)->Read(*b, 6, std::as_writable_bytes(std::span(middle))).ok())
      << "beyond the tensor";
  EXPECT_FALSE((*file)->Read(*b, -1, std::as_writable_bytes(std::span(middle))).ok());
}

TEST_F(SafetensorsTest, EveryWrongHeaderIsNamed) {
  const std::vector<std::pair<const char*, const char*>> bad = {
      {R"([])", "not an object"},
      {R"({"a":)", "not JSON"},
      {R"({"a":1})", "not an object"},
      {R"({"a":{"shape":[],"data_offsets":[0,4]}})", "no dtype"},
      {R"({"a":{"dtype":"F33","shape":[],"data_offsets":[0,4]}})", "F33"},
      {R"({"a":{"dtype":"F32","data_offsets":[0,4]}})", "no shape"},
      {R"({"a":{"dtype":"F32","shape":[-1],"data_offsets":[0,4]}})", "not a count"},
      {R"({"a":{"dtype":"F32","shape":[1.5],"data_offsets":[0,4]}})", "not a count"},
      {R"({"a":{"dtype":"F32","shape":[4611686018427387904,4],"data_offsets":[0,4]}})",
       "overflows"},
      {R"({"a":{"dtype":"F32","shape":[1,1,1,1,1,1,1,1,1],"data_offsets":[0,4]}})", "dimensions"},
      {R"({"a":{"dtype":"F32","shape":[1],"data_offsets":[0]}})", "pair"},
      {R"({"a":{"dtype":"F32","shape":[1],"data_offsets":[4,0]}})", "data_offsets 4..0"},
      {R"({"a":{"dtype":"F32","shape":[1],"data_offsets":[-4,0]}})", "counts"},
      {R"({"a":{"dtype":"F32","shape":[1],"data_offsets":[8,16]}})", "8..16 of 12"},
      {R"({"a":{"dtype":"F32","shape":[1],"data_offsets":[0,8]}})", "needs 4 bytes"},
      {R"({"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},"b":{"dtype":"F32","shape":[2],"data_offsets":[4,12]}})",
       "overlaps"},
      {R"({"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]},"a":{"dtype":"F32","shape":[1],"data_offsets":[4,8]}})",
       "named twice"},
  };
  for (const auto& [header, what] : bad) {
    const auto file = SafetensorsFile::Open(Write("bad.safetensors", header, data_));
    ASSERT_FALSE(file.ok()) << header;
    EXPECT_THAT(Message(file.status()), HasSubstr(what)) << header;
    EXPECT_THAT(Message(file.status()), HasSubstr("bad.safetensors")) << header;
  }
}

TEST_F(SafetensorsTest, EveryTruncationIsAnError) {
  std::string bytes(8, '\0');
  bytes[0] = static_cast<char>(sizeof(kHeader) - 1);
  bytes += kHeader + data_;
  for (size_t size = 0; size < bytes.size(); ++size) {
    const auto file = SafetensorsFile::Open(WriteRaw("short.safetensors", bytes.substr(0, size)));
    EXPECT_FALSE(file.ok()) << size << " of " << bytes.size();
  }
  EXPECT_TRUE(SafetensorsFile::Open(WriteRaw("short.safetensors", bytes)).ok());
}

TEST_F(SafetensorsTest, AFileThatShrinksLaterIsAnErrorNotASignal) {
  const std::string path = Write("m.safetensors", kHeader, data_);
  const auto file = SafetensorsFile::Open(path);
  ASSERT_TRUE(file.ok());
  std::filesystem::resize_file(path, std::filesystem::file_size(path) - 3);
  const auto bytes = (*file)->ReadAll(*(*file)->Find("b"));
  EXPECT_EQ(bytes.status().code(), absl::StatusCode::kDataLoss);
  EXPECT_THAT(Message(bytes.status()), HasSubstr("short"));
}

TEST_F(SafetensorsTest, HeaderBitFlipsNeverLeaveTheFile) {
  SeededRng rng(TestSeed(7));
  std::string bytes(8, '\0');
  bytes[0] = static_cast<char>(sizeof(kHeader) - 1);
  bytes += kHeader + data_;
  for (int i = 0; i < 500; ++i) {
    std::string flipped = bytes;
    flipped[static_cast<size_t>(rng.Int(0, static_cast<int64_t>(sizeof(kHeader)) + 6))] ^=
        static_cast<char>(1 << rng.Int(0, 7));
    const auto file = SafetensorsFile::Open(WriteRaw("flip.safetensors", flipped));
    if (!file.ok()) continue;
    for (const StoredTensor& tensor : (*file)->tensors())
      EXPECT_TRUE((*file)->ReadAll(tensor).ok());
  }
}

TEST_F(SafetensorsTest, CheckpointOfShards) {
  Write("one/w.safetensors", kHeader, data_);
  Write(
      "two/x.safetensors",
      R"({"c":{"dtype":"F32","shape":[1],"data_offsets":[0,4]},"unused":{"dtype":"F32","shape":[2],"data_offsets":[4,12]}})",
      data_);
  WriteRaw(
      "one/model.safetensors.index.json",
      R"({"metadata":{},"weight_map":{"a":"w.safetensors","c":"../two/x.safetensors","b":"w.safetensors"}})");
  const auto checkpoint = Checkpoint::Open(dir_ + "/one");
  ASSERT_TRUE(checkpoint.ok()) << checkpoint.status();
  EXPECT_THAT((*checkpoint)->names(), ElementsAre("a", "b", "c"));
  EXPECT_EQ((*checkpoint)->Find("unused"), nullptr) << "only what the index names exists";
  EXPECT_TRUE((*checkpoint)->ReadAll(*(*checkpoint)->Find("c")).ok());
  const uint64_t digest = (*checkpoint)->digest();
  Write(
      "two/x.safetensors",
      R"({"c":{"dtype":"F32","shape":[1],"data_offsets":[4,8]},"unused":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}})",
      data_);
  EXPECT_NE((*Checkpoint::Open(dir_ + "/one"))->digest(), digest)
      << "a changed header is another checkpoint";
}

TEST_F(SafetensorsTest, WrongIndexIsNamed) {
  Write("w.safetensors", kHeader, data_);
  const auto open = [&](const std::string& index) {
    WriteRaw("model.safetensors.index.json", index);
    return Message(Checkpoint::Open(dir_).status());
  };
  EXPECT_THAT(open(R"({"weight_map":{"zz":"w.safetensors"}})"),
              HasSubstr("zz is not in w.safetensors"));
  EXPECT_THAT(open(R"({"weight_map":{"a":"gone.safetensors"}})"), HasSubstr("gone.safetensors"));
  EXPECT_THAT(open(R"({"weight_map":{"a":1}})"), HasSubstr("not a string"));
  EXPECT_THAT(open(R"({"weight_map":[]})"), HasSubstr("weight_map"));
  EXPECT_THAT(open(R"({"weight_map":{"a":"w.safetensors","a":"w.safetensors"}})"),
              HasSubstr("named twice"));
  EXPECT_THAT(open("{"), HasSubstr("not JSON"));
}

TEST_F(SafetensorsTest, OtherThingsThanFiles) {
  EXPECT_EQ(SafetensorsFile::Open(dir_ + "/none").status().code(), absl::StatusCode::kNotFound);
  EXPECT_THAT(Message(SafetensorsFile::Open(dir_).status()), HasSubstr("regular file"));
}

}  // namespace
}  // namespace twinspark
