#include "gateway/scheduler/admission_queue.h"

#include "common/check.h"

namespace twinspark::gateway {

bool AdmissionQueue::Push(SequenceId id) {
  if (full()) return false;
  CHECK(ids_.insert(id).second) << "sequence " << id << " waits twice";
  return true;
}

void AdmissionQueue::PutBack(SequenceId id) {
  CHECK(ids_.insert(id).second) << "sequence " << id << " waits twice";
}

bool AdmissionQueue::Remove(SequenceId id) {
  return ids_.erase(id) == 1;
}

std::optional<SequenceId> AdmissionQueue::Front() const {
  if (ids_.empty()) return std::nullopt;
  return *ids_.begin();
}

}  // namespace twinspark::gateway
