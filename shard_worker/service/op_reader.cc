// See op_reader.h.
#include "shard_worker/service/op_reader.h"

#include <cstdint>
#include <string>
#include <utility>

#include "absl/container/flat_hash_set.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"

#include "common/limits.h"
#include "common/sampling_bounds.h"
#include "common/status_macros.h"
#include "proto/shard_worker.pb.h"

namespace twinspark {
namespace {

namespace bounds = sampling_bounds;

absl::Status Invalid(const char* field, int64_t value, int64_t low, int64_t high) {
  return absl::InvalidArgumentError(
      absl::StrCat(field, " is ", value, ", allowed ", low, " to ", high));
}

absl::Status CheckRange(const char* field, int64_t value, int64_t low, int64_t high) {
  return value >= low && value <= high ? absl::OkStatus() : Invalid(field, value, low, high);
}

class OpParser {
 public:
  OpParser(const OpBounds& bounds, WorkerOp& op) : bounds_(bounds), op_(op) {}

  absl::Status Parse(const proto::Op& wire) {
    RETURN_IF_ERROR(CheckRange("deadline_ms", wire.deadline_ms(), 2000, limits::kOpDeadlineMsMax));
    // A slot may be opened, mapped, truncated and closed in one op; masks come per row.
    RETURN_IF_ERROR(CheckRange("number of controls", wire.controls_size(), 0, kMaxControls));
    for (const proto::Control& control : wire.controls())
      RETURN_IF_ERROR(AddControl(control));
    if (!wire.has_compute()) return absl::OkStatus();
    const proto::Compute& compute = wire.compute();
    if (compute.has_round()) RETURN_IF_ERROR(AddRound(compute.round()));
    if (compute.has_short_prefill()) RETURN_IF_ERROR(AddShortPrefill(compute.short_prefill()));
    if (compute.has_chunk_slice()) RETURN_IF_ERROR(AddChunkSlice(compute.chunk_slice()));
    return absl::OkStatus();
  }

 private:
  static constexpr int kMaxControls = 8 * limits::kMaxSlots + limits::kMaxRoundRows;

  absl::Status CheckSlot(const char* op, uint32_t slot) const {
    if (slot < static_cast<uint32_t>(bounds_.granted.num_slots)) return absl::OkStatus();
    return absl::InvalidArgumentError(absl::StrCat(
        op, ": slot ", slot, " does not exist, there are ", bounds_.granted.num_slots));
  }

  absl::Status CheckToken(const char* field, uint32_t id) const {
    return CheckRange(field, id, 0, bounds_.vocab_size - 1);
  }

  // Mask ids on the wire: 0 = none; inside: -1 = none.
  static absl::StatusOr<int32_t> ReadMaskId(uint32_t mask_id) {
    RETURN_IF_ERROR(CheckRange("mask id", mask_id, 0, INT32_MAX));
    return mask_id == 0 ? -1 : static_cast<int32_t>(mask_id);
  }

  // A slot computes at most once per op.
  absl::Status UseSlot(const char* op, uint32_t slot) {
    RETURN_IF_ERROR(CheckSlot(op, slot));
    if (used_slots_.insert(slot).second) return absl::OkStatus();
    return absl::InvalidArgumentError(
        absl::StrCat(op, ": slot ", slot, " has work twice in one op"));
  }

  absl::StatusOr<SamplingParams> ReadSampling(const proto::SamplingParams& wire) const;
  absl::Status AddControl(const proto::Control& control);
  absl::Status AddOpen(const proto::OpenSequence& wire);
  absl::Status AddMapPages(const proto::MapPages& wire);
  absl::Status AddSetMask(const proto::SetMask& wire);
  absl::Status AddRound(const proto::Round& wire);
  absl::StatusOr<RoundSequence> ReadRoundSequence(const proto::RoundSequence& wire);
  absl::Status AddShortPrefill(const proto::ShortPrefill& wire);
  absl::Status AddChunkSlice(const proto::ChunkSlice& wire);

