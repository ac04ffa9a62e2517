// Bounds of protocol specification 9 where an op enters: each field at its limit is taken, one past
// it is refused with the field's name; what this build does not do is refused by name.
#include "shard_worker/service/op_reader.h"

#include <cmath>
#include <functional>
#include <limits>
#include <string>
#include <utility>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "common/limits.h"
#include "common/sampling_bounds.h"
#include "proto/shard_worker.pb.h"

namespace twinspark {
namespace {

using ::testing::HasSubstr;

OpBounds Bounds() {
  OpBounds bounds;
  bounds.granted = {8,
                    64,
                    limits::kMaxRoundRows,
                    limits::kMaxShortPrefillRows,
                    limits::kMaxChunkRows,
                    limits::kMaxContext};
  bounds.vocab_size = 1000;
  bounds.max_drafts = 5;
  return bounds;
}

proto::Op NewOp() {
  proto::Op op;
  op.set_op_id(3);
  op.set_deadline_ms(2000);
  return op;
}

WorkerOp Read(const proto::Op& op) {
  return ReadOp(op.SerializeAsString(), Bounds());
}

proto::OpenSequence* AddOpen(proto::Op& op, int num_ids = 2) {
  proto::OpenSequence* open = op.add_controls()->mutable_open_sequence();
  for (int i = 0; i < num_ids; ++i)
    open->add_prompt_ids(static_cast<uint32_t>(i % 1000));
  open->set_total_ids(static_cast<uint32_t>(num_ids));
  open->set_num_prompt_ids(static_cast<uint32_t>(num_ids));
  return open;
}

TEST(OpReaderTest, EmptyOpIsAnOp) {
  const WorkerOp op = Read(NewOp());
  EXPECT_TRUE(op.refused.ok());
  EXPECT_EQ(op.op_id, 3u);
  EXPECT_EQ(op.deadline_ms, 2000);
  EXPECT_FALSE(op.bytes.empty());
}

TEST(OpReaderTest, SamplingArrivesWhole) {
  proto::Op wire = NewOp();
  proto::SamplingParams* sampling = AddOpen(wire)->mutable_sampling();
  sampling->set_temperature(0.7f);
  sampling->set_top_k(40);
  sampling->set_min_p(0.05f);
  sampling->set_presence_penalty(-1.5f);
  sampling->set_seed(0xFEDCBA9876543210);
  sampling->set_choice(2);
  sampling->set_min_tokens(4);
  sampling->add_stop_ids(1);
  proto::LogitBias* bias = sampling->add_logit_bias();
  bias->set_token_id(999);
  bias->set_bias(-100);
  sampling->add_bad_words()->add_ids(7);
  sampling->set_logprobs(0);
  const WorkerOp op = Read(wire);
  ASSERT_TRUE(op.refused.ok()) << op.refused;
  const auto& open = std::get<OpenSequencePart>(op.controls.at(0)).open;
  EXPECT_EQ(open.ids, (std::vector<int32_t>{0, 1}));
  EXPECT_FLOAT_EQ(open.sampling.temperature, 0.7f);
  EXPECT_EQ(open.sampling.top_k, 40);
  EXPECT_FLOAT_EQ(open.sampling.top_p, 1.0f) << "0 on the wire is off";
  EXPECT_FLOAT_EQ(open.sampling.repetition_penalty, 1.0f) << "0 on the wire is off";
  EXPECT_FLOAT_EQ(open.sampling.presence_penalty, -1.5f);
  EXPECT_EQ(open.sampling.seed, 0xFEDCBA9876543210);
  EXPECT_EQ(open.sampling.choice, 2u);
  EXPECT_EQ(open.sampling.min_tokens, 4);
  EXPECT_EQ(open.sampling.stop_ids, std::vector<int32_t>{1});
  EXPECT_EQ(open.sampling.logit_bias.at(0), (std::pair<int32_t, float>{999, -100.0f}));
  EXPECT_EQ(open.sampling.bad_words.at(0), std::vector<int32_t>{7});
  EXPECT_EQ(open.sampling.num_logprobs, 0) << "asked for, none of the others";
}

TEST(OpReaderTest, MaskIdZeroIsNoMask) {
  proto::Op wire = NewOp();
  proto::RoundSequence* round = wire.mutable_compute()->mutable_round()->add_sequences();
  round->set_first_position(10);
  round->set_k(1);
  round->add_mask_ids(0);
  round->add_mask_ids(5);
  const WorkerOp op = Read(wire);
  ASSERT_TRUE(op.refused.ok()) << op.refused;
  EXPECT_EQ(op.round.at(0).mask_ids, (std::vector<int32_t>{-1, 5}));
  EXPECT_EQ(op.round.at(0).first_position, 10);
  EXPECT_TRUE(op.round.at(0).kept_drafts);
}

using Change = std::function<void(proto::Op&)>;

using Cases = std::vector<std::pair<std::string, Change>>;

// Each change makes a valid op one that is refused, with this text and without a trace of the rest.
void ExpectRefused(const Cases& cases) {
  for (const auto& [text, change] : cases) {
    proto::Op wire = NewOp();
    change(wire);
    const WorkerOp op = Read(wire);
    EXPECT_EQ(op.refused.code(), absl::StatusCode::kInvalidArgument) << text;
    EXPECT_THAT(std::string(op.refused.message()), HasSubstr(text));
    EXPECT_TRUE(op.controls.empty() && op.round.empty() && op.short_prefill.empty() &&
                !op.chunk_slice.has_value());
  }
}

TEST(OpReaderTest, OpAndOpenSequenceHaveBounds) {
  ExpectRefused({
      {"deadline_ms", [](proto::Op& op) { op.set_deadline_ms(1999); }},
      {"deadline_ms", [](proto::Op& op) { op.set_deadline_ms(limits::kOpDeadlineMsMax + 1); }},
      {"number of controls",
       [](proto::Op& op) {
         for (int i = 0; i < 1000; ++i)
           op.add_controls()->mutable_ping();
       }},
      {"empty or of a newer protocol", [](proto::Op& op) { op.add_controls(); }},
      {"one part", [](proto::Op& op) { AddOpen(op, limits::kMaxPromptIdsPerPart + 1); }},
      {"one part", [](proto::Op& op) { AddOpen(op)->clear_prompt_ids(); }},
      {"prompt_ids", [](proto::Op& op) { AddOpen(op)->set_prompt_ids(0, 1000); }},
      {"total_ids", [](proto::Op& op) { AddOpen(op)->set_total_ids(limits::kMaxContext + 1); }},
      {"total_ids", [](proto::Op& op) { AddOpen(op)->set_total_ids(1); }},
      {"num_prompt_ids", [](proto::Op& op) { AddOpen(op)->set_num_prompt_ids(3); }},
      {"slot 8", [](proto::Op& op) { AddOpen(op)->set_slot(8); }},
      {"slot 8", [](proto::Op& op) { op.add_controls()->mutable_close_sequence()->set_slot(8); }},
      {"slot 9", [](proto::Op& op) { op.add_controls()->mutable_truncate()->set_slot(9); }},
  });
}

TEST(OpReaderTest, SamplingHasBounds) {
  const float nan = std::numeric_limits<float>::quiet_NaN();
  ExpectRefused({
      {"temperature",
       [&](proto::Op& op) { AddOpen(op)->mutable_sampling()->set_temperature(nan); }},
      {"top_p", [](proto::Op& op) { AddOpen(op)->mutable_sampling()->set_top_p(1.1f); }},
      {"min_p", [](proto::Op& op) { AddOpen(op)->mutable_sampling()->set_min_p(-0.1f); }},
      {"logprobs", [](proto::Op& op) { AddOpen(op)->mutable_sampling()->set_logprobs(21); }},
      {"prompt_logprobs", [](proto::Op& op) { AddOpen(op)->set_prompt_logprobs(21); }},
      {"stop id", [](proto::Op& op) { AddOpen(op)->mutable_sampling()->add_stop_ids(1000); }},
      {"stop ids",
       [](proto::Op& op) {
         proto::SamplingParams* sampling = AddOpen(op)->mutable_sampling();
         for (int i = 0; i < limits::kMaxStopIds + 2; ++i)
           sampling->add_stop_ids(1);
       }},
      {"logit_bias pairs",
       [](proto::Op& op) {
         proto::SamplingParams* sampling = AddOpen(op)->mutable_sampling();
         for (int i = 0; i <= limits::kMaxLogitBias; ++i)
           sampling->add_logit_bias();
       }},
      {"bad word", [](proto::Op& op) { AddOpen(op)->mutable_sampling()->add_bad_words(); }},
  });
}

TEST(OpReaderTest, PagesAndMasksHaveBounds) {
  ExpectRefused({
      {"physical_page",
       [](proto::Op& op) {
         op.add_controls()->mutable_map_pages()->add_pages()->set_physical_page(64);
       }},
      {"logical_page",
       [](proto::Op& op) {
         op.add_controls()->mutable_map_pages()->add_pages()->set_logical_page(limits::kMaxContext /
                                                                               limits::kPageTokens);
       }},
      {"mask_id", [](proto::Op& op) { op.add_controls()->mutable_set_mask()->set_packed("x"); }},
      {"has no bits", [](proto::Op& op) { op.add_controls()->mutable_set_mask()->set_mask_id(1); }},
      {"packed bytes",
       [](proto::Op& op) {
         proto::SetMask* mask = op.add_controls()->mutable_set_mask();
         mask->set_mask_id(1);
         mask->set_packed(std::string(124, 'x'));
       }},
  });
}

TEST(OpReaderTest, ComputeHasBounds) {
  const auto prefill = [](proto::Op& op, uint32_t begin, uint32_t end) {
    proto::PrefillSequence* sequence =
        op.mutable_compute()->mutable_short_prefill()->add_sequences();
    sequence->set_first_position(begin);
    sequence->set_end_position(end);
  };
  const auto round = [](proto::Op& op) {
    proto::RoundSequence* sequence = op.mutable_compute()->mutable_round()->add_sequences();
    sequence->set_after_previous(true);
    return sequence;
  };
  ExpectRefused({
      {"rows of the Round", [](proto::Op& op) { op.mutable_compute()->mutable_round(); }},
      {"Round.k", [&](proto::Op& op) { round(op)->set_k(6); }},
      {"draft_ids", [&](proto::Op& op) { round(op)->add_draft_ids(1); }},
      {"after_previous",
       [&](proto::Op& op) {
         proto::RoundSequence* sequence = round(op);
         sequence->set_source(proto::DRAFTS_EXPLICIT);
         sequence->set_k(1);
         sequence->add_draft_ids(1);
       }},
      {"neither", [&](proto::Op& op) { round(op)->clear_position(); }},
      {"mask_ids",
       [&](proto::Op& op) {
         proto::RoundSequence* sequence = round(op);
         sequence->add_mask_ids(1);
         sequence->add_mask_ids(1);
       }},
      {"twice", [&](proto::Op& op) { round(op), round(op); }},
      {"end_position", [&](proto::Op& op) { prefill(op, 5, 5); }},
      {"end_position", [&](proto::Op& op) { prefill(op, 0, limits::kMaxContext + 1); }},
      {"rows of the ShortPrefill",
       [&](proto::Op& op) { prefill(op, 0, limits::kMaxShortPrefillRows + 1); }},
      {"rows of the ChunkSlice",
       [](proto::Op& op) {
         proto::ChunkSlice* chunk = op.mutable_compute()->mutable_chunk_slice();
         chunk->set_end_position(limits::kMaxChunkRows + 1);
         chunk->set_end_layer(1);
       }},
      {"end_layer",
       [](proto::Op& op) { op.mutable_compute()->mutable_chunk_slice()->set_end_position(1); }},
  });
}

TEST(OpReaderTest, FullRoundIsTaken) {
  proto::Op wire = NewOp();
  for (uint32_t slot = 0; slot < 8; ++slot) {
    proto::RoundSequence* sequence = wire.mutable_compute()->mutable_round()->add_sequences();
    sequence->set_after_previous(true);
    sequence->set_slot(slot);
    sequence->set_k(5);
  }
  EXPECT_TRUE(Read(wire).refused.ok());
  OpBounds small = Bounds();
  small.granted.max_round_rows = 47;
  EXPECT_THAT(std::string(ReadOp(wire.SerializeAsString(), small).refused.message()),
              HasSubstr("rows of the Round"));
}

// The numbers of common/sampling_bounds.h, which the API and the engine check too: an op that they
// made is never refused for its sampling, and what lies beyond is.
TEST(OpReaderTest, SamplingBoundsAreThoseOfTheApi) {
  namespace bounds = sampling_bounds;
  using Set = std::function<void(proto::SamplingParams*, float)>;
  struct Field {
    const char* name;
    bounds::Range range;
    Set set;
    bool is_integer = false;
  };
  const std::vector<Field> fields = {
      {"temperature", bounds::kTemperature, &proto::SamplingParams::set_temperature},
      {"top_p", bounds::kTopP, &proto::SamplingParams::set_top_p},
      {"min_p", bounds::kMinP, &proto::SamplingParams::set_min_p},
      {"repetition_penalty", bounds::kRepetitionPenalty,
       &proto::SamplingParams::set_repetition_penalty},
      {"presence_penalty", bounds::kPresencePenalty, &proto::SamplingParams::set_presence_penalty},
      {"frequency_penalty", bounds::kFrequencyPenalty,
       &proto::SamplingParams::set_frequency_penalty},
      {"logit_bias value", bounds::kLogitBias,
       [](proto::SamplingParams* s, float v) { s->add_logit_bias()->set_bias(v); }},
      {"min_tokens", bounds::kMinTokens,
       [](proto::SamplingParams* s, float v) { s->set_min_tokens(static_cast<uint32_t>(v)); },
       true},
      {"logprobs", bounds::kLogprobs,
       [](proto::SamplingParams* s, float v) { s->set_logprobs(static_cast<uint32_t>(v)); }, true},
  };
  const auto status = [](const Field& field, float value) {
    proto::Op wire = NewOp();
    field.set(AddOpen(wire)->mutable_sampling(), value);
    return Read(wire).refused;
  };
  for (const Field& field : fields) {
    const auto low = static_cast<float>(field.range.low);
    const auto high = static_cast<float>(field.range.high);
    EXPECT_TRUE(status(field, low).ok()) << status(field, low);
    EXPECT_TRUE(status(field, high).ok()) << status(field, high);
    const float above = field.is_integer ? high + 1 : std::nextafterf(high, HUGE_VALF);
    EXPECT_THAT(std::string(status(field, above).message()), HasSubstr(field.name));
    // Unsigned numbers have nothing below 0.
    if (field.is_integer) continue;
    const float below = std::nextafterf(low, -HUGE_VALF);
    EXPECT_THAT(std::string(status(field, below).message()), HasSubstr(field.name));
  }
}

TEST(OpReaderTest, UnbuiltPartsAreNamed) {
  const std::vector<std::pair<std::string, Change>> cases = {
      {"Snapshot", [](proto::Op& op) { op.add_controls()->mutable_snapshot(); }},
      {"DropSnapshot", [](proto::Op& op) { op.add_controls()->mutable_drop_snapshot(); }},
      {"LoadEmbeddings", [](proto::Op& op) { op.add_controls()->mutable_load_embeddings(); }},
      {"DropChunk", [](proto::Op& op) { op.add_controls()->mutable_drop_chunk(); }},
      {"image_spans", [](proto::Op& op) { AddOpen(op)->add_image_spans(); }},
      {"restore", [](proto::Op& op) { AddOpen(op)->mutable_restore(); }},
  };
  for (const auto& [text, change] : cases) {
    proto::Op wire = NewOp();
    change(wire);
    const WorkerOp op = Read(wire);
    EXPECT_EQ(op.refused.code(), absl::StatusCode::kUnimplemented) << text;
    EXPECT_THAT(std::string(op.refused.message()), HasSubstr(text));
    EXPECT_EQ(op.op_id, 3u) << "answered in its place in the log";
  }
}

}  // namespace
}  // namespace twinspark
