// Error texts; see workspace_cuda.h.
#include "kernels/cuda/workspace_cuda.h"

#include <cstdarg>
#include <cstdio>

namespace twinspark {

CudaStatus CudaError(int code, const char* format, ...) {
  CudaStatus status;
  status.code = code;
  va_list args;
  va_start(args, format);
  std::vsnprintf(status.text, sizeof(status.text), format, args);
  va_end(args);
  return status;
}

}  // namespace twinspark
