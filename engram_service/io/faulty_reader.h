// A BlockReader that spoils what another one reads, for tests: I/O errors, short reads, flipped
// bits, delays, on chosen reads. Owner thread only.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <utility>

#include "engram_service/io/block_reader.h"

namespace twinspark::engram {

class FaultyReader : public BlockReader {
 public:
  // Called for every finished read, with its block and how often that block has been read before;
  // may change error, bytes, and the data through `writable`.
  using Spoil = std::function<void(
      const BlockRead& read, int attempt, BlockDone& done, std::span<uint8_t> writable)>;

  FaultyReader(std::unique_ptr<BlockReader> inner, Spoil spoil);
  ~FaultyReader() override;

  std::string name() const override { return "faulty " + inner_->name(); }
  size_t depth() const override { return inner_->depth(); }
  size_t in_flight() const override { return inner_->in_flight(); }
  void Submit(const BlockRead& read) override;
  void Flush() override { inner_->Flush(); }
  size_t Reap(std::span<BlockDone> out, bool wait) override;
  void Release(uint32_t buffer) override { inner_->Release(buffer); }
  int event_fd() const override { return inner_->event_fd(); }
  bool ArmEvent() override { return inner_->ArmEvent(); }

 private:
  struct State;
  std::unique_ptr<BlockReader> inner_;
  Spoil spoil_;
  std::unique_ptr<State> state_;
};

}  // namespace twinspark::engram
