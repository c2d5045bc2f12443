// Note [Tickets]: a lease has a slot, which is a word in the memory that both processes see, and a ticket,
// which is the word's value. No ticket comes twice in a slot, and each is a multiple of four.
//
//   ticket      it is on its way               owner: lend()
//   ticket + 1  the other process holds it     the other process, when the message has come whole
//   ticket + 2  the other process does not     the other process when it drops the bytes; or the owner,
//                                              of what never came
//
// Each change is a compare-and-swap, so a lease that is taken back cannot be taken by the other process any
// more, and a message that comes twice takes its lease once. No message tells of the end of a lease: the
// owner looks at the words when it needs memory, and at each heartbeat. A process that has died holds
// nothing: the owner knows which leases were that process's.
//
// Free memory that had pages is used first: pages that were never touched cost a fault each, in both
// processes. Pages are reserved before a block is given out, as memory that is not there would be a signal
// otherwise.
//
// A process that was forked shares the memory, and has a copy of what stands here. It must free nothing.
#include "cohort/net/internal/shared_heap.h"

#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <new>

#include "cohort/base/error.h"
#include "cohort/base/exception_text.h"
#include "cohort/base/log.h"
#include "cohort/base/process.h"
#include "cohort/base/threads/wait.h"

namespace cohort::net {
namespace {

constexpr std::size_t kPageBytes = 4096;
constexpr std::size_t kMaxHeapBytes = std::size_t{64} << 30;  // other processes map all of it
constexpr std::chrono::milliseconds kLookForDeaths(100);
using Word = std::atomic<std::uint64_t>;

std::size_t round_up(std::size_t bytes) {
  return (std::max<std::size_t>(bytes, 1) + kPageBytes - 1) / kPageBytes * kPageBytes;
}

std::size_t half_of_memory() {
  const long pages = ::sysconf(_SC_PHYS_PAGES), page = ::sysconf(_SC_PAGESIZE);
  if (pages <= 0 || page <= 0) return kMaxHeapBytes;
  return std::min(kMaxHeapBytes,
                  round_up(static_cast<std::size_t>(pages) / 2 * static_cast<std::size_t>(page)));
}

}  // namespace

bool Holder::is_dead() const {
  if (process_ == ::getpid()) return false;
  const base::Fd fd = base::open_process(process_);
  const std::string began = base::process_start(std::to_string(process_));
  // It is there, but no descriptor is left to read when it began.
  if (began.empty() && (::kill(process_, 0) == 0 || errno == EPERM)) return false;
  if (began != began_) return true;
  return fd.is_open() &&
         (base::ready_events(fd.get(), POLLIN) & POLLIN) != 0;  // nobody has waited for it yet
}

SharedHeap::SharedHeap(std::size_t cached_bytes, std::size_t most_bytes)
    : cached_bytes_(cached_bytes / kPageBytes * kPageBytes),
      most_bytes_(most_bytes == 0 ? half_of_memory() : round_up(most_bytes)),
      process_(::getpid()) {}

bool SharedHeap::is_own_process() const {
  return process_ == ::getpid();
}

std::atomic<std::uint64_t>& SharedHeap::word(std::uint32_t slot) const {
  return std::launder(reinterpret_cast<Word*>(data_.load(std::memory_order_relaxed)))[slot];
}

bool SharedHeap::contains(const std::byte* address) const {
  const std::byte* const data = data_.load(std::memory_order_acquire);
  return data != nullptr && address >= data && address < data + size_.load(std::memory_order_relaxed);
}

// From here to allocate(): under the mutex.
bool SharedHeap::make_memory() {
  if (memory_.data() != nullptr) return true;
  try {
    memory_ = base::SharedMemory::create("net.shared_heap", kHeapHeaderBytes + most_bytes_, false);
  } catch (const SystemError& error) {
    if (!std::exchange(has_warned_, true)) {
      base::log_warning(base::concat("large messages of this host are copied: ", base::message_of(error)));
    }
    return false;
  }
  // A dump would have to look at each page of it.
  static_cast<void>(::madvise(memory_.data(), memory_.size(), MADV_DONTDUMP));
  if (!reserve_pages({0, kHeapHeaderBytes})) {
    memory_ = base::SharedMemory();
    return false;
  }
  new (memory_.data()) Word[kHeapSlots];
  free_.emplace(Range{kHeapHeaderBytes, most_bytes_});
  slots_.resize(kHeapSlots);
  for (std::uint32_t slot = kHeapSlots; slot > 0; --slot) free_slots_.push_back(slot - 1);
  size_.store(memory_.size(), std::memory_order_relaxed);
  data_.store(memory_.data(), std::memory_order_release);
  return true;
}

int SharedHeap::descriptor() {
  const std::lock_guard lock(mutex_);
  return is_own_process() && make_memory() ? memory_.fd() : -1;
}

bool SharedHeap::reserve_pages(Range range) {
  int result = 0;
  do {
    result = ::fallocate(memory_.fd(), 0, static_cast<off_t>(range.offset), static_cast<off_t>(range.size));
  } while (result != 0 && errno == EINTR);
  return result == 0;
}

SharedHeap::HeapBlocks::iterator SharedHeap::find_block(std::uint64_t offset, std::uint64_t num_bytes) {
  auto found = blocks_.upper_bound(offset);
  if (found == blocks_.begin()) return blocks_.end();
  --found;
  const std::uint64_t inside = offset - found->first, size = found->second.size;
  return inside < size && num_bytes <= size - inside ? found : blocks_.end();
}

// Gives the mutex back first: where there is no memory for its counts, the pointer calls release() at once.
std::shared_ptr<std::byte> SharedHeap::hold(std::unique_lock<std::mutex>& lock, HeapBlocks::iterator block,
                                            std::uint64_t offset) {
  ++block->second.holds;
  const std::uint64_t at = block->first;
  lock.unlock();
  return {memory_.data() + offset, [self = shared_from_this(), at](std::byte*) { self->release(at); }};
}

void SharedHeap::drop(std::uint64_t block) {
  const auto found = blocks_.find(block);
  if (--found->second.holds > 0) return;
  free_->give_warm({block, found->second.size});
  bytes_in_use_ -= found->second.size;
  if (found->second.purpose == Purpose::kCopy) copied_bytes_ -= found->second.size;
  blocks_.erase(found);
}

void SharedHeap::collect_released() {
  const auto now = std::chrono::steady_clock::now();
  const bool looks = now - looked_ >= kLookForDeaths;
  if (looks) looked_ = now;
  std::map<const Holder*, bool> dead;
  const auto is_dead = [&](const Holder& holder) {
    const auto [found, is_new] = dead.try_emplace(&holder, false);
    if (is_new) found->second = holder.is_dead();
    return found->second;
  };
  std::erase_if(used_slots_, [&](std::uint32_t index) {
    Slot& slot = slots_[index];
    const bool is_released = word(index).load(std::memory_order_acquire) == slot.ticket + 2;
    if (!is_released && !(looks && slot.holder->is_lost() && is_dead(*slot.holder))) return false;
    drop(std::exchange(slot.block, 0));
    slot.holder.reset();
    free_slots_.push_back(index);
    return true;
  });
}

// Takes pages away without the mutex.
void SharedHeap::trim(std::unique_lock<std::mutex>& lock, std::uint64_t most) {
  const std::vector<Range> ranges = free_->take_warm_above(most);
  if (ranges.empty()) return;
  const int fd = memory_.fd();
  lock.unlock();
  for (const Range& range : ranges) {
    static_cast<void>(::fallocate(fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE,
                                  static_cast<off_t>(range.offset), static_cast<off_t>(range.size)));
  }
  lock.lock();
  for (const Range& range : ranges) free_->give_cold(range);
}

std::shared_ptr<std::byte> SharedHeap::allocate(std::size_t num_bytes, Purpose purpose) {
  if (!is_own_process() || num_bytes > most_bytes_) return nullptr;
  const std::uint64_t size = round_up(num_bytes);
  std::unique_lock lock(mutex_);
  if (!make_memory()) return nullptr;
  const auto is_too_much = [&] { return purpose == Purpose::kCopy && copied_bytes_ + size > cached_bytes_; };
  std::optional<Range> range;
  if (!is_too_much()) range = free_->take_warm(size);
  if (!range) {
    collect_released();
    if (is_too_much()) return nullptr;
    range = free_->take_warm(size);
  }
  if (!range) {
    range = free_->take_cold(size);
    if (!range) {  // warm parts lie between the cold ones
      trim(lock, 0);
      range = free_->take_cold(size);
    }
    if (!range) return nullptr;
    lock.unlock();
    const bool is_reserved = reserve_pages(*range);
    lock.lock();
    if (!is_reserved) {
      free_->give_cold(*range);
      return nullptr;
    }
  }
  bytes_in_use_ += size;
  if (purpose == Purpose::kCopy) copied_bytes_ += size;
  return hold(lock, blocks_.emplace(range->offset, HeapBlock{size, 0, purpose}).first, range->offset);
}

void SharedHeap::release(std::uint64_t block) {
  if (!is_own_process()) return;
  std::unique_lock lock(mutex_);
  drop(block);
  trim(lock, cached_bytes_);
}

std::shared_ptr<SharedHeap::Lease> SharedHeap::lend(std::span<const std::byte> bytes,
                                                    std::shared_ptr<Holder> holder) {
  if (!contains(bytes.data())) return nullptr;
  const std::lock_guard lock(mutex_);
  const auto offset = static_cast<std::uint64_t>(bytes.data() - memory_.data());
  const auto block = find_block(offset, bytes.size());
  if (block == blocks_.end()) return nullptr;
  if (free_slots_.empty()) collect_released();
  if (free_slots_.empty()) return nullptr;
  const std::uint32_t index = free_slots_.back();
  free_slots_.pop_back();
  used_slots_.push_back(index);
  Slot& slot = slots_[index];
  slot.ticket += 4;
  slot.block = block->first;
  slot.holder = std::move(holder);
  ++block->second.holds;
  word(index).store(slot.ticket, std::memory_order_release);
  return std::make_shared<Lease>(shared_from_this(), Handle{slot.ticket, offset, index, false});
}

// collect_released() frees it.
bool SharedHeap::withdraw(const Handle& handle) {
  if (!is_own_process()) return true;
  std::uint64_t expected = handle.ticket;
  return word(handle.slot).compare_exchange_strong(expected, handle.ticket + 2, std::memory_order_acq_rel);
}

std::shared_ptr<std::byte> SharedHeap::take_back(const Handle& handle, std::size_t num_bytes,
                                                 const Holder& holder) {
  std::unique_lock lock(mutex_);
  if (handle.slot >= slots_.size()) return nullptr;
  const Slot& slot = slots_[handle.slot];
  if (slot.block == 0 || slot.ticket != handle.ticket || slot.holder.get() != &holder) return nullptr;
  const auto block = find_block(handle.offset, num_bytes);
  if (block == blocks_.end() || block->first != slot.block) return nullptr;
  return hold(lock, block, handle.offset);
}

void SharedHeap::collect() {
  std::unique_lock lock(mutex_);
  if (!free_ || !is_own_process()) return;
  collect_released();
  trim(lock, cached_bytes_);
}

std::size_t SharedHeap::bytes_in_use() {
  const std::lock_guard lock(mutex_);
  if (free_ && is_own_process()) collect_released();
  return bytes_in_use_;
}

std::size_t SharedHeap::bytes_cached() {
  const std::lock_guard lock(mutex_);
  return free_ ? free_->warm_bytes() : 0;
}

}  // namespace cohort::net
