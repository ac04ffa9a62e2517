// See grpc_status.h.
#include "common/rpc/grpc_status.h"

#include <string>

#include "common/string_view.h"

namespace twinspark {

grpc::Status ToGrpcStatus(const absl::Status& status) {
  if (status.ok()) return grpc::Status::OK;
  std::string text(ToStd(status.message()));
  if (text.size() > kMaxStatusTextBytes) {
    text.resize(kMaxStatusTextBytes - 3);
    text += "...";
  }
  return grpc::Status(static_cast<grpc::StatusCode>(status.code()), text);
}

absl::Status FromGrpcStatus(const grpc::Status& status) {
  if (status.ok()) return absl::OkStatus();
  const int code = static_cast<int>(status.error_code());
  const bool known = code >= 1 && code <= 16;
  return absl::Status(known ? static_cast<absl::StatusCode>(code) : absl::StatusCode::kUnknown,
                      status.error_message());
}

}  // namespace twinspark
