// absl::Status <-> grpc::Status. Both use the same sixteen codes, so the mapping is the number;
// what is added is one place that bounds the text (gRPC sends it as a header) and keeps Abseil's
// view type out.
#pragma once

#include <cstddef>

#include <grpcpp/support/status.h>

#include "absl/status/status.h"

namespace twinspark {

// Longer texts are cut: the limit of gRPC for all headers together is 8 KiB.
inline constexpr size_t kMaxStatusTextBytes = 4096;

grpc::Status ToGrpcStatus(const absl::Status& status);
absl::Status FromGrpcStatus(const grpc::Status& status);

}  // namespace twinspark
