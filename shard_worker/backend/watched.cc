// See watched.h.
#include "shard_worker/backend/watched.h"

#include <bit>
#include <cstdint>
#include <string>

#include "absl/strings/str_cat.h"

#include "common/status_macros.h"

namespace twinspark {
namespace {

// INTERNAL means "device" to the worker; ranks that disagree are no device error.
absl::Status OfGroup(const absl::Status& status) {
  if (!absl::IsInternal(status)) return status;
  return absl::AbortedError(status.message());
}

absl::Status OfRowService(const absl::Status& status) {
  if (status.ok()) return status;
  const std::string text = absl::StrCat("row service: ", std::string(status.message()));
  if (absl::IsDeadlineExceeded(status)) return absl::DeadlineExceededError(text);
  return absl::UnavailableError(text);
}

}  // namespace

absl::Status WatchedCommunicator::AllReduceSum(std::span<float> values) {
  RETURN_IF_ERROR(OfGroup(inner_->AllReduceSum(values)));
  if (flip_bit_ >= 0 && !values.empty()) {
    values[0] = std::bit_cast<float>(std::bit_cast<uint32_t>(values[0]) ^ (1u << flip_bit_));
    flip_bit_ = -1;
  }
  return absl::OkStatus();
}

absl::Status WatchedCommunicator::AllGather(std::span<const std::byte> mine,
                                            std::span<std::byte> all) {
  return OfGroup(inner_->AllGather(mine, all));
}

absl::Status WatchedCommunicator::Barrier() {
  return OfGroup(inner_->Barrier());
}

absl::Status WatchedRows::Request(std::span<const RowRange> ranges, RowClass row_class) {
  return OfRowService(inner_.Request(ranges, row_class));
}

absl::StatusOr<EngramRows> WatchedRows::Rows(int module_idx) {
  absl::StatusOr<EngramRows> rows = inner_.Rows(module_idx);
  if (!rows.ok()) return OfRowService(rows.status());
  return rows;
}

}  // namespace twinspark
