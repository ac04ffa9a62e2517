// See grpc_log.h.
#include "common/rpc/grpc_log.h"

#include <grpc/support/log.h>

#include "common/log.h"

namespace twinspark {
namespace {

void ToOurLog(gpr_log_func_args* args) {
  LOG_DEBUG << "grpc " << args->message;
}

}  // namespace

void QuietGrpcLog() {
  gpr_set_log_function(&ToOurLog);
}

}  // namespace twinspark
