// The simplest back end: the owner thread itself calls pread in Flush. Right for tables that lie in
// the page cache (the demo model, tests, tools), where a hand-over to another thread would cost
// more than the read. Owner thread only.
#pragma once

#include <deque>
#include <string>
#include <vector>

#include "engram_service/io/aligned_pool.h"
#include "engram_service/io/block_reader.h"

namespace twinspark::engram {

class InlineReader : public BlockReader {
 public:
  explicit InlineReader(size_t depth) : depth_(depth), pool_(depth + kReapMax) {}

  std::string name() const override { return "pread inline"; }
  size_t depth() const override { return depth_; }
  size_t in_flight() const override { return queued_.size() + done_.size(); }
  void Submit(const BlockRead& read) override;
  void Flush() override;
  size_t Reap(std::span<BlockDone> out, bool wait) override;
  void Release(uint32_t buffer) override { pool_.Give(buffer); }

 private:
  struct Queued {
    BlockRead read;
    uint32_t buffer;
  };
  const size_t depth_;
  AlignedPool pool_;
  std::vector<Queued> queued_;
  std::deque<BlockDone> done_;
};

}  // namespace twinspark::engram
