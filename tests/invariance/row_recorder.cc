#include "tests/invariance/row_recorder.h"

#include <bit>

#include <boost/json.hpp>

#include "absl/strings/str_cat.h"

#include "common/check.h"
#include "common/file_util.h"

namespace twinspark::invariance {
namespace {

const std::string kDemo = TWINSPARK_SOURCE_DIR "/deploy/demo_model";

}  // namespace

void RowRecorder::Expect(const StepPlan& plan, const std::map<int, int64_t>& next_position) {
  expected_.clear();
  taken_ = 0;
  for (const RoundSequence& round : plan.round) {
    for (int j = 0; j <= round.num_drafts; ++j)
      expected_.emplace_back(round.slot, next_position.at(round.slot) + j);
  }
  for (const PrefillRange& range : plan.prefill) {
    for (int64_t p = range.begin; p < range.end; ++p)
      expected_.emplace_back(range.slot, p);
  }
}

void RowRecorder::Tensor(const std::string& name, const ConstTensorView& value) {
  if (name != tensor_) return;
  for (int64_t r = 0; r < value.rows; ++r) {
    CHECK_LT(taken_, expected_.size()) << name << " has more rows than the plan";
    RowBits bits(static_cast<size_t>(value.cols));
    for (int64_t c = 0; c < value.cols; ++c) {
      bits[static_cast<size_t>(c)] = value.dtype == DType::kBf16
                                         ? value.Row<Bf16>(r)[c].bits
                                         : std::bit_cast<uint32_t>(value.Row<float>(r)[c]);
    }
    rows_[expected_[taken_++]] = std::move(bits);
  }
}

Runner::Runner(const GroupOptions& options) {
  ModelOptions model;
  model.world = options.world;
  model.f16_copy = options.f16_copy;
  model.limits.num_slots = options.num_slots;
  model.limits.num_pages = options.num_slots * 16;
  model.limits.max_step_rows = 1024;
  model.limits.max_logits_rows = 1024;  // with an observer every row has logits
  auto group = golden::ModelGroup::Load(kDemo, model, options.threads);
  CHECK(group.ok()) << group.status();
  group_ = *std::move(group);
  recorder_ = std::make_unique<RowRecorder>(absl::StrCat("L", config().num_layers - 1, ".S_out"));
  // Every rank is observed, so that all compute the same rows of logits; the first one is listened
  // to.
  ignored_ = std::make_unique<RowRecorder>("none");
  for (int rank = 0; rank < group_->world(); ++rank)
    group_->model(rank).SetObserver(rank == 0 ? recorder_.get() : ignored_.get());
}

Runner::~Runner() {
  for (int rank = 0; rank < group_->world(); ++rank)
    group_->model(rank).SetObserver(nullptr);
}

void Runner::Open(int slot,
                  const std::vector<int32_t>& ids,
                  int64_t num_prompt_ids,
                  const SamplingParams& sampling,
                  int64_t max_length) {
  OpenSequence open;
  open.slot = slot;
  open.ids = ids;
  open.num_prompt_ids = num_prompt_ids;
  open.sampling = sampling;
  const absl::Status status = group_->Open(open, max_length);
  CHECK(status.ok()) << status;
  Sequence& sequence = sequences_[slot];
  sequence.ids = ids.size();
  sequence.next = 0;
}

void Runner::Close(int slot) {
  const absl::Status status = group_->Close(slot);
  CHECK(status.ok()) << status;
}

void Runner::Truncate(int slot, int64_t length) {
  for (int rank = 0; rank < group_->world(); ++rank) {
    const absl::Status status = group_->model(rank).Truncate(slot, length);
    CHECK(status.ok()) << status;
  }
  Sequence& sequence = sequences_.at(slot);
  sequence.next = length;
  sequence.trace.tokens.resize(static_cast<size_t>(length) - sequence.ids + 1);
}

void Runner::Step(StepPlan plan) {
  std::map<int, int64_t> next;
  for (auto& [slot, sequence] : sequences_)
    next[slot] = sequence.next;
  for (RoundSequence& round : plan.round)
    round.first_position = next.at(round.slot);
  recorder_->Expect(plan, next);
  const auto result = group_->RunStep(plan);
  CHECK(result.ok()) << result.status();
  size_t index = 0;
  const auto take = [&](int slot, int64_t end) {
    Sequence& sequence = sequences_.at(slot);
    const SequenceResult& one = result->sequences.at(index++);
    for (int64_t p = sequence.next; p < end; ++p)
      sequence.trace.rows[p] = recorder_->rows().at({slot, p});
    sequence.next = end;
    sequence.trace.tokens.insert(sequence.trace.tokens.end(), one.tokens.begin(), one.tokens.end());
    if (!one.drafts.empty()) sequence.trace.drafts[end] = {one.drafts, one.draft_confidences};
  };
  for (const RoundSequence& round : plan.round)
    take(round.slot, next.at(round.slot) + result->sequences.at(index).accepted + 1);
  for (const PrefillRange& range : plan.prefill)
    take(range.slot, range.end);
}

void Runner::Prefill(int slot, int64_t chunk, bool draft_next) {
  const auto end = static_cast<int64_t>(sequences_.at(slot).ids);
  for (int64_t at = 0; at < end; at += chunk) {
    StepPlan plan;
    plan.prefill.push_back({slot, at, std::min(end, at + chunk), draft_next, -1});
    Step(plan);
  }
}

void Runner::Generate(int slot, size_t count, int num_drafts) {
  while (sequences_.at(slot).trace.tokens.size() < count) {
    StepPlan plan;
    RoundSequence round;
    round.slot = slot;
    round.num_drafts = num_drafts;
    round.draft_next = true;
    plan.round.push_back(round);
    Step(plan);
  }
}

Trace& Runner::trace(int slot) {
  return sequences_.at(slot).trace;
}

std::vector<int32_t> DemoPrompt(const std::string& case_name) {
  const auto text = ReadFile(kDemo + "/golden.json", 1 << 24);
  CHECK(text.ok()) << text.status();
  const boost::json::value golden = boost::json::parse(*text);
  for (const boost::json::value& one : golden.at("cases").as_array()) {
    if (one.at("name").as_string() != std::string_view(case_name)) continue;
    std::vector<int32_t> ids;
    for (const boost::json::value& id : one.at("prompt_ids").as_array())
      ids.push_back(id.to_number<int32_t>());
    return ids;
  }
  CHECK(false) << "no case " << case_name;
  return {};
}

}  // namespace twinspark::invariance
