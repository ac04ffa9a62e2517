// Remembers each submitted read by its tag, so that a completion can be judged by block.
#include "engram_service/io/faulty_reader.h"

#include <map>

namespace twinspark::engram {

struct FaultyReader::State {
  std::map<uint64_t, BlockRead> by_tag;
  std::map<std::pair<int, uint64_t>, int> attempts;  // (fd, block) > completions so far
};

FaultyReader::FaultyReader(std::unique_ptr<BlockReader> inner, Spoil spoil)
    : inner_(std::move(inner)), spoil_(std::move(spoil)), state_(std::make_unique<State>()) {}

FaultyReader::~FaultyReader() = default;

void FaultyReader::Submit(const BlockRead& read) {
  state_->by_tag[read.tag] = read;
  inner_->Submit(read);
}

size_t FaultyReader::Reap(std::span<BlockDone> out, bool wait) {
  const size_t count = inner_->Reap(out, wait);
  for (size_t i = 0; i < count; ++i) {
    const BlockRead read = state_->by_tag[out[i].tag];
    const int attempt = state_->attempts[{read.fd, read.block_idx}]++;
    // Buffers belong to the reader until they are released, so spoiling them in place is allowed.
    spoil_(read, attempt, out[i], {const_cast<uint8_t*>(out[i].data.data()), out[i].data.size()});
  }
  return count;
}

}  // namespace twinspark::engram
