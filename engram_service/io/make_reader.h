// Chooses the back end at start: io_uring past the page cache, else a thread pool, else (small
// tables that lie in memory anyway) reads in the caller's thread. The choice is visible in status,
// log and metrics. Spec: engram.md 4.3.
#pragma once

#include <memory>
#include <span>
#include <string>

#include "absl/status/statusor.h"

#include "engram_service/io/block_reader.h"

namespace twinspark::engram {

struct ReaderChoice {
  std::string kind = "auto";  // auto, uring, threads, inline
  size_t depth = 128;
  size_t threads = 96;
};

struct MadeReader {
  std::unique_ptr<BlockReader> reader;
  std::string why_not_uring;  // empty unless auto had to do without
};

// `direct`: the files are open with O_DIRECT, so a read goes to the drive and must not block the
// caller.
absl::StatusOr<MadeReader> MakeReader(const ReaderChoice& choice,
                                      std::span<const int> fds,
                                      bool direct);

}  // namespace twinspark::engram
