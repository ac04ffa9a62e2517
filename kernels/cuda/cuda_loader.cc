// dlopen of the CUDA module; see cuda_loader.h.
#include "kernels/cuda/cuda_loader.h"

#include <dlfcn.h>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"

namespace twinspark {

absl::StatusOr<const CudaModule*> OpenCudaModule(const std::string& path) {
  void* handle = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (handle == nullptr) {
    const char* reason = dlerror();
    return absl::NotFoundError(
        absl::StrCat("CUDA module ", path, ": ", reason != nullptr ? reason : "cannot be opened"));
  }
  void* symbol = dlsym(handle, kCudaModuleFactoryName);
  if (symbol == nullptr) {
    dlclose(handle);
    return absl::FailedPreconditionError(
        absl::StrCat(path, " has no ", kCudaModuleFactoryName, ": it is not a CUDA module"));
  }
  const CudaModule* module = reinterpret_cast<CudaModuleFactory>(symbol)(kCudaInterfaceVersion);
  if (module == nullptr) {
    dlclose(handle);
    return absl::FailedPreconditionError(absl::StrCat(path, " does not offer interface version ",
                                                      kCudaInterfaceVersion,
                                                      ": install the module "
                                                      "of the same build"));
  }
  return module;
}

}  // namespace twinspark
