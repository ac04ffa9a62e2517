// Reads of single 4 KiB blocks from the table files: the seam between the gather engine and
// whatever does the reading (io_uring, a thread pool, the calling thread, a fault injector in
// tests). One owner thread calls everything here; implementations may use threads of their own
// inside. Spec: engram.md 4.3.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>

namespace twinspark::engram {

struct BlockRead {
  int fd = -1;
  uint64_t block_idx = 0;       // offset = block_idx * 4096
  uint32_t expected_bytes = 0;  // 4096, less in the last block of a file
  uint64_t tag = 0;             // comes back in BlockDone
};

struct BlockDone {
  uint64_t tag = 0;
  int error = 0;       // 0 or an errno value
  uint32_t bytes = 0;  // as read; fewer than expected is for the caller to judge
  std::span<const uint8_t> data;
  uint32_t buffer = 0;  // to give back with Release once data has been copied
};

// A few at a time, so that the next reads follow singly: a drive that is given many at once and
// then none does less (measured at 32 in flight: 0.87 of fio's reads with up to 64 at once, 1.01
// with 4).
inline constexpr size_t kReapMax = 4;

class BlockReader {
 public:
  virtual ~BlockReader() = default;

  // What status, logs and metrics call it, with the way files are opened: "io_uring direct".
  virtual std::string name() const = 0;
  // Reads that may be in flight: submitted and not reaped. There are kReapMax more buffers than
  // that, so that the next reads can start before the last ones have been copied.
  virtual size_t depth() const = 0;
  virtual size_t in_flight() const = 0;

  // Queues a read; in_flight() < depth() is the caller's duty.
  virtual void Submit(const BlockRead& read) = 0;
  // Starts what is queued. One system call for a batch where the back end can.
  virtual void Flush() = 0;
  // Moves finished reads to `out`, at most kReapMax of which may be unreleased. With `wait`, blocks
  // until there is one (reads are in flight).
  virtual size_t Reap(std::span<BlockDone> out, bool wait) = 0;
  virtual void Release(uint32_t buffer) = 0;
  // Readable while finished reads wait to be reaped; -1 when reads finish inside Flush.
  virtual int event_fd() const { return -1; }
  // Before sleeping on event_fd(): finished reads ring it from now on, until the next Reap. False:
  // there are finished reads already.
  virtual bool ArmEvent() { return true; }
};

}  // namespace twinspark::engram
