#include "gateway/engine/worker_group.h"

#include <chrono>
#include <utility>

#include "absl/strings/str_cat.h"

#include "gateway/engine/worker_client.h"

namespace twinspark::gateway {

WorkerGroup::WorkerGroup(uint64_t epoch, int world, const Clock& clock, EngineInbox& inbox)
    : epoch_(epoch), clock_(clock), inbox_(inbox), last_heard_us_(static_cast<size_t>(world)) {
  for (int rank = 0; rank < world; ++rank)
    Heard(rank);
}

WorkerGroup::~WorkerGroup() {
  Close();
  streams_.clear();
}

absl::Status WorkerGroup::Open(const std::vector<std::unique_ptr<WorkerClient>>& clients,
                               const std::string& config_digest,
                               const std::string& weights_digest,
                               int64_t timeout_ms) {
  for (const auto& client : clients)
    endpoints_.push_back(client->endpoint());
  for (const auto& client : clients) {
    streams_.push_back(client->OpenSteps(epoch_, config_digest, weights_digest, this));
  }
  std::unique_lock lock(mutex_);
  const bool in_time = changed_.wait_for(lock, std::chrono::milliseconds(timeout_ms), [this] {
    return num_accepted_ == world() || !lost_.empty();
  });
  if (!lost_.empty()) return absl::UnavailableError(lost_);
  if (!in_time) {
    return absl::DeadlineExceededError(absl::StrCat(num_accepted_, " of ", world(),
                                                    " workers opened their step stream in ",
                                                    timeout_ms, " ms"));
  }
  return absl::OkStatus();
}

void WorkerGroup::StartServing() {
  std::lock_guard lock(mutex_);
  serving_ = true;
  if (!lost_.empty()) inbox_.Push(LostMessage{epoch_, "closed", lost_});
}

void WorkerGroup::Close() {
  {
    std::lock_guard lock(mutex_);
    closing_ = true;
  }
  for (const auto& stream : streams_)
    stream->Close();
}

void WorkerGroup::SendOp(const std::string& op_bytes) {
  for (const auto& stream : streams_)
    stream->SendOp(op_bytes);
}

void WorkerGroup::ReadOn() {
  for (const auto& stream : streams_)
    stream->ReadOn();
}

void WorkerGroup::SendHeartbeats() {
  const uint64_t number = next_heartbeat_.fetch_add(1);
  for (const auto& stream : streams_)
    stream->SendHeartbeat(number);
}

int64_t WorkerGroup::SilenceUs(int rank) const {
  return clock_.NowUs() - last_heard_us_[static_cast<size_t>(rank)].load();
}

void WorkerGroup::Heard(int rank) {
  last_heard_us_[static_cast<size_t>(rank)].store(clock_.NowUs());
}

void WorkerGroup::OnAccepted(int rank) {
  Heard(rank);
  std::lock_guard lock(mutex_);
  ++num_accepted_;
  changed_.notify_all();
}

void WorkerGroup::OnHeartbeat(int rank) {
  Heard(rank);
}

void WorkerGroup::OnResult(int rank, RankResult result) {
  Heard(rank);
  inbox_.Push(ResultMessage{epoch_, rank, std::move(result)});
}

void WorkerGroup::OnClosed(int rank, const absl::Status& status) {
  std::lock_guard lock(mutex_);
  if (closing_ || !lost_.empty()) return;
  lost_ = absl::StrCat("rank ", rank, " (", endpoints_[static_cast<size_t>(rank)],
                       ") ended its step stream: ", status.ToString());
  if (serving_) inbox_.Push(LostMessage{epoch_, "closed", lost_});
  changed_.notify_all();
}

}  // namespace twinspark::gateway
