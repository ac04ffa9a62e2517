#include "gateway/engine/step_stream_client.h"

#include <algorithm>
#include <mutex>
#include <utility>
#include <variant>

#include <google/protobuf/arena.h>

#include "absl/strings/str_cat.h"

#include "common/limits.h"
#include "common/rpc/grpc_status.h"
#include "gateway/engine/step_stream_impl.h"

namespace twinspark::gateway {
namespace {

template <class Repeated>
void CopyIds(const std::vector<int32_t>& ids, Repeated* out) {
  out->Reserve(static_cast<int>(ids.size()));
  for (const int32_t id : ids)
    out->Add(static_cast<uint32_t>(id));
}

void FillSampling(const SamplingParams& in, proto::SamplingParams& out) {
  out.set_temperature(in.temperature);
  out.set_top_k(static_cast<uint32_t>(std::max(in.top_k, 0)));
  out.set_top_p(in.top_p);
  out.set_min_p(in.min_p);
  out.set_repetition_penalty(in.repetition_penalty);
  out.set_presence_penalty(in.presence_penalty);
  out.set_frequency_penalty(in.frequency_penalty);
  for (const auto& [id, bias] : in.logit_bias) {
    proto::LogitBias* entry = out.add_logit_bias();
    entry->set_token_id(static_cast<uint32_t>(id));
    entry->set_bias(bias);
  }
  out.set_seed(in.seed);
  out.set_choice(in.choice);
  out.set_min_tokens(static_cast<uint32_t>(in.min_tokens));
  CopyIds(in.stop_token_ids, out.mutable_stop_ids());
  for (const std::vector<int32_t>& word : in.bad_words) {
    CopyIds(word, out.add_bad_words()->mutable_ids());
  }
  if (in.num_logprobs >= 0) out.set_logprobs(static_cast<uint32_t>(in.num_logprobs));
}

// A long prompt becomes several controls: the first has all other fields, later ones only ids.
void AddOpenSequence(const OpenSequence& open, proto::Op& op) {
  const size_t total = open.ids.size();
  for (size_t offset = 0; offset == 0 || offset < total; offset += limits::kMaxPromptIdsPerPart) {
    proto::OpenSequence* part = op.add_controls()->mutable_open_sequence();
    part->set_slot(static_cast<uint32_t>(open.slot));
    part->set_ids_offset(static_cast<uint32_t>(offset));
    const size_t end = std::min(total, offset + limits::kMaxPromptIdsPerPart);
    for (size_t i = offset; i < end; ++i)
      part->add_prompt_ids(static_cast<uint32_t>(open.ids[i]));
    if (offset > 0) continue;
    part->set_total_ids(static_cast<uint32_t>(total));
    part->set_request_id_hash(open.request_hash);
    part->set_num_prompt_ids(static_cast<uint32_t>(open.num_prompt_ids));
    FillSampling(*open.sampling, *part->mutable_sampling());
    part->set_draft_allowed(open.draft_allowed);
    if (open.wants_prompt_logprobs) {
      part->set_prompt_logprobs(static_cast<uint32_t>(open.sampling->num_prompt_logprobs));
    }
  }
}

void AddSetMask(const SetMask& mask, proto::Op& op) {
  std::string bits(static_cast<size_t>(mask.vocab_size + 7) / 8, '\0');
  for (const int32_t id : mask.allowed_token_ids) {
    if (id < 0 || id >= mask.vocab_size) continue;
    bits[static_cast<size_t>(id) / 8] =
        static_cast<char>(bits[static_cast<size_t>(id) / 8] | (1 << (id % 8)));
  }
  proto::SetMask* out = op.add_controls()->mutable_set_mask();
  out->set_mask_id(mask.mask_id);
  out->set_packed(std::move(bits));
}

void AddControl(const Control& control, proto::Op& op) {
  if (const auto* close = std::get_if<CloseSequence>(&control)) {
    op.add_controls()->mutable_close_sequence()->set_slot(static_cast<uint32_t>(close->slot));
  } else if (const auto* open = std::get_if<OpenSequence>(&control)) {
    AddOpenSequence(*open, op);
  } else if (const auto* mask = std::get_if<SetMask>(&control)) {
    AddSetMask(*mask, op);
  } else if (const auto* map = std::get_if<MapPages>(&control)) {
    proto::MapPages* out = op.add_controls()->mutable_map_pages();
    out->set_slot(static_cast<uint32_t>(map->slot));
    for (const PageMapping& page : map->pages) {
      proto::PageMapping* mapping = out->add_pages();
      mapping->set_logical_page(static_cast<uint32_t>(page.logical_page));
      mapping->set_physical_page(static_cast<uint32_t>(page.physical_page));
    }
  }
}

void AddRound(const StepPlan& plan, proto::Compute& compute) {
  for (const RoundSequence& in : plan.round) {
    proto::RoundSequence* out = compute.mutable_round()->add_sequences();
    out->set_slot(static_cast<uint32_t>(in.slot));
    if (in.after_previous) {
      out->set_after_previous(true);
    } else {
      out->set_first_position(static_cast<uint32_t>(in.first_position));
    }
    out->set_k(static_cast<uint32_t>(in.k));
    out->set_source(proto::DRAFTS_KEPT);
    if (in.mask_id > 0) {
      for (int row = 0; row <= in.k; ++row)
        out->add_mask_ids(in.mask_id);
    }
    out->set_draft_next(in.draft_next);
  }
}

void AddPrefill(const StepPlan& plan, proto::Compute& compute) {
  for (const PrefillRange& in : plan.short_prefill) {
    proto::PrefillSequence* out = compute.mutable_short_prefill()->add_sequences();
    out->set_slot(static_cast<uint32_t>(in.slot));
    out->set_first_position(static_cast<uint32_t>(in.begin));
    out->set_end_position(static_cast<uint32_t>(in.end));
    out->set_draft_next(in.draft_next);
    out->set_mask_id(in.mask_id);
  }
  if (!plan.chunk) return;
  const PrefillRange& in = plan.chunk->range;
  proto::ChunkSlice* out = compute.mutable_chunk_slice();
  out->set_chunk_id(plan.chunk->chunk_id);
  out->set_slot(static_cast<uint32_t>(in.slot));
  out->set_first_position(static_cast<uint32_t>(in.begin));
  out->set_end_position(static_cast<uint32_t>(in.end));
  out->set_first_layer(0);
  out->set_end_layer(static_cast<uint32_t>(plan.chunk->num_layers));
  out->set_first(true);
  out->set_last(true);
  out->set_draft_next(in.draft_next);
  out->set_mask_id(in.mask_id);
}

TokenLogprobs ReadLogprobs(const proto::TokenLogprobs& in) {
  TokenLogprobs out;
  out.logprob = in.logprob();
  out.rank = static_cast<int32_t>(in.rank());
  const int count = std::min(in.top_ids_size(), in.top_logprobs_size());
  for (int i = 0; i < count; ++i) {
    out.top.push_back({static_cast<int32_t>(in.top_ids(i)), in.top_logprobs(i)});
  }
  return out;
}

SequenceResult ReadSequence(const proto::SequenceResult& in) {
  SequenceResult out;
  out.slot = static_cast<int>(in.slot());
  out.num_accepted = static_cast<int>(in.num_accepted());
  out.tokens.assign(in.tokens().begin(), in.tokens().end());
  out.num_drafts = in.draft_ids_size();
  out.non_finite = in.non_finite();
  for (const auto& entry : in.logprobs())
    out.logprobs.push_back(ReadLogprobs(entry));
  for (const auto& entry : in.prompt_logprobs())
    out.prompt_logprobs.push_back(ReadLogprobs(entry));
  return out;
}

RankResult ReadResult(const proto::OpResult& in) {
  RankResult out;
  if (in.has_status() && in.status().code() != 0) {
    out.status =
        absl::Status(static_cast<absl::StatusCode>(in.status().code()), in.status().message());
  }
  out.digest = in.digest();
  out.engram_wait_us = in.timings().engram_wait_us();
  out.forward_us = in.timings().compute_us();
  out.collectives_us = in.timings().collectives_us();
  out.sample_us = in.timings().sample_us();
  out.draft_us = in.timings().draft_us();
  out.result.op_id = in.op_id();
  out.result.compute_us = in.timings().total_us();
  for (const auto& sequence : in.round())
    out.result.round.push_back(ReadSequence(sequence));
  for (const auto& sequence : in.short_prefill()) {
    out.result.short_prefill.push_back(ReadSequence(sequence));
  }
  if (in.has_chunk_slice()) out.result.chunk = ReadSequence(in.chunk_slice());
  return out;
}

}  // namespace

std::string EncodeOp(const StepPlan& plan) {
  // Most ops fit into these bytes of the stack.
  alignas(16) char first_block[2048];
  google::protobuf::ArenaOptions options;
  options.initial_block = first_block;
  options.initial_block_size = sizeof(first_block);
  google::protobuf::Arena arena(options);
  proto::Op& op = *google::protobuf::Arena::CreateMessage<proto::Op>(&arena);
  op.set_op_id(plan.op_id);
  op.set_deadline_ms(plan.deadline_ms);
  for (const Control& control : plan.controls)
    AddControl(control, op);
  if (!plan.round.empty()) AddRound(plan, *op.mutable_compute());
  if (!plan.short_prefill.empty() || plan.chunk) AddPrefill(plan, *op.mutable_compute());
  return op.SerializeAsString();
}

StepsCall::StepsCall(int rank, CompletionLoop& completions, StepStreamEvents* events)
    : rank_(rank),
      completions_(completions),
      arena_(arena_block_.data(), arena_block_.size()),
      events_(events) {}

void StepsCall::Start(proto::ShardWorker::Stub& stub, proto::GatewayMessage open) {
  outgoing_.push_back(std::move(open));
  stream_ = stub.PrepareAsyncSteps(&context_, &completions_.queue());
  stream_->StartCall(start_.For(shared_from_this()));
}

void StepsCall::OnStarted(bool ok) {
  if (!ok) {
    Finish();
    return;
  }
  Read();
  std::lock_guard lock(mutex_);
  started_ = true;
  WriteFront();
}

void StepsCall::Read() {
  arena_.Reset();
  incoming_ = google::protobuf::Arena::CreateMessage<proto::WorkerMessage>(&arena_);
  stream_->Read(incoming_, read_.For(shared_from_this()));
}

void StepsCall::OnRead(bool ok) {
  if (!ok) {
    Finish();
    return;
  }
  const bool is_result = incoming_->has_result();
  {
    std::lock_guard lock(events_mutex_);
    if (events_ == nullptr) {
      // Nobody listens.
    } else if (is_result) {
      events_->OnResult(rank_, ReadResult(incoming_->result()));
    } else if (incoming_->has_accepted()) {
      events_->OnAccepted(rank_);
    } else if (incoming_->has_heartbeat()) {
      events_->OnHeartbeat(rank_);
    }
  }
  if (is_result) {
    std::lock_guard lock(mutex_);
    // Nothing is sent any more that would let it go on.
    read_is_held_ = !over_;
    if (read_is_held_) return;
  }
  Read();
}

void StepsCall::ReadOn() {
  {
    std::lock_guard lock(mutex_);
    if (!std::exchange(read_is_held_, false)) return;
  }
  Read();
}

void StepsCall::Send(proto::GatewayMessage message) {
  {
    std::lock_guard lock(mutex_);
    if (over_) return;
    // Ops in flight are bounded by the scheduler. Heartbeats behind a full queue say nothing new.
    if (!message.has_heartbeat() || outgoing_.size() <= kMaxQueuedHeartbeats) {
      outgoing_.push_back(std::move(message));
      if (started_ && outgoing_.size() == 1) WriteFront();
    }
  }
  ReadOn();
}

void StepsCall::Cancel() {
  context_.TryCancel();
  {
    std::lock_guard lock(mutex_);
    over_ = true;
  }
  ReadOn();  // a read brings the end
}

void StepsCall::WriteFront() {
  stream_->Write(outgoing_.front(), write_.For(shared_from_this()));
}

void StepsCall::OnWritten(bool ok) {
  {
    std::lock_guard lock(mutex_);
    outgoing_.pop_front();
    // After a failed write the read fails too, and brings the reason.
    if (!ok) over_ = true;
    if (!over_ && !outgoing_.empty()) WriteFront();
  }
  if (!ok) ReadOn();
}

void StepsCall::Finish() {
  {
    std::lock_guard lock(mutex_);
    over_ = true;
  }
  stream_->Finish(&status_, finish_.For(shared_from_this()));
}

void StepsCall::OnFinished(bool /*ok*/) {
  std::lock_guard lock(events_mutex_);
  if (events_ != nullptr) events_->OnClosed(rank_, FromGrpcStatus(status_));
}

void StepsCall::Silence() {
  std::lock_guard lock(events_mutex_);
  events_ = nullptr;
}

GrpcStepStream::GrpcStepStream(int rank,
                               proto::ShardWorker::Stub& stub,
                               CompletionLoop& completions,
                               proto::GatewayMessage open,
                               StepStreamEvents* events)
    : call_(std::make_shared<StepsCall>(rank, completions, events)) {
  call_->Start(stub, std::move(open));
}

GrpcStepStream::~GrpcStepStream() {
  call_->Cancel();
  call_->Silence();
}

void GrpcStepStream::SendOp(const std::string& op_bytes) {
  proto::GatewayMessage message;
  message.set_op(op_bytes);
  call_->Send(std::move(message));
  op_was_sent_ = true;
}

void GrpcStepStream::SendHeartbeat(uint64_t sequence) {
  if (op_was_sent_.exchange(false)) return;
  proto::GatewayMessage message;
  message.mutable_heartbeat()->set_sequence(sequence);
  call_->Send(std::move(message));
}

void GrpcStepStream::Close() {
  call_->Cancel();
}

}  // namespace twinspark::gateway
