// Fuzz target: any bytes as an op log. The input is a row of records (u16 length, bytes); each is
// read and executed like an op from the stream, against a backend of a few lines. Whatever comes,
// nothing crashes, slots and pages stay within what was granted, a refused op has no effect, and
// the log stops at its first error.
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string>
#include <utility>
#include <vector>

#include "common/check.h"
#include "common/limits.h"
#include "common/testing/fuzz_driver.h"
#include "proto/shard_worker.pb.h"
#include "shard_worker/runtime/op_executor.h"
#include "shard_worker/service/op_reader.h"
#include "shard_worker/service/result_writer.h"
#include "shard_worker/testing/fake_backend.h"

namespace twinspark {
namespace {

constexpr int kSlots = 4;
constexpr int kPages = 16;

OpBounds Bounds() {
  OpBounds bounds;
  bounds.granted = {kSlots, kPages, limits::kMaxRoundRows, 256, 512, 1024};
  bounds.vocab_size = FakeBackend::kVocab;
  bounds.max_drafts = FakeBackend::kMaxDrafts;
  return bounds;
}

void RunOne(FakeBackend& backend, OpExecutor& executor, std::string bytes, bool* stopped) {
  const int slots_before = backend.SlotsInUse();
  const WorkerOp op = ReadOp(std::move(bytes), Bounds());
  const OpOutcome outcome = executor.Execute(op);
  CHECK_LE(backend.SlotsInUse(), kSlots);
  CHECK_LE(backend.PagesInUse(), kSlots * kPages);
  if (!op.refused.ok()) {
    CHECK_EQ(backend.SlotsInUse(), slots_before);
    CHECK(outcome.round.empty() && outcome.short_prefill.empty());
    CHECK(!outcome.status.ok());
  }
  proto::OpResult wire;
  WriteOpResult(outcome, true, &wire);
  CHECK_EQ(wire.op_id(), op.op_id);
  for (const proto::SequenceResult& sequence : wire.round()) {
    // A slot whose row was not finite is answered with that flag alone.
    CHECK(sequence.non_finite() ||
          static_cast<uint32_t>(sequence.tokens_size()) == sequence.num_accepted() + 1)
        << sequence.tokens_size() << " tokens, " << sequence.num_accepted() << " accepted";
  }
  *stopped = !outcome.status.ok() && !absl::IsUnimplemented(outcome.status);
}

void Append(std::string& log, const proto::Op& op) {
  const std::string bytes = op.SerializeAsString();
  const auto length = static_cast<uint16_t>(bytes.size());
  log.append(reinterpret_cast<const char*>(&length), sizeof(length));
  log += bytes;
}

// A log of every op there is, valid until mutated.
std::vector<std::string> Seeds() {
  std::string log;
  proto::Op op;
  op.set_deadline_ms(2000);
  op.set_op_id(1);
  proto::OpenSequence* open = op.add_controls()->mutable_open_sequence();
  for (uint32_t id = 1; id < 40; ++id)
    open->add_prompt_ids(id);
  open->set_total_ids(39);
  open->set_num_prompt_ids(39);
  open->set_draft_allowed(true);
  open->mutable_sampling()->set_temperature(0.5f);
  open->set_prompt_logprobs(3);
  open->mutable_sampling()->add_stop_ids(1);
  open->mutable_sampling()->add_bad_words()->add_ids(3);
  for (uint32_t page = 0; page < 4; ++page) {
    proto::PageMapping* mapping = op.add_controls()->mutable_map_pages()->add_pages();
    mapping->set_logical_page(page);
    mapping->set_physical_page(page + 1);
  }
  proto::SetMask* mask = op.add_controls()->mutable_set_mask();
  mask->set_mask_id(1);
  mask->mutable_runs()->add_lengths(10);
  mask->mutable_runs()->add_lengths(FakeBackend::kVocab - 10);
  proto::PrefillSequence* prefill = op.mutable_compute()->mutable_short_prefill()->add_sequences();
  prefill->set_end_position(39);
  prefill->set_draft_next(true);
  Append(log, op);
  for (uint64_t op_id = 2; op_id <= 4; ++op_id) {
    proto::Op round;
    round.set_deadline_ms(2000);
    round.set_op_id(op_id);
    proto::RoundSequence* sequence = round.mutable_compute()->mutable_round()->add_sequences();
    sequence->set_after_previous(true);
    sequence->set_k(2);
    sequence->set_draft_next(true);
    for (int row = 0; row < 3; ++row)
      sequence->add_mask_ids(1);
    Append(log, round);
  }
  proto::Op last;
  last.set_deadline_ms(2000);
  last.set_op_id(5);
  last.add_controls()->mutable_truncate()->set_committed_length(39);
  last.add_controls()->mutable_set_sampling()->mutable_sampling()->set_top_k(5);
  last.add_controls()->mutable_ping();
  last.add_controls()->mutable_snapshot();
  last.add_controls()->mutable_close_sequence();
  proto::ChunkSlice* chunk = last.mutable_compute()->mutable_chunk_slice();
  chunk->set_end_position(64);
  chunk->set_end_layer(FakeBackend::kLayers);
  Append(log, last);
  return {log};
}

}  // namespace
}  // namespace twinspark

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  twinspark::FakeBackend backend;
  twinspark::OpExecutor executor(backend, twinspark::FakeBackend::kVocab,
                                 twinspark::FakeBackend::kLayers);
  bool stopped = false;
  while (size >= 2 && !stopped) {
    uint16_t length = 0;
    std::memcpy(&length, data, sizeof(length));
    data += 2;
    size -= 2;
    const size_t take = std::min<size_t>(length, size);
    twinspark::RunOne(backend, executor, std::string(reinterpret_cast<const char*>(data), take),
                      &stopped);
    data += take;
    size -= take;
  }
  return 0;
}

TWINSPARK_FUZZ_MAIN(twinspark::Seeds())
