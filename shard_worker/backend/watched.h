// Decorators around what a step talks to, so that a failure says whose it is: a communicator whose
// disagreements end the epoch instead of the process, and a row source whose errors name the row
// service. The communicator also carries the fault hook "one wrong reduced sum". Compute thread,
// except Abort.
#pragma once

#include <atomic>
#include <memory>
#include <utility>

#include "shard_worker/model/row_source.h"
#include "shard_worker/parallel/communicator.h"

namespace twinspark {

class WatchedCommunicator : public Communicator {
 public:
  explicit WatchedCommunicator(std::unique_ptr<Communicator> inner) : inner_(std::move(inner)) {}

  int rank() const override { return inner_->rank(); }
  int world() const override { return inner_->world(); }
  absl::Status AllReduceSum(std::span<float> values) override;
  absl::Status AllGather(std::span<const std::byte> mine, std::span<std::byte> all) override;
  absl::Status Barrier() override;
  void Abort() override { inner_->Abort(); }

  // The first value of the next sum gets this bit flipped, on this rank only.
  void FlipNextSum(int bit) { flip_bit_ = bit; }

 private:
  std::unique_ptr<Communicator> inner_;
  int flip_bit_ = -1;
};

class WatchedRows : public RowSource {
 public:
  explicit WatchedRows(RowSource& inner) : inner_(inner) {}
  absl::Status Request(std::span<const RowRange> ranges, RowClass row_class) override;
  void Hint(std::span<const RowRange> ranges, RowClass row_class) override {
    inner_.Hint(ranges, row_class);
  }
  absl::StatusOr<EngramRows> Rows(int module_idx) override;

 private:
  RowSource& inner_;
};

}  // namespace twinspark
