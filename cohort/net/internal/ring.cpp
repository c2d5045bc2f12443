// Each side writes one counter and reads the other's; the difference is what lies in the ring. Who is about
// to sleep sets its flag and looks once more at the other's counter. The other side moves its counter and
// looks at the flag then. Both orders are sequentially consistent, so at least one of the two sees the other:
// no wake-up is lost.
#include "cohort/net/internal/ring.h"

#include <algorithm>
#include <cstring>

#include "cohort/base/error.h"

namespace cohort::net {
namespace {

// A flag of the other side, and away with it. The fence stands between this side's counter and the flag.
bool take(std::atomic<std::uint32_t>& flag) {
  std::atomic_thread_fence(std::memory_order_seq_cst);
  return flag.load(std::memory_order_relaxed) != 0 && flag.exchange(0, std::memory_order_acq_rel) != 0;
}

void set(std::atomic<std::uint32_t>& flag) {
  flag.store(1, std::memory_order_relaxed);
  std::atomic_thread_fence(std::memory_order_seq_cst);
}

}  // namespace

std::size_t RingWriter::room() const {
  const std::uint64_t used = written_ - state_->read.load(std::memory_order_acquire);
  if (used > bytes_.size()) throw CommError("net.ring", "the peer has read bytes that were not written");
  return bytes_.size() - used;
}

bool RingWriter::has_room() const {
  return written_ - state_->read.load(std::memory_order_acquire) != bytes_.size();
}

std::size_t RingWriter::write(std::span<const iovec> parts) {
  const std::uint64_t begin = written_;
  std::size_t left = room();
  for (const iovec& part : parts) {
    const auto* from = static_cast<const std::byte*>(part.iov_base);
    std::size_t size = std::min(part.iov_len, left);
    left -= size;
    while (size > 0) {
      const std::size_t at = written_ % bytes_.size(), piece = std::min(size, bytes_.size() - at);
      std::memcpy(bytes_.data() + at, from, piece);
      from += piece;
      size -= piece;
      written_ += piece;
    }
    if (left == 0) break;
  }
  state_->written.store(written_, std::memory_order_release);
  return written_ - begin;
}

bool RingWriter::take_wakeup() {
  return take(state_->reader_sleeps);
}

bool RingWriter::wait_for_room() {
  set(state_->writer_waits);
  if (room() == 0) return true;
  state_->writer_waits.store(0, std::memory_order_relaxed);
  return false;
}

bool RingReader::has_bytes() const {
  return state_->written.load(std::memory_order_acquire) != read_;
}

std::span<const std::byte> RingReader::peek() const {
  const std::uint64_t size = state_->written.load(std::memory_order_acquire) - read_;
  if (size > bytes_.size()) throw CommError("net.ring", "the peer has written more bytes than the ring has");
  const std::size_t at = read_ % bytes_.size();
  return bytes_.subspan(at, std::min<std::size_t>(size, bytes_.size() - at));
}

void RingReader::consume(std::size_t num_bytes) {
  read_ += num_bytes;
  state_->read.store(read_, std::memory_order_release);
}

// Not before half of the ring is free: the writer is not to be woken for each piece.
bool RingReader::take_wakeup() {
  if (state_->written.load(std::memory_order_relaxed) - read_ > bytes_.size() / 2) return false;
  return take(state_->writer_waits);
}

bool RingReader::sleep() {
  set(state_->reader_sleeps);
  if (!has_bytes()) return true;
  wake();
  return false;
}

void RingReader::wake() {
  state_->reader_sleeps.store(0, std::memory_order_relaxed);
}

}  // namespace cohort::net