  const OpBounds& bounds_;
  WorkerOp& op_;
  absl::flat_hash_set<uint32_t> used_slots_;
};

absl::Status CheckFloat(const char* field, float value, const bounds::Range& range) {
  const double number = static_cast<double>(value);
  if (number >= range.low && number <= range.high) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat(field, " is ", value, ", allowed ", range.low, " to ", range.high));
}

absl::Status CheckRange(const char* field, int64_t value, const bounds::Range& range) {
  return CheckRange(field, value, static_cast<int64_t>(range.low),
                    static_cast<int64_t>(range.high));
}

absl::Status CheckSize(const char* field, int size, size_t most) {
  return CheckRange(field, size, 0, static_cast<int64_t>(most));
}

absl::StatusOr<SamplingParams> OpParser::ReadSampling(const proto::SamplingParams& wire) const {
  SamplingParams params;
  RETURN_IF_ERROR(CheckFloat("temperature", wire.temperature(), bounds::kTemperature));
  RETURN_IF_ERROR(CheckFloat("min_p", wire.min_p(), bounds::kMinP));
  RETURN_IF_ERROR(
      CheckFloat("presence_penalty", wire.presence_penalty(), bounds::kPresencePenalty));
  RETURN_IF_ERROR(
      CheckFloat("frequency_penalty", wire.frequency_penalty(), bounds::kFrequencyPenalty));
  // 0 on the wire: off.
  if (wire.top_p() != 0) RETURN_IF_ERROR(CheckFloat("top_p", wire.top_p(), bounds::kTopP));
  if (wire.repetition_penalty() != 0) {
    RETURN_IF_ERROR(
        CheckFloat("repetition_penalty", wire.repetition_penalty(), bounds::kRepetitionPenalty));
  }
  RETURN_IF_ERROR(CheckRange("top_k", wire.top_k(), bounds::kTopK));
  RETURN_IF_ERROR(CheckRange("min_tokens", wire.min_tokens(), bounds::kMinTokens));
  RETURN_IF_ERROR(CheckSize("logit_bias pairs", wire.logit_bias_size(), bounds::kMaxLogitBiases));
  RETURN_IF_ERROR(CheckSize("stop ids", wire.stop_ids_size(), bounds::kMaxStopIds));
  RETURN_IF_ERROR(CheckSize("bad words", wire.bad_words_size(), bounds::kMaxBadWordSpellings));
  params.temperature = wire.temperature();
  params.top_k = static_cast<int32_t>(wire.top_k());
  params.top_p = wire.top_p() == 0 ? 1.0f : wire.top_p();
  params.min_p = wire.min_p();
  params.repetition_penalty = wire.repetition_penalty() == 0 ? 1.0f : wire.repetition_penalty();
  params.presence_penalty = wire.presence_penalty();
  params.frequency_penalty = wire.frequency_penalty();
  params.seed = wire.seed();
  params.choice = wire.choice();
  params.min_tokens = static_cast<int32_t>(wire.min_tokens());
  for (const proto::LogitBias& pair : wire.logit_bias()) {
    RETURN_IF_ERROR(CheckToken("logit_bias token", pair.token_id()));
    RETURN_IF_ERROR(CheckFloat("logit_bias value", pair.bias(), bounds::kLogitBias));
    params.logit_bias.emplace_back(static_cast<int32_t>(pair.token_id()), pair.bias());
  }
  for (const uint32_t id : wire.stop_ids()) {
    RETURN_IF_ERROR(CheckToken("stop id", id));
    params.stop_ids.push_back(static_cast<int32_t>(id));
  }
  for (const proto::TokenIds& word : wire.bad_words()) {
    RETURN_IF_ERROR(CheckRange("ids of a bad word", word.ids_size(), 1, bounds::kMaxBadWordIds));
    std::vector<int32_t>& ids = params.bad_words.emplace_back();
    for (const uint32_t id : word.ids()) {
      RETURN_IF_ERROR(CheckToken("bad word id", id));
      ids.push_back(static_cast<int32_t>(id));
    }
  }
  if (wire.has_logprobs()) {
    RETURN_IF_ERROR(CheckRange("logprobs", wire.logprobs(), bounds::kLogprobs));
    params.num_logprobs = static_cast<int32_t>(wire.logprobs());
  }
  return params;
}

absl::Status OpParser::AddOpen(const proto::OpenSequence& wire) {
  RETURN_IF_ERROR(CheckSlot("OpenSequence", wire.slot()));
  if (wire.image_spans_size() > 0) return absl::UnimplementedError("OpenSequence.image_spans");
  if (wire.has_restore()) return absl::UnimplementedError("OpenSequence.restore");
  RETURN_IF_ERROR(CheckRange("OpenSequence.prompt_ids of one part", wire.prompt_ids_size(), 1,
                             limits::kMaxPromptIdsPerPart));
  OpenSequencePart part;
  part.request_id_hash = wire.request_id_hash();
  part.ids_offset = wire.ids_offset();
  part.total_ids = wire.total_ids();
  part.open.slot = static_cast<int>(wire.slot());
  part.open.ids.reserve(static_cast<size_t>(wire.prompt_ids_size()));
  for (const uint32_t id : wire.prompt_ids()) {
    RETURN_IF_ERROR(CheckToken("OpenSequence.prompt_ids", id));
    part.open.ids.push_back(static_cast<int32_t>(id));
  }
  if (part.ids_offset == 0) {
    RETURN_IF_ERROR(CheckRange("OpenSequence.total_ids", wire.total_ids(), wire.prompt_ids_size(),
                               bounds_.granted.max_context));
    RETURN_IF_ERROR(
        CheckRange("OpenSequence.num_prompt_ids", wire.num_prompt_ids(), 1, wire.total_ids()));
    part.open.num_prompt_ids = wire.num_prompt_ids();
    part.open.drafts_allowed = wire.draft_allowed();
    if (wire.has_prompt_logprobs()) {
      RETURN_IF_ERROR(
          CheckRange("OpenSequence.prompt_logprobs", wire.prompt_logprobs(), bounds::kLogprobs));
      part.open.num_prompt_logprobs = static_cast<int32_t>(wire.prompt_logprobs());
    }
    ASSIGN_OR_RETURN(part.open.sampling, ReadSampling(wire.sampling()));
  }
  op_.controls.emplace_back(std::move(part));
  return absl::OkStatus();
}

absl::Status OpParser::AddMapPages(const proto::MapPages& wire) {
  RETURN_IF_ERROR(CheckSlot("MapPages", wire.slot()));
  const int64_t max_logical =
      (bounds_.granted.max_context + limits::kPageTokens - 1) / limits::kPageTokens;
  RETURN_IF_ERROR(CheckRange("MapPages.pages", wire.pages_size(), 0, max_logical));
  MapPagesControl map;
  map.slot = static_cast<int>(wire.slot());
  for (const proto::PageMapping& page : wire.pages()) {
    RETURN_IF_ERROR(CheckRange("MapPages.logical_page", page.logical_page(), 0, max_logical - 1));
    RETURN_IF_ERROR(CheckRange("MapPages.physical_page", page.physical_page(), 0,
                               bounds_.granted.num_pages - 1));
    map.pages.push_back(
        {static_cast<int32_t>(page.logical_page()), static_cast<int32_t>(page.physical_page())});
  }
  op_.controls.emplace_back(std::move(map));
  return absl::OkStatus();
}

absl::Status OpParser::AddSetMask(const proto::SetMask& wire) {
  RETURN_IF_ERROR(CheckRange("SetMask.mask_id", wire.mask_id(), 1, INT32_MAX));
  SetMaskControl mask;
  mask.mask_id = static_cast<int32_t>(wire.mask_id());
  const int64_t num_bytes = (static_cast<int64_t>(bounds_.vocab_size) + 7) / 8;
  switch (wire.bits_case()) {
    case proto::SetMask::kPacked:
      RETURN_IF_ERROR(CheckRange("SetMask.packed bytes", static_cast<int64_t>(wire.packed().size()),
                                 num_bytes, num_bytes));
      mask.bits.assign(wire.packed().begin(), wire.packed().end());
      break;
    case proto::SetMask::kRuns:
      RETURN_IF_ERROR(CheckRange("SetMask.runs", wire.runs().lengths_size(), 1,
                                 static_cast<int64_t>(bounds_.vocab_size) + 1));
      mask.runs.assign(wire.runs().lengths().begin(), wire.runs().lengths().end());
      break;
    default:
      return absl::InvalidArgumentError(
          absl::StrCat("SetMask: mask ", wire.mask_id(), " has no bits"));
  }
  op_.controls.emplace_back(std::move(mask));
  return absl::OkStatus();
}

absl::Status OpParser::AddControl(const proto::Control& control) {
  switch (control.control_case()) {
    case proto::Control::kOpenSequence:
      return AddOpen(control.open_sequence());
    case proto::Control::kSetSampling: {
      RETURN_IF_ERROR(CheckSlot("SetSampling", control.set_sampling().slot()));
      SetSamplingControl set;
      set.slot = static_cast<int>(control.set_sampling().slot());
      ASSIGN_OR_RETURN(set.sampling, ReadSampling(control.set_sampling().sampling()));
      op_.controls.emplace_back(std::move(set));
      return absl::OkStatus();
    }
    case proto::Control::kMapPages:
      return AddMapPages(control.map_pages());
    case proto::Control::kTruncate: {
      const proto::Truncate& wire = control.truncate();
      RETURN_IF_ERROR(CheckSlot("Truncate", wire.slot()));
      op_.controls.emplace_back(
          TruncateControl{static_cast<int>(wire.slot()), int64_t{wire.committed_length()}});
      return absl::OkStatus();
    }
    case proto::Control::kCloseSequence:
      RETURN_IF_ERROR(CheckSlot("CloseSequence", control.close_sequence().slot()));
      op_.controls.emplace_back(
          CloseSequenceControl{static_cast<int>(control.close_sequence().slot())});
      return absl::OkStatus();
    case proto::Control::kSetMask:
      return AddSetMask(control.set_mask());
    case proto::Control::kPing:
    case proto::Control::kFence:
      op_.controls.emplace_back(NothingControl());
      return absl::OkStatus();
    case proto::Control::kSnapshot:
      return absl::UnimplementedError("Snapshot");
    case proto::Control::kDropSnapshot:
      return absl::UnimplementedError("DropSnapshot");
    case proto::Control::kLoadEmbeddings:
      return absl::UnimplementedError("LoadEmbeddings");
    case proto::Control::kDropChunk:
      return absl::UnimplementedError("DropChunk");
    case proto::Control::CONTROL_NOT_SET:
      break;
  }
  return absl::InvalidArgumentError("a control of the op is empty or of a newer protocol");
}

absl::StatusOr<RoundSequence> OpParser::ReadRoundSequence(const proto::RoundSequence& wire) {
  RETURN_IF_ERROR(UseSlot("Round", wire.slot()));
  RoundSequence sequence;
  sequence.slot = static_cast<int>(wire.slot());
  sequence.kept_drafts = wire.source() == proto::DRAFTS_KEPT;
  sequence.after_previous = wire.after_previous();
  sequence.first_position = wire.first_position();
  sequence.draft_next = wire.draft_next();
  if (wire.position_case() == proto::RoundSequence::POSITION_NOT_SET) {
    return absl::InvalidArgumentError(
        "Round: a sequence has neither first_position nor after_previous");
  }
  if (sequence.after_previous && !sequence.kept_drafts && wire.k() > 0) {
    return absl::InvalidArgumentError("Round: after_previous needs the kept drafts");
  }
  RETURN_IF_ERROR(CheckRange("Round.k", wire.k(), 0, limits::kMaxDrafts));
  sequence.num_drafts = static_cast<int>(wire.k());
  if (sequence.kept_drafts) {
    RETURN_IF_ERROR(CheckRange("Round.k of kept drafts", wire.k(), 0, bounds_.max_drafts));
  }
  RETURN_IF_ERROR(CheckRange("Round.draft_ids", wire.draft_ids_size(),
                             sequence.kept_drafts ? 0 : wire.k(),
                             sequence.kept_drafts ? 0 : wire.k()));
  for (const uint32_t id : wire.draft_ids()) {
    RETURN_IF_ERROR(CheckToken("Round.draft_ids", id));
    sequence.drafts.push_back(static_cast<int32_t>(id));
  }
  if (wire.mask_ids_size() > 0) {
    RETURN_IF_ERROR(CheckRange("Round.mask_ids", wire.mask_ids_size(), 1 + wire.k(), 1 + wire.k()));
  }
  for (const uint32_t mask_id : wire.mask_ids()) {
    ASSIGN_OR_RETURN(const int32_t id, ReadMaskId(mask_id));
    sequence.mask_ids.push_back(id);
  }
  return sequence;
}

absl::Status OpParser::AddRound(const proto::Round& wire) {
  int64_t rows = 0;
  for (const proto::RoundSequence& sequence : wire.sequences()) {
    ASSIGN_OR_RETURN(RoundSequence read, ReadRoundSequence(sequence));
    rows += 1 + read.num_drafts;
    op_.round.push_back(std::move(read));
  }
  return CheckRange("rows of the Round", rows, 1, bounds_.granted.max_round_rows);
}

absl::Status OpParser::AddShortPrefill(const proto::ShortPrefill& wire) {
  int64_t rows = 0;
  for (const proto::PrefillSequence& sequence : wire.sequences()) {
    RETURN_IF_ERROR(UseSlot("ShortPrefill", sequence.slot()));
    RETURN_IF_ERROR(CheckRange("ShortPrefill.end_position", sequence.end_position(),
                               int64_t{sequence.first_position()} + 1,
                               bounds_.granted.max_context));
    PrefillRange range;
    range.slot = static_cast<int>(sequence.slot());
    range.begin = sequence.first_position();
    range.end = sequence.end_position();
    range.draft_next = sequence.draft_next();
    ASSIGN_OR_RETURN(range.mask_id, ReadMaskId(sequence.mask_id()));
    rows += range.end - range.begin;
    op_.short_prefill.push_back(range);
  }
  return CheckRange("rows of the ShortPrefill", rows, 1, bounds_.granted.max_short_prefill_rows);
}

absl::Status OpParser::AddChunkSlice(const proto::ChunkSlice& wire) {
  RETURN_IF_ERROR(UseSlot("ChunkSlice", wire.slot()));
  RETURN_IF_ERROR(CheckRange("ChunkSlice.end_position", wire.end_position(),
                             int64_t{wire.first_position()} + 1, bounds_.granted.max_context));
  RETURN_IF_ERROR(CheckRange("rows of the ChunkSlice",
                             int64_t{wire.end_position()} - wire.first_position(), 1,
                             bounds_.granted.max_chunk_rows));
  RETURN_IF_ERROR(CheckRange("ChunkSlice.end_layer", wire.end_layer(),
                             int64_t{wire.first_layer()} + 1, INT32_MAX));
  ChunkSliceWork work;
  work.chunk_id = wire.chunk_id();
  work.first_layer = static_cast<int>(wire.first_layer());
  work.end_layer = static_cast<int>(wire.end_layer());
  work.range.slot = static_cast<int>(wire.slot());
  work.range.begin = wire.first_position();
  work.range.end = wire.end_position();
  work.range.draft_next = wire.draft_next();
  ASSIGN_OR_RETURN(work.range.mask_id, ReadMaskId(wire.mask_id()));
  op_.chunk_slice = work;
  return absl::OkStatus();
}

}  // namespace

WorkerOp ReadOp(std::string bytes, const OpBounds& bounds) {
  WorkerOp op;
  proto::Op wire;
  if (!wire.ParseFromString(bytes)) {
    op.refused = absl::InvalidArgumentError(
        absl::StrCat("an op of ", bytes.size(), " bytes does not parse"));
  } else {
    op.op_id = wire.op_id();
    op.deadline_ms = wire.deadline_ms();
    op.refused = OpParser(bounds, op).Parse(wire);
  }
  if (!op.refused.ok()) {
    op.controls.clear();
    op.round.clear();
    op.short_prefill.clear();
    op.chunk_slice.reset();
  }
  op.bytes = std::move(bytes);
  return op;
}

}  // namespace twinspark
