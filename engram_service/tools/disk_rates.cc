// Transfers of 16 MiB, the packer's own size; the written file is preallocated as its is.
#include "engram_service/tools/disk_rates.h"

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <thread>

#include <fcntl.h>
#include <unistd.h>

#include "absl/status/status.h"

#include "common/status_macros.h"
#include "engram_service/store/file_io.h"
#include "engram_service/store/row_range_reader.h"
#include "engram_service/store/row_table.h"

namespace twinspark::engram {
namespace {

constexpr size_t kTransferBytes = size_t{16} << 20;

using Clock = std::chrono::steady_clock;

double Rate(uint64_t bytes, Clock::time_point begin) {
  return static_cast<double>(bytes) / std::chrono::duration<double>(Clock::now() - begin).count();
}

// Over and over the first `bytes`, for as long as `other` runs; at least once.
absl::StatusOr<double> ReadRate(const TableFile& file,
                                uint64_t bytes,
                                const std::atomic<bool>& other) {
  AlignedBuffer buffer;
  const auto to = buffer.Get(kTransferBytes);
  const auto begin = Clock::now();
  uint64_t done = 0;
  while (done < bytes || other) {
    const ssize_t n =
        pread(file.fd.get(), to.data(), kTransferBytes, static_cast<off_t>(done % bytes));
    if (n < 0 && errno == EINTR) continue;
    if (n <= 0) return ErrnoStatus(n < 0 ? errno : EIO, file.path);
    done += static_cast<uint64_t>(n);
  }
  return Rate(done, begin);
}

absl::StatusOr<double> WriteRate(const std::string& dir,
                                 uint64_t bytes,
                                 std::atomic<bool>& running) {
  Fd fd(open(dir.c_str(), O_TMPFILE | O_RDWR | O_CLOEXEC | O_DIRECT, 0600));
  if (!fd.valid()) fd = Fd(open(dir.c_str(), O_TMPFILE | O_RDWR | O_CLOEXEC, 0600));
  if (!fd.valid()) return ErrnoStatus(errno, dir);
  const int error = posix_fallocate(fd.get(), 0, static_cast<off_t>(bytes));
  if (error != 0) return ErrnoStatus(error, dir);
  AlignedBuffer buffer;
  const auto from = buffer.Get(kTransferBytes);
  std::fill(from.begin(), from.end(), uint8_t{0x5a});
  const auto begin = Clock::now();
  absl::Status status;
  for (uint64_t done = 0; status.ok() && done < bytes; done += kTransferBytes)
    status = WriteExactly(fd.get(), done, from, dir);
  if (status.ok() && fdatasync(fd.get()) != 0) status = ErrnoStatus(errno, dir);
  running = false;
  RETURN_IF_ERROR(status);
  return Rate(bytes, begin);
}

}  // namespace

absl::StatusOr<DiskRates> MeasureDiskRates(const std::string& source,
                                           const std::string& out_dir,
                                           uint64_t bytes) {
  ASSIGN_OR_RETURN(const TableFile file, OpenTableFile(source, true));
  bytes = std::min(bytes, file.bytes) / kTransferBytes * kTransferBytes;
  if (bytes == 0) return absl::InvalidArgumentError(source + " is too small to measure a drive");
  DiskRates rates;
  std::atomic<bool> other{false};
  ASSIGN_OR_RETURN(rates.read, ReadRate(file, bytes, other));
  ASSIGN_OR_RETURN(rates.write, WriteRate(out_dir, bytes, other));
  absl::StatusOr<double> beside = absl::InternalError("not measured");
  other = true;
  std::thread reader([&] { beside = ReadRate(file, bytes, other); });
  const absl::StatusOr<double> write_beside = WriteRate(out_dir, bytes, other);
  other = false;
  reader.join();
  RETURN_IF_ERROR(beside.status());
  RETURN_IF_ERROR(write_beside.status());
  rates.read_beside = *beside;
  rates.write_beside = *write_beside;
  return rates;
}

}  // namespace twinspark::engram
