// The sequences that wait for a slot, in order of arrival. Bounded for newcomers; a preempted or
// recovered sequence always gets back in, at the place of its arrival. Pure; engine thread only.
#pragma once

#include <cstddef>
#include <optional>

#include "absl/container/btree_set.h"

#include "gateway/scheduler/step_plan.h"

namespace twinspark::gateway {

class AdmissionQueue {
 public:
  explicit AdmissionQueue(size_t capacity) : capacity_(capacity) {}

  bool full() const { return ids_.size() >= capacity_; }
  // False when full.
  bool Push(SequenceId id);
  // For a sequence that had a slot: never refused.
  void PutBack(SequenceId id);
  // False when it is not here.
  bool Remove(SequenceId id);
  // The one that waits longest.
  std::optional<SequenceId> Front() const;
  size_t size() const { return ids_.size(); }

 private:
  size_t capacity_;
  absl::btree_set<SequenceId> ids_;  // ids ascend in the order of arrival
};

}  // namespace twinspark::gateway
