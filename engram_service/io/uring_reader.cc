// The ring starts disabled, so that the thread that enables it (the owner, at its first Submit)
// becomes the only one that may submit: the kernel then skips locks and runs completions when the
// owner asks. A completion rings an eventfd only for an owner that said it would sleep: a busy one
// looks at the ring itself, and pays neither for the ring of the bell nor for emptying it.
#include "engram_service/io/uring_reader.h"

#include <cerrno>
#include <cstring>

#include <sys/eventfd.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "absl/container/flat_hash_map.h"
#include "absl/strings/str_cat.h"
#include <liburing.h>

#include "common/check.h"
#include "engram_service/io/aligned_pool.h"

namespace twinspark::engram {

struct UringReader::Impl {
  explicit Impl(size_t most) : depth(most), pool(most + kReapMax), tags(most + kReapMax) {}
  ~Impl() {
    if (ring_made) io_uring_queue_exit(&ring);
    if (event_fd >= 0) close(event_fd);
  }

  io_uring ring = {};
  bool ring_made = false;
  bool enabled = false;
  bool armed = false;  // completions ring event_fd
  bool fixed_buffers = false;
  int event_fd = -1;
  const size_t depth;
  size_t in_flight = 0;
  AlignedPool pool;
  std::vector<uint64_t> tags;                // by buffer
  absl::flat_hash_map<int, int> registered;  // fd > index
  size_t unsubmitted = 0;
};

UringReader::UringReader() = default;
UringReader::~UringReader() = default;

absl::StatusOr<std::unique_ptr<UringReader>> UringReader::Create(size_t depth,
                                                                 std::span<const int> fds) {
  std::unique_ptr<UringReader> reader(new UringReader);
  reader->impl_ = std::make_unique<Impl>(depth);
  Impl& impl = *reader->impl_;
  io_uring_params params = {};
  params.flags = IORING_SETUP_R_DISABLED | IORING_SETUP_SINGLE_ISSUER | IORING_SETUP_DEFER_TASKRUN |
                 IORING_SETUP_TASKRUN_FLAG;
  int result = io_uring_queue_init_params(static_cast<unsigned>(depth), &impl.ring, &params);
  if (result == -EINVAL) {
    // Kernels before 6.1.
    params = {};
    params.flags = IORING_SETUP_R_DISABLED;
    result = io_uring_queue_init_params(static_cast<unsigned>(depth), &impl.ring, &params);
  }
  if (result < 0) {
    return absl::UnavailableError(absl::StrCat("io_uring is not to be had: ", strerror(-result)));
  }
  impl.ring_made = true;
  impl.event_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
  if (impl.event_fd < 0 || io_uring_register_eventfd(&impl.ring, impl.event_fd) < 0) {
    return absl::UnavailableError("io_uring without an eventfd");
  }
  // Both save work per read and are optional: memlock limits or old kernels may refuse them.
  const iovec memory = {impl.pool.memory().data(), impl.pool.memory().size()};
  impl.fixed_buffers = io_uring_register_buffers(&impl.ring, &memory, 1) == 0;
  if (!fds.empty() &&
      io_uring_register_files(&impl.ring, fds.data(), static_cast<unsigned>(fds.size())) == 0) {
    for (size_t i = 0; i < fds.size(); ++i)
      impl.registered[fds[i]] = static_cast<int>(i);
  }
  return reader;
}

std::string UringReader::name() const {
  return absl::StrCat("io_uring depth ", impl_->depth,
                      impl_->fixed_buffers ? " fixed buffers" : "");
}
size_t UringReader::depth() const {
  return impl_->depth;
}
size_t UringReader::in_flight() const {
  return impl_->in_flight;
}
void UringReader::Release(uint32_t buffer) {
  impl_->pool.Give(buffer);
}
int UringReader::event_fd() const {
  return impl_->event_fd;
}

void UringReader::Submit(const BlockRead& read) {
  Impl& impl = *impl_;
  if (!impl.enabled) {
    // liburing 2.3 declares io_uring_enable_rings and does not export it.
    CHECK_EQ(syscall(__NR_io_uring_register, impl.ring.ring_fd, IORING_REGISTER_ENABLE_RINGS,
                     nullptr, 0),
             0);
    impl.enabled = true;
    CHECK_EQ(io_uring_cq_eventfd_toggle(&impl.ring, false), 0);
  }
  const uint32_t buffer = impl.pool.Take();
  impl.tags[buffer] = read.tag;
  // As many entries as reads in flight: there is always a free one.
  io_uring_sqe* sqe = io_uring_get_sqe(&impl.ring);
  CHECK(sqe != nullptr);
  const auto file = impl.registered.find(read.fd);
  const int fd = file == impl.registered.end() ? read.fd : file->second;
  const uint64_t offset = read.block_idx * 4096;
  if (impl.fixed_buffers) {
    io_uring_prep_read_fixed(sqe, fd, impl.pool.Data(buffer), 4096, offset, 0);
  } else {
    io_uring_prep_read(sqe, fd, impl.pool.Data(buffer), 4096, offset);
  }
  if (file != impl.registered.end()) sqe->flags |= IOSQE_FIXED_FILE;
  sqe->user_data = buffer;
  ++impl.unsubmitted;
  ++impl.in_flight;
}

void UringReader::Flush() {
  Impl& impl = *impl_;
  while (impl.unsubmitted > 0) {
    // One call starts these reads and lets the kernel put finished ones into the ring.
    const int submitted = io_uring_submit_and_get_events(&impl.ring);
    if (submitted == -EINTR || submitted == -EAGAIN || submitted == -EBUSY) continue;
    CHECK_GE(submitted, 0) << strerror(-submitted);
    impl.unsubmitted -= static_cast<size_t>(submitted);
  }
}

bool UringReader::ArmEvent() {
  Impl& impl = *impl_;
  if (!impl.enabled || impl.in_flight == 0) return true;
  if (!impl.armed) {
    impl.armed = true;
    io_uring_cq_eventfd_toggle(&impl.ring, true);
  }
  // Whatever finished before is found by looking once more.
  io_uring_cqe* cqe = nullptr;
  return io_uring_peek_cqe(&impl.ring, &cqe) != 0;
}

size_t UringReader::Reap(std::span<BlockDone> out, bool wait) {
  Impl& impl = *impl_;
  if (!impl.enabled) return 0;
  if (impl.armed) {
    impl.armed = false;
    io_uring_cq_eventfd_toggle(&impl.ring, false);
    uint64_t ignored;
    while (read(impl.event_fd, &ignored, sizeof(ignored)) > 0) {
    }
  }
  io_uring_cqe* cqe = nullptr;
  if (wait) {
    int result;
    do {
      result = io_uring_wait_cqe(&impl.ring, &cqe);
    } while (result == -EINTR);
  }
  size_t count = 0;
  while (count < out.size() && io_uring_peek_cqe(&impl.ring, &cqe) == 0) {
    const auto buffer = static_cast<uint32_t>(cqe->user_data);
    BlockDone& done = out[count++];
    done.tag = impl.tags[buffer];
    done.error = cqe->res < 0 ? -cqe->res : 0;
    done.bytes = cqe->res < 0 ? 0 : static_cast<uint32_t>(cqe->res);
    done.data = {impl.pool.Data(buffer), done.bytes};
    done.buffer = buffer;
    io_uring_cqe_seen(&impl.ring, cqe);
  }
  impl.in_flight -= count;
  return count;
}

}  // namespace twinspark::engram
