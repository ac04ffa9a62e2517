// A wrong or damaged pack is one clear error that names file or tensor, expected and found; never a
// crash, never a model.
#include <filesystem>
#include <functional>

#include "absl/strings/str_cat.h"
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "common/testing/temp_dir.h"
#include "tests/packs/checkpoint_builder.h"
#include "tests/packs/pack_run.h"

namespace twinspark::packs {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;

const std::string kData = TWINSPARK_SOURCE_DIR "/tests/golden/data/model/";

class BadPacksTest : public ::testing::Test {
 protected:
  BadPacksTest() : good_(CheckpointBuilder::Read(kData + "micro-exl3")) {}

  std::string ErrorOf(const std::function<void(CheckpointBuilder&)>& damage) {
    return ErrorOf(good_, damage);
  }
  std::string ErrorOf(const CheckpointBuilder& good,
                      const std::function<void(CheckpointBuilder&)>& damage) {
    CheckpointBuilder pack = good;
    damage(pack);
    pack.Write(dir_);
    const auto run = RunPack(dir_, Numerics::kF32);
    return run.ok() ? "accepted" : std::string(run.status().message());
  }

  const TempDir temp_dir_;
  const std::string& dir_ = temp_dir_.path();
  const CheckpointBuilder good_;
};

constexpr char kMatrix[] = "layers.2.attn.wq_a";

TEST_F(BadPacksTest, MissingTensors) {
  EXPECT_THAT(ErrorOf([](auto& p) { p.tensors.erase("norm.weight"); }), HasSubstr("norm.weight"));
  EXPECT_THAT(ErrorOf([](auto& p) { p.tensors.erase(std::string(kMatrix) + ".suh"); }),
              HasSubstr(absl::StrCat(kMatrix, ".suh")));
  EXPECT_THAT(ErrorOf([](auto& p) { p.ErasePrefix(std::string(kMatrix) + "."); }),
              HasSubstr(kMatrix));
  EXPECT_THAT(ErrorOf([](auto& p) { p.ErasePrefix("layers.2.attn.wo_a.slice.1."); }),
              HasSubstr("layers.2.attn.wo_a"));
  EXPECT_THAT(ErrorOf([](auto& p) { p.ErasePrefix("mtp.1."); }), HasSubstr("mtp.1"))
      << "half a draft head is no draft head";
}

TEST_F(BadPacksTest, UnknownTensorsAreRefusedByName) {
  EXPECT_THAT(
      ErrorOf([](auto& p) { p.tensors["layers.2.attn.wq_c.weight"] = p.tensors["norm.weight"]; }),
      HasSubstr("layers.2.attn.wq_c.weight"));
  EXPECT_THAT(
      ErrorOf([](auto& p) {
        p.tensors[std::string(kMatrix) + ".weight"] = {"F32", {128, 128}, std::string(65536, '\0')};
      }),
      HasSubstr(kMatrix))
      << "a matrix in two storages";
}

TEST_F(BadPacksTest, ImpossibleTrellis) {
  const std::string name = std::string(kMatrix) + ".trellis";
  const auto reshape = [&](std::vector<int64_t> shape) {
    return ErrorOf([&](auto& p) {
      int64_t elements = 1;
      for (int64_t size : shape)
        elements *= size;
      p.tensors[name].shape = shape;
      p.tensors[name].bytes.resize(static_cast<size_t>(elements) * 2);
    });
  };
  EXPECT_THAT(reshape({8, 8, 144}), HasSubstr(name)) << "K = 9";
  EXPECT_THAT(reshape({8, 8, 0}), HasSubstr(name)) << "K = 0";
  EXPECT_THAT(reshape({8, 8, 50}), HasSubstr(name)) << "no whole K";
  EXPECT_THAT(reshape({8, 7, 80}), HasSubstr(name)) << "112 columns";
  EXPECT_THAT(reshape({16, 8, 80}),
              AllOf(HasSubstr(name), HasSubstr("[16, 8, 80]"), HasSubstr("[8, 8, 16 * bits]")))
      << "another input size";
  EXPECT_THAT(reshape({8, 640}), HasSubstr(name)) << "two dimensions";
}

TEST_F(BadPacksTest, WrongTypesAndMarkers) {
  EXPECT_THAT(ErrorOf([](auto& p) { p.tensors[std::string(kMatrix) + ".trellis"].dtype = "F16"; }),
              HasSubstr(absl::StrCat(kMatrix, ".trellis")));
  EXPECT_THAT(ErrorOf([](auto& p) {
                p.tensors[std::string(kMatrix) + ".mul1"].bytes = std::string("\1\2\3\4", 4);
              }),
              HasSubstr(absl::StrCat(kMatrix, ".mul1")));
  EXPECT_THAT(
      ErrorOf([](auto& p) {
        p.tensors[std::string(kMatrix) + ".mcg"] = {"I32", {}, std::string("\xed\x1f\xac\xcb", 4)};
      }),
      HasSubstr(kMatrix))
      << "both codebooks";
  EXPECT_THAT(ErrorOf([](auto& p) {
                p.tensors["layers.2.ffn_norm.weight"].shape = {64};
                p.tensors["layers.2.ffn_norm.weight"].bytes.resize(128);
              }),
              AllOf(HasSubstr("layers.2.ffn_norm.weight"), HasSubstr("64"), HasSubstr("128")));
}

TEST_F(BadPacksTest, NotFiniteScales) {
  const std::string nan("\x00\x7e", 2);
  EXPECT_THAT(
      ErrorOf([&](auto& p) { p.tensors[std::string(kMatrix) + ".suh"].bytes.replace(6, 2, nan); }),
      HasSubstr(absl::StrCat(kMatrix)));
  const std::string nan_f32("\x00\x00\xc0\x7f", 4);
  EXPECT_THAT(
      ErrorOf([&](auto& p) { p.tensors["layers.2.attn.attn_sink"].bytes.replace(0, 4, nan_f32); }),
      HasSubstr("layers.2.attn.attn_sink"));
  const CheckpointBuilder official = CheckpointBuilder::Read(kData + "micro-official");
  EXPECT_THAT(
      ErrorOf(official, [&](auto& p) { p.tensors["layers.2.attn.wq_a.scale"].bytes[3] = '\xff'; }),
      HasSubstr("layers.2.attn.wq_a"));
  EXPECT_THAT(
      ErrorOf(official, [&](auto& p) { p.tensors["layers.2.attn.wq_a.weight"].bytes[3] = '\x7f'; }),
      HasSubstr("layers.2.attn.wq_a"));
}

TEST_F(BadPacksTest, ZeroScaleColumnsAreLegalInExl3) {
  EXPECT_EQ(ErrorOf([](auto& p) {
              p.tensors[std::string(kMatrix) + ".svh"].bytes.replace(0, 2, std::string(2, '\0'));
            }),
            "accepted")
      << "an all-zero column of the original has svh 0";
}

TEST_F(BadPacksTest, FilesThatAreCutOrGone) {
  good_.Write(dir_);
  const auto size = std::filesystem::file_size(dir_ + "/model.safetensors");
  for (const double share : {0.0, 0.001, 0.3, 0.999}) {
    std::filesystem::resize_file(dir_ + "/model.safetensors",
                                 static_cast<uintmax_t>(static_cast<double>(size) * share));
    const auto run = RunPack(dir_, Numerics::kF32);
    ASSERT_FALSE(run.ok()) << share;
    EXPECT_THAT(std::string(run.status().message()), HasSubstr("model.safetensors")) << share;
    good_.Write(dir_);
  }
  std::filesystem::remove(dir_ + "/model.safetensors");
  EXPECT_THAT(std::string(RunPack(dir_, Numerics::kF32).status().message()),
              HasSubstr("model.safetensors"));
}

}  // namespace
}  // namespace twinspark::packs
