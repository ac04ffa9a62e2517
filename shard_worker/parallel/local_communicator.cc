// Communicator between threads. A call is: publish what I pass, barrier, work on my share of
// everybody's memory, barrier. Waits spin with yields: steps are short and the peers are running.
#include "shard_worker/parallel/local_communicator.h"

#include <atomic>
#include <chrono>
#include <cstring>
#include <thread>

#include "absl/strings/str_cat.h"

#include "common/check.h"
#include "common/status_macros.h"

namespace twinspark {
namespace {

enum class Operation : int { kAllReduce = 1, kAllGather, kBarrier };

struct Posted {
  Operation operation = Operation::kBarrier;
  void* data = nullptr;
  size_t size = 0;
};

struct Group {
  explicit Group(int world_size, int64_t timeout)
      : world(world_size), timeout_ms(timeout), posted(static_cast<size_t>(world_size)) {}

  const int world;
  const int64_t timeout_ms;
  std::vector<Posted> posted;
  std::atomic<int> arrived{0};
  std::atomic<uint64_t> generation{0};
  std::atomic<bool> aborted{false};
};

class LocalCommunicator : public Communicator {
 public:
  LocalCommunicator(std::shared_ptr<Group> group, int rank)
      : group_(std::move(group)), rank_(rank) {}
  ~LocalCommunicator() override { Abort(); }

  int rank() const override { return rank_; }
  int world() const override { return group_->world; }

  absl::Status AllReduceSum(std::span<float> values) override {
    RETURN_IF_ERROR(Post(Operation::kAllReduce, values.data(), values.size()));
    // This rank sums its share of the elements and stores the sums into everybody's memory.
    const size_t world = static_cast<size_t>(group_->world);
    const size_t begin = values.size() * static_cast<size_t>(rank_) / world;
    const size_t end = values.size() * static_cast<size_t>(rank_ + 1) / world;
    for (size_t i = begin; i < end; ++i) {
      float sum = static_cast<const float*>(group_->posted[0].data)[i];
      for (size_t r = 1; r < world; ++r)
        sum += static_cast<const float*>(group_->posted[r].data)[i];
      for (size_t r = 0; r < world; ++r)
        static_cast<float*>(group_->posted[r].data)[i] = sum;
    }
    return Wait();
  }

  absl::Status AllGather(std::span<const std::byte> mine, std::span<std::byte> all) override {
    CHECK_EQ(all.size(), mine.size() * static_cast<size_t>(group_->world));
    std::byte* own_place = all.data() + mine.size() * static_cast<size_t>(rank_);
    if (own_place != mine.data() && !mine.empty())
      std::memmove(own_place, mine.data(), mine.size());
    RETURN_IF_ERROR(Post(Operation::kAllGather, own_place, mine.size()));
    for (int r = 0; r < group_->world; ++r) {
      if (r == rank_ || mine.empty()) continue;
      std::memcpy(all.data() + mine.size() * static_cast<size_t>(r),
                  group_->posted[static_cast<size_t>(r)].data, mine.size());
    }
    return Wait();
  }

  absl::Status Barrier() override { return Post(Operation::kBarrier, nullptr, 0); }

  void Abort() override { group_->aborted.store(true); }

 private:
  absl::Status Post(Operation operation, void* data, size_t size) {
    group_->posted[static_cast<size_t>(rank_)] = {operation, data, size};
    RETURN_IF_ERROR(Wait());
    for (const Posted& other : group_->posted) {
      if (other.operation == operation && other.size == size) continue;
      Abort();
      return absl::InternalError(absl::StrCat(
          "ranks disagree: rank ", rank_, " is in operation ", static_cast<int>(operation), " of ",
          size, ", another in ", static_cast<int>(other.operation), " of ", other.size));
    }
    return absl::OkStatus();
  }

  absl::Status Wait() {
    if (group_->aborted.load()) return absl::UnavailableError("communicator aborted");
    const uint64_t generation = group_->generation.load(std::memory_order_acquire);
    if (group_->arrived.fetch_add(1, std::memory_order_acq_rel) + 1 == group_->world) {
      group_->arrived.store(0, std::memory_order_relaxed);
      group_->generation.store(generation + 1, std::memory_order_release);
      return absl::OkStatus();
    }
    const auto start = std::chrono::steady_clock::now();
    for (int spins = 0; group_->generation.load(std::memory_order_acquire) == generation; ++spins) {
      // A peer may pass this barrier and abort at once: then the barrier has been passed here too.
      if (group_->aborted.load() &&
          group_->generation.load(std::memory_order_acquire) == generation)
        return absl::UnavailableError("communicator aborted");
      if (spins < 64) continue;
      std::this_thread::yield();
      if (spins % 256 != 0) continue;
      const auto waited = std::chrono::steady_clock::now() - start;
      if (waited > std::chrono::milliseconds(group_->timeout_ms)) {
        Abort();
        return absl::DeadlineExceededError(absl::StrCat(
            "a peer of rank ", rank_, " did not come within ", group_->timeout_ms, " ms"));
      }
      if (waited > std::chrono::milliseconds(2))
        std::this_thread::sleep_for(std::chrono::microseconds(50));
    }
    return absl::OkStatus();
  }

  std::shared_ptr<Group> group_;
  int rank_;
};

}  // namespace

std::vector<std::unique_ptr<Communicator>> MakeLocalGroup(int world, int64_t timeout_ms) {
  CHECK_GT(world, 0);
  auto group = std::make_shared<Group>(world, timeout_ms);
  std::vector<std::unique_ptr<Communicator>> ranks;
  for (int rank = 0; rank < world; ++rank)
    ranks.push_back(std::make_unique<LocalCommunicator>(group, rank));
  return ranks;
}

}  // namespace twinspark
