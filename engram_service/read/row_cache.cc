// Layout of the arena: rows (page-aligned, so huge pages serve them), metadata, hash table, three
// rings, ghost table. The number of entries is what fits. Zero bytes are a valid beginning of all
// of it, so that nothing has to be written before it is used; it is populated back part first,
// because tables are needed whole and rows one after another.
#include "engram_service/read/row_cache.h"

#include <algorithm>
#include <bit>
#include <cerrno>
#include <cstring>
#include <type_traits>

#include <sys/mman.h>

#include "absl/strings/str_cat.h"

#include "common/check.h"
#include "common/host_memory.h"
#include "common/status_macros.h"

namespace twinspark::engram {
namespace {

constexpr uint8_t kMaxCount = 3;
// Each step holds the lock of the address space: one huge page, so that nobody waits long for it.
constexpr size_t kPopulateStep = size_t{2} << 20;
constexpr uint32_t kMinEntries = 16;

// One step of population; EINVAL: a kernel without the call, which leaves it to the page faults.
int PopulateRange(void* begin, size_t bytes) {
  return madvise(begin, bytes, MADV_POPULATE_WRITE) == 0 || errno == EINVAL ? 0 : errno;
}

uint64_t HashKey(const NgramKey& key) {
  uint64_t h = key.order * 0x9E3779B97F4A7C15ull;
  for (const int32_t id : key.ids) {
    h ^= static_cast<uint32_t>(id);
    h *= 0xD6E8FEB86659FD93ull;
    h ^= h >> 32;
  }
  return h;
}

size_t RoundUp(size_t value, size_t unit) {
  return (value + unit - 1) / unit * unit;
}

}  // namespace

void RowCache::Ring::Push(uint32_t slot) {
  DCHECK(size < capacity);
  uint32_t at = head + size;
  if (at >= capacity) at -= capacity;
  slots[at] = slot;
  ++size;
}

uint32_t RowCache::Ring::Pop() {
  DCHECK(size > 0);
  const uint32_t slot = slots[head];
  if (++head == capacity) head = 0;
  --size;
  return slot;
}

absl::StatusOr<std::unique_ptr<RowCache>> RowCache::Create(const RowCacheShape& shape,
                                                           size_t bytes,
                                                           Populate populate) {
  static_assert(std::is_trivially_copyable_v<Meta> && std::is_trivially_destructible_v<Meta>);
  CHECK(shape.heads * shape.layers <= 32 && shape.entry_bytes() > 0);
  // The hash table is a power of two above 4/3 of the entries, the ghost table one below twice:
  // count both at their largest.
  const size_t per_entry = shape.entry_bytes() + sizeof(Meta) + 3 * sizeof(uint32_t) +
                           3 * sizeof(uint32_t) + 2 * sizeof(uint64_t);
  const size_t capacity = bytes / per_entry;
  if (capacity < kMinEntries || capacity > UINT32_MAX / 8) {
    return absl::InvalidArgumentError(absl::StrCat("a row cache of ", bytes, " bytes holds ",
                                                   capacity, " entries of ", per_entry,
                                                   " bytes; expected 16 to 500 million"));
  }
  std::unique_ptr<RowCache> cache(new RowCache);
  cache->shape_ = shape;
  cache->capacity_ = static_cast<uint32_t>(capacity);
  cache->small_capacity_ = std::max<uint32_t>(1, cache->capacity_ / 10);
  const size_t table_size = std::bit_ceil(capacity + capacity / 3);
  const size_t ghost_size = std::bit_floor(capacity * 2);
  const size_t rows_bytes = RoundUp(capacity * shape.entry_bytes(), 4096);
  const size_t meta_bytes = RoundUp(capacity * sizeof(Meta), 64);
  const size_t table_bytes = RoundUp(table_size * sizeof(uint32_t), 64);
  const size_t ring_bytes = RoundUp(capacity * sizeof(uint32_t), 64);
  cache->arena_bytes_ =
      rows_bytes + meta_bytes + table_bytes + 3 * ring_bytes + ghost_size * sizeof(uint64_t);
  void* arena = mmap(nullptr, cache->arena_bytes_, PROT_READ | PROT_WRITE,
                     MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (arena == MAP_FAILED) {
    return absl::ResourceExhaustedError(absl::StrCat("row cache: cannot have ", cache->arena_bytes_,
                                                     " bytes: ", strerror(errno),
                                                     "; lower DSV41_CACHE_GIB"));
  }
  cache->arena_ = arena;
  madvise(arena, cache->arena_bytes_, MADV_HUGEPAGE);
  auto* at = static_cast<uint8_t*>(arena);
  const auto take = [&at](size_t count) {
    uint8_t* start = at;
    at += count;
    return start;
  };
  cache->rows_ = take(rows_bytes);
  cache->rows_bytes_ = rows_bytes;
  cache->meta_ = reinterpret_cast<Meta*>(take(meta_bytes));
  cache->table_ = reinterpret_cast<uint32_t*>(take(table_bytes));
  cache->table_mask_ = static_cast<uint32_t>(table_size - 1);
  for (Ring* ring : {&cache->small_, &cache->main_, &cache->free_}) {
    ring->slots = reinterpret_cast<uint32_t*>(take(ring_bytes));
    ring->capacity = cache->capacity_;
  }
  cache->ghost_ = reinterpret_cast<uint64_t*>(take(ghost_size * sizeof(uint64_t)));
  cache->ghost_mask_ = static_cast<uint32_t>(ghost_size - 1);
  // A zeroed ghost entry must read as too old.
  cache->ghost_clock_ = cache->capacity_ + 1;
  RETURN_IF_ERROR(cache->StartPopulating(populate));
  return cache;
}

absl::Status RowCache::StartPopulating(Populate populate) {
  if (populate == Populate::kBehind) {
    const uint64_t available = ReadHostMemory().available_bytes;
    if (available != 0 && available < arena_bytes_) {
      return absl::ResourceExhaustedError(absl::StrCat("row cache: needs ", arena_bytes_,
                                                       " bytes, the machine has ", available,
                                                       " available; lower DSV41_CACHE_GIB"));
    }
    return absl::OkStatus();
  }
  // Now: running out of memory later would be a kill in service.
  PopulateAll();
  if (populate_error() == 0) return absl::OkStatus();
  return absl::ResourceExhaustedError(absl::StrCat("row cache: cannot populate ", arena_bytes_,
                                                   " bytes: ", strerror(populate_error()),
                                                   "; lower DSV41_CACHE_GIB"));
}

void RowCache::PopulateBehind() {
  CHECK(!populate_thread_.joinable() && usable() == 0);
  populate_thread_ = std::thread([this] { PopulateAll(); });
}

void RowCache::PopulateAll() {
  auto* base = static_cast<uint8_t*>(arena_);
  int error = 0;
  const size_t end = RoundUp(arena_bytes_, 4096);
  for (size_t at = rows_bytes_; error == 0 && at < end && !stop_; at += kPopulateStep)
    error = PopulateRange(base + at, std::min(kPopulateStep, end - at));
  for (size_t done = 0; error == 0 && done < rows_bytes_ && !stop_;) {
    const size_t step = std::min(kPopulateStep, rows_bytes_ - done);
    error = PopulateRange(base + done, step);
    if (error != 0) break;
    done += step;
    usable_.store(static_cast<uint32_t>(std::min<size_t>(capacity_, done / shape_.entry_bytes())),
                  std::memory_order_release);
  }
  populate_error_.store(error, std::memory_order_release);
  populating_.store(false, std::memory_order_release);
}

RowCache::~RowCache() {
  stop_ = true;
  if (populate_thread_.joinable()) populate_thread_.join();
  if (arena_ != nullptr) munmap(arena_, arena_bytes_);
}

uint32_t RowCache::FindSlot(const NgramKey& key, uint32_t hash) const {
  for (uint32_t at = hash & table_mask_; table_[at] != 0; at = (at + 1) & table_mask_) {
    const uint32_t slot = table_[at] - 1;
    if (meta_[slot].hash == hash && meta_[slot].key == key) return slot;
  }
  return UINT32_MAX;
}

RowCache::Ref RowCache::Find(const NgramKey& key) {
  const uint32_t slot = FindSlot(key, static_cast<uint32_t>(HashKey(key)));
  if (slot == UINT32_MAX) return {};
  Meta& meta = meta_[slot];
  if (meta.count < kMaxCount) ++meta.count;
  return {slot, meta.generation};
}

RowCache::Ref RowCache::Insert(const NgramKey& key) {
  if (!HasFreeSlot()) {
    // Read in this order: once population has ended, usable() is final.
    const bool growing = populating_.load(std::memory_order_acquire);
    if (growing || usable() < kMinEntries) return {};
    if (usable() < capacity_) {  // ended early: the cache is a smaller one from here on
      capacity_ = usable();
      small_capacity_ = std::max<uint32_t>(1, capacity_ / 10);
    }
    if (!HasFreeSlot()) Evict();
  }
  const uint64_t hash = HashKey(key);
  const uint32_t slot = free_.size > 0 ? free_.Pop() : next_fresh_++;
  Meta& meta = meta_[slot];
  meta.key = key;
  meta.hash = static_cast<uint32_t>(hash);
  meta.filled = 0;
  meta.count = 0;
  AddToTable(slot);
  (InGhost(hash) ? main_ : small_).Push(slot);
  ++size_;
  ++stats_.inserted;
  return {slot, meta.generation};
}

void RowCache::AddToTable(uint32_t slot) {
  uint32_t at = meta_[slot].hash & table_mask_;
  while (table_[at] != 0)
    at = (at + 1) & table_mask_;
  table_[at] = slot + 1;
}

// Backward shift: entries behind the hole move up where their place allows, so that no marker of a
// removed entry has to stay.
void RowCache::RemoveFromTable(uint32_t slot) {
  uint32_t hole = meta_[slot].hash & table_mask_;
  while (table_[hole] != slot + 1)
    hole = (hole + 1) & table_mask_;
  for (uint32_t at = (hole + 1) & table_mask_; table_[at] != 0; at = (at + 1) & table_mask_) {
    const uint32_t home = meta_[table_[at] - 1].hash & table_mask_;
    if (((at - home) & table_mask_) < ((at - hole) & table_mask_)) continue;
    table_[hole] = table_[at];
    hole = at;
  }
  table_[hole] = 0;
}

void RowCache::Drop(uint32_t slot) {
  RemoveFromTable(slot);
  ++meta_[slot].generation;
  free_.Push(slot);
  --size_;
  ++stats_.evicted;
}

// Frees one slot. Entries used again while in the small queue move on to the main one; the others
// leave and are remembered.
void RowCache::Evict() {
  while (free_.size == 0) {
    if (small_.size >= small_capacity_ || main_.size == 0) {
      const uint32_t slot = small_.Pop();
      if (meta_[slot].count > 0) {
        meta_[slot].count = 0;
        main_.Push(slot);
      } else {
        AddGhost(HashKey(meta_[slot].key));
        Drop(slot);
      }
    } else {
      const uint32_t slot = main_.Pop();
      if (meta_[slot].count > 0) {
        --meta_[slot].count;
        main_.Push(slot);
      } else {
        Drop(slot);
      }
    }
  }
}

bool RowCache::InGhost(uint64_t hash) const {
  const uint64_t entry = ghost_[(hash >> 32) & ghost_mask_];
  const auto came = static_cast<uint32_t>(entry);
  return (entry >> 32) == (hash & 0xffffffffu) && ghost_clock_ - came <= capacity_;
}

void RowCache::AddGhost(uint64_t hash) {
  ghost_[(hash >> 32) & ghost_mask_] = (hash << 32) | ghost_clock_++;
}

}  // namespace twinspark::engram
