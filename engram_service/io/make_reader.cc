// One function; the kinds are settings, so that tests and operators can take any of them.
#include "engram_service/io/make_reader.h"

#include <utility>

#include "absl/strings/str_cat.h"

#include "engram_service/io/inline_reader.h"
#include "engram_service/io/pread_pool.h"
#include "engram_service/io/uring_reader.h"

namespace twinspark::engram {

absl::StatusOr<MadeReader> MakeReader(const ReaderChoice& choice,
                                      std::span<const int> fds,
                                      bool direct) {
  MadeReader made;
  if (choice.kind == "inline" || (choice.kind == "auto" && !direct)) {
    made.reader = std::make_unique<InlineReader>(choice.depth);
    return made;
  }
  if (choice.kind == "uring" || choice.kind == "auto") {
    auto uring = UringReader::Create(choice.depth, fds);
    if (uring.ok()) {
      made.reader = *std::move(uring);
      return made;
    }
    if (choice.kind == "uring") return uring.status();
    made.why_not_uring = std::string(uring.status().message());
  }
  if (choice.kind == "threads" || choice.kind == "auto") {
    made.reader = std::make_unique<PreadPool>(choice.threads, choice.depth);
    return made;
  }
  return absl::InvalidArgumentError(
      absl::StrCat("ENGRAM_IO '", choice.kind, "': auto, uring, threads or inline"));
}

}  // namespace twinspark::engram
