// Block reads through io_uring: one ring, buffers and files registered, a batch of reads per system
// call. Made in any thread; from the first Submit on everything happens in the owner thread, which
// alone may enter the ring. Spec: engram.md 4.3.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "absl/status/statusor.h"

#include "engram_service/io/block_reader.h"

namespace twinspark::engram {

class UringReader : public BlockReader {
 public:
  // `fds` are the files that will be read. kUnavailable where the kernel, a container's seccomp
  // profile or kernel.io_uring_disabled forbids io_uring: the caller takes another reader and says
  // so.
  static absl::StatusOr<std::unique_ptr<UringReader>> Create(size_t depth,
                                                             std::span<const int> fds);
  ~UringReader() override;

  std::string name() const override;
  size_t depth() const override;
  size_t in_flight() const override;
  void Submit(const BlockRead& read) override;
  void Flush() override;
  size_t Reap(std::span<BlockDone> out, bool wait) override;
  void Release(uint32_t buffer) override;
  int event_fd() const override;
  bool ArmEvent() override;

 private:
  struct Impl;
  UringReader();
  std::unique_ptr<Impl> impl_;
};

}  // namespace twinspark::engram
