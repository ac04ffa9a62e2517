// The pack layouts P1, P2, P3 and plain checkpoints give the same model. Each pack is derived from
// the micro models and compared with the same matrices dequantised: in f32 numerics within rounding
// of the sums, and exactly where the storage is exact in bf16.
#include "absl/strings/str_cat.h"
#include <gtest/gtest.h>

#include "common/testing/temp_dir.h"
#include "tests/packs/checkpoint_builder.h"
#include "tests/packs/pack_run.h"

namespace twinspark::packs {
namespace {

const std::string kData = TWINSPARK_SOURCE_DIR "/tests/golden/data/model/";

class PackLayoutsTest : public ::testing::Test {
 protected:
  PackRun Run(const CheckpointBuilder& checkpoint, Numerics numerics) {
    checkpoint.Write(dir_);
    const auto run = RunPack(dir_, numerics);
    EXPECT_TRUE(run.ok()) << run.status();
    return run.ok() ? *run : PackRun();
  }

  static void ExpectNear(const PackRun& a, const PackRun& b, float bound) {
    EXPECT_EQ(a.tokens, b.tokens);
    EXPECT_EQ(a.drafts, b.drafts);
    ASSERT_EQ(a.logprobs.size(), b.logprobs.size());
    float worst = 0;
    for (size_t i = 0; i < a.logprobs.size(); ++i) {
      const TokenLogprobs &of_a = a.logprobs[i], &of_b = b.logprobs[i];
      worst = std::max(worst, std::abs(of_a.token.logprob - of_b.token.logprob));
      ASSERT_EQ(of_a.top.size(), of_b.top.size());
      for (size_t j = 0; j < of_a.top.size(); ++j)
        worst = std::max(worst, std::abs(of_a.top[j].logprob - of_b.top[j].logprob));
    }
    EXPECT_LE(worst, bound);
    std::cout << "worst logprob difference " << worst << "\n";
  }

  // P2: EXL3 for the routed experts, everything else as in the official checkpoint.
  static CheckpointBuilder MakeP2() {
    CheckpointBuilder p2 = CheckpointBuilder::Read(kData + "micro-official");
    const CheckpointBuilder exl3 = CheckpointBuilder::Read(kData + "micro-exl3");
    for (int layer = 0; layer < 7; ++layer) {
      for (int expert = 0; expert < 4; ++expert) {
        for (const char* w : {"w1", "w2", "w3"})
          p2.TakeMatrix(exl3, absl::StrCat("layers.", layer, ".ffn.experts.", expert, ".", w));
      }
    }
    return p2;
  }

  const TempDir temp_dir_;
  const std::string& dir_ = temp_dir_.path();
};

TEST_F(PackLayoutsTest, OfficialStorageIsExactlyItsBf16Copy) {
  const CheckpointBuilder official = CheckpointBuilder::Read(kData + "micro-official");
  for (Numerics numerics : {Numerics::kBf16, Numerics::kF32})
    ExpectNear(Run(official, numerics), Run(Dequantised(official), numerics), 0);
}

TEST_F(PackLayoutsTest, P1) {
  const CheckpointBuilder p1 = CheckpointBuilder::Read(kData + "micro-exl3");
  ExpectNear(Run(p1, Numerics::kF32), Run(Dequantised(p1), Numerics::kF32), 2e-4f);
}

TEST_F(PackLayoutsTest, P2RoutedExpertsOnly) {
  const CheckpointBuilder p2 = MakeP2();
  const PackRun run = Run(p2, Numerics::kF32);
  EXPECT_TRUE(run.has_drafts);
  ExpectNear(run, Run(Dequantised(p2), Numerics::kF32), 2e-4f);
}

TEST_F(PackLayoutsTest, P3WithoutDraftHead) {
  CheckpointBuilder p3 = CheckpointBuilder::Read(kData + "micro-exl3");
  for (const char* name : {"layers.0.engram.wkv", "layers.3.engram.wkv", "layers.1.attn.indexer.wk",
                           "layers.3.attn.indexer.wk", "layers.4.attn.indexer.wk"}) {
    const Entry dense = DenseOfExl3(p3, name);
    p3.ErasePrefix(std::string(name) + ".");
    p3.tensors[std::string(name) + ".weight"] = dense;
  }
  p3.ErasePrefix("mtp.");
  for (int layer : {1, 3, 4})
    p3.tensors[absl::StrCat("layers.", layer, ".attn.compressor.ape")] = {
        "F16", {2, 128}, std::string(512, '\0')};
  const PackRun run = Run(p3, Numerics::kF32);
  EXPECT_FALSE(run.has_drafts);
  ExpectNear(run, Run(Dequantised(p3), Numerics::kF32), 2e-4f);
}

TEST_F(PackLayoutsTest, HeadMayBeNamedLmHead) {
  CheckpointBuilder checkpoint = CheckpointBuilder::Read(kData + "micro-official");
  const PackRun expected = Run(checkpoint, Numerics::kBf16);
  checkpoint.tensors["lm_head.weight"] = checkpoint.tensors.at("head.weight");
  checkpoint.tensors.erase("head.weight");
  ExpectNear(Run(checkpoint, Numerics::kBf16), expected, 0);
}

TEST_F(PackLayoutsTest, EveryCodebook) {
  // The ring of symbols is the same; another codebook makes another matrix of it.
  for (const char* marker : {"mcg", ""}) {
    CheckpointBuilder pack = CheckpointBuilder::Read(kData + "micro-exl3");
    for (int expert = 0; expert < 4; ++expert) {
      const std::string matrix = absl::StrCat("layers.2.ffn.experts.", expert, ".w1");
      pack.tensors.erase(matrix + ".mul1");
      const int32_t value = -877912083;
      if (*marker != '\0')
        pack.tensors[matrix + "." + marker] = {
            "I32", {}, std::string(reinterpret_cast<const char*>(&value), 4)};
    }
    ExpectNear(Run(pack, Numerics::kF32), Run(Dequantised(pack), Numerics::kF32), 2e-4f);
  }
}

}  // namespace
}  // namespace twinspark::packs
