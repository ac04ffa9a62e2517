// One pread per block; the result is judged by the caller like any other back end's.
#include "engram_service/io/inline_reader.h"

#include <cerrno>

#include <unistd.h>

namespace twinspark::engram {

void InlineReader::Submit(const BlockRead& read) {
  queued_.push_back({read, pool_.Take()});
}

void InlineReader::Flush() {
  for (const Queued& queued : queued_) {
    uint8_t* data = pool_.Data(queued.buffer);
    ssize_t n;
    do {
      n = pread(queued.read.fd, data, 4096, static_cast<off_t>(queued.read.block_idx * 4096));
    } while (n < 0 && errno == EINTR);
    BlockDone done;
    done.tag = queued.read.tag;
    done.error = n < 0 ? errno : 0;
    done.bytes = n < 0 ? 0 : static_cast<uint32_t>(n);
    done.data = {data, done.bytes};
    done.buffer = queued.buffer;
    done_.push_back(done);
  }
  queued_.clear();
}

size_t InlineReader::Reap(std::span<BlockDone> out, bool /*wait*/) {
  size_t count = 0;
  while (count < out.size() && !done_.empty()) {
    out[count++] = done_.front();
    done_.pop_front();
  }
  return count;
}

}  // namespace twinspark::engram
