// ParseSafetensorsHeader on any bytes: an error or tensors that lie inside the file without
// overlap, never a crash.
#include "common/safetensors.h"

#include <algorithm>

#include "common/check.h"
#include "common/testing/fuzz_driver.h"

namespace {

constexpr int64_t kFileBytes = 4096;

std::vector<std::string> Seeds() {
  return {
      R"({"a":{"dtype":"F32","shape":[2,3],"data_offsets":[0,24]},"b":{"dtype":"I16","shape":[4],"data_offsets":[24,32]}})",
      R"({"__metadata__":{"format":"pt"},"x.trellis":{"dtype":"I16","shape":[8,8,48],"data_offsets":[0,3072]},"x.mul1":{"dtype":"I32","shape":[],"data_offsets":[3072,3076]}})",
      R"({"w":{"dtype":"F8_E4M3","shape":[4,32],"data_offsets":[0,128]},"w.scale":{"dtype":"F8_E8M0","shape":[1,1],"data_offsets":[128,129]}})",
      R"({"empty":{"dtype":"BF16","shape":[0,7],"data_offsets":[0,0]}})",
      "{}",
  };
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const std::string header(reinterpret_cast<const char*>(data), size);
  const int64_t data_offset = 8 + static_cast<int64_t>(size);
  const auto tensors =
      twinspark::ParseSafetensorsHeader(header, data_offset, data_offset + kFileBytes, "fuzz");
  if (!tensors.ok()) {
    CHECK(!tensors.status().message().empty());
    return 0;
  }
  int64_t end = data_offset;
  for (const twinspark::StoredTensor& tensor : *tensors) {
    CHECK_GE(tensor.offset, end) << tensor.name << ": overlap or order";
    CHECK_EQ(tensor.num_elements() * static_cast<int64_t>(twinspark::StoredTypeBytes(tensor.type)),
             tensor.bytes)
        << tensor.name;
    end = tensor.offset + tensor.bytes;
    CHECK_LE(end, data_offset + kFileBytes) << tensor.name;
  }
  return 0;
}

TWINSPARK_FUZZ_MAIN(Seeds())
