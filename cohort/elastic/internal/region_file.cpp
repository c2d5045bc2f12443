// The file has a page with the header, and after it what allocate() gives, in the order in which it was
// asked for. A file in memory has holes for nothing, so nothing is ever moved: what is no longer used becomes
// a hole.
//
// A commit writes the record that the word does not name, and then the word. So at each instruction the word
// names a whole record, or says that there is none. The memory of a process that was killed has what the
// process had written, in the order of its program: only the compiler must keep the order. The checksum is
// for what a process that has lost its way may have written.
//
// The lock is one of fcntl(2). It is a process's, and ends with it, however it ends.
#include "cohort/elastic/internal/region_file.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>
#include <cstring>
#include <utility>

#include "cohort/base/error.h"
#include "cohort/base/internal/fault_points.h"
#include "cohort/base/threads/deadline.h"
#include "cohort/base/threads/wait.h"
#include "cohort/checkpoint/file_writer.h"

namespace cohort::elastic {
namespace {

using base::concat;

constexpr const char* kWhereRegion = "elastic.region";
constexpr std::array<char, 8> kRegionMagic{'C', 'O', 'H', 'S', 'T', 'A', 'T', '1'};
constexpr std::uint64_t kLeastRecord = std::uint64_t{64} << 10;

// The two lowest bits of the word; steps are above.
enum WordCode : std::uint64_t { kNone = 0, kFirstSlot = 1, kSecondSlot = 2, kInChange = 3 };

std::uint64_t page_bytes() {
  static const auto bytes = static_cast<std::uint64_t>(::sysconf(_SC_PAGESIZE));
  return bytes;
}

std::uint64_t whole_pages(std::uint64_t bytes) {
  return (bytes + page_bytes() - 1) / page_bytes() * page_bytes();
}

[[noreturn]] void fail_region(const char* what, std::uint64_t bytes, int error) {
  throw SystemError(kWhereRegion, concat(what, " of ", bytes, " bytes: ", std::strerror(error)),
                    "more memory for the process's container or job");
}

CommitWord decode_word(std::uint64_t word) {
  using Phase = CommitWord::Phase;
  switch (word & 3) {
    case kNone:
      return {};
    case kInChange:
      return {Phase::kChanging, word >> 2};
    default:
      return {Phase::kCommitted, word >> 2};
  }
}

void change_file(int fd, int mode, std::uint64_t offset, std::uint64_t bytes) {
  int result = 0;
  do {
    result = ::fallocate(fd, mode, static_cast<off_t>(offset), static_cast<off_t>(bytes)) == 0 ? 0 : errno;
  } while (result == EINTR);
  if (result != 0) fail_region("there is no memory for the state", bytes, result);
}

}  // namespace

struct RegionFile::Slot {
  std::uint64_t offset, capacity, bytes, checksum, steps;
};

struct RegionFile::Header {
  std::array<char, 8> magic;
  std::uint64_t word;
  std::array<Slot, 2> slots;
};

RegionBytes::RegionBytes(std::shared_ptr<const base::Fd> file, std::uint64_t offset, std::uint64_t bytes)
    : file_(std::move(file)), offset_(offset), bytes_(bytes) {
  void* const data =
      ::mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, MAP_SHARED, file_->get(), static_cast<off_t>(offset_));
  if (data == MAP_FAILED) fail_region("cannot map a region", bytes_, errno);
  data_ = static_cast<std::byte*>(data);
}

RegionBytes::~RegionBytes() {
  ::munmap(data_, bytes_);
  if (!is_dropped_) return;
  ::fallocate(file_->get(), FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, static_cast<off_t>(offset_),
              static_cast<off_t>(bytes_));
}

void RegionBytes::reserve(std::uint64_t begin, std::uint64_t bytes) const {
  const std::uint64_t first = (offset_ + begin) / page_bytes() * page_bytes();
  const std::uint64_t size = whole_pages(offset_ + begin + bytes) - first;
  change_file(file_->get(), 0, first, size);
  // One call instead of a fault for each page. Before Linux 5.14 there are faults.
  constexpr int kPopulateWrite = 23;  // MADV_POPULATE_WRITE
  ::madvise(data_ + (first - offset_), size, kPopulateWrite);
}

CommitWord read_commit_word(const base::Fd& file) {
  struct {
    std::array<char, 8> magic;
    std::uint64_t word;
  } begin{};
  if (::pread(file.get(), &begin, sizeof begin, 0) != sizeof begin || begin.magic != kRegionMagic) return {};
  return decode_word(begin.word);
}

RegionFile::RegionFile(base::Fd file, std::chrono::milliseconds lock_time)
    : file_(std::make_shared<const base::Fd>(std::move(file))) {
  struct flock lock {};
  lock.l_type = F_WRLCK;
  lock.l_whence = SEEK_SET;
  int error = 0;
  const auto try_lock = [&] {
    error = ::fcntl(file_->get(), F_SETLK, &lock) == 0 ? 0 : errno;
    return error == 0 || (error != EAGAIN && error != EACCES && error != EINTR);
  };
  base::poll_until(try_lock, base::Deadline(lock_time));
  if (error != 0) {
    struct flock holder = lock;
    const bool is_known = ::fcntl(file_->get(), F_GETLK, &holder) == 0 && holder.l_type != F_UNLCK;
    throw SystemError(
        kWhereRegion,
        is_known
            ? concat("process ", holder.l_pid, " has the memory that was given to this one")
            : concat("the memory that was given to this process cannot be locked: ", std::strerror(error)),
        "an agent gives it to one process at a time");
  }
  struct stat status {};
  if (::fstat(file_->get(), &status) != 0) fail_region("cannot look at a region", 0, errno);
  size_ = static_cast<std::uint64_t>(status.st_size);
  if (size_ < page_bytes()) {
    make_header();
    return;
  }
  map_header();
  header().magic == kRegionMagic&& size_ % page_bytes() == 0 ? map_slots() : clear();
}

RegionFile::~RegionFile() = default;

RegionFile::Header& RegionFile::header() const {
  return *reinterpret_cast<Header*>(head_->data());
}

// Beyond the limit ftruncate() would end the process by a signal.
void RegionFile::grow(std::uint64_t bytes) {
  rlimit limit{};
  const bool is_limited = ::getrlimit(RLIMIT_FSIZE, &limit) == 0 && limit.rlim_cur != RLIM_INFINITY;
  if (is_limited && size_ + bytes > limit.rlim_cur) {
    fail_region("the limit of files (ulimit -f) leaves no memory for a state", bytes, EFBIG);
  }
  if (::ftruncate(file_->get(), static_cast<off_t>(size_ + bytes)) != 0) {
    fail_region("there is no memory for the state", bytes, errno);
  }
  size_ += bytes;
}

// Without memory the page is a hole, which nobody may touch: also where the process before could not reserve
// it.
void RegionFile::map_header() {
  auto head = std::make_unique<RegionBytes>(file_, 0, page_bytes());
  head->reserve(0, page_bytes());
  head_ = std::move(head);
}

void RegionFile::make_header() {
  grow(page_bytes() - size_);
  map_header();
  header() = Header{};
  header().magic = kRegionMagic;
}

// What does not fit into the file is no record: record() says so.
void RegionFile::map_slots() {
  for (std::size_t i = 0; i < 2; ++i) {
    const Slot& slot = header().slots[i];
    const bool is_whole = slot.offset >= page_bytes() && slot.offset % page_bytes() == 0 &&
                          slot.capacity > 0 && slot.capacity <= size_ &&
                          slot.offset <= size_ - slot.capacity && slot.bytes <= slot.capacity;
    if (is_whole) slots_[i] = std::make_shared<RegionBytes>(file_, slot.offset, slot.capacity);
  }
}

CommitWord RegionFile::word() const {
  return decode_word(std::atomic_ref(header().word).load(std::memory_order_acquire));
}

std::optional<std::span<const std::byte>> RegionFile::record() const {
  const std::uint64_t word = std::atomic_ref(header().word).load(std::memory_order_acquire);
  const std::uint64_t code = word & 3;
  if (code != kFirstSlot && code != kSecondSlot) return std::nullopt;
  const auto i = static_cast<std::size_t>(code - kFirstSlot);
  const Slot& slot = header().slots[i];
  if (slots_[i] == nullptr || slot.steps != word >> 2) return std::nullopt;
  const std::span<const std::byte> bytes(slots_[i]->data(), slot.bytes);
  return checkpoint::checksum(bytes) == slot.checksum ? std::optional(bytes) : std::nullopt;
}

void RegionFile::clear() {
  for (auto& slot : slots_) slot.reset();
  head_.reset();
  if (::ftruncate(file_->get(), 0) != 0) fail_region("cannot clear a region", size_, errno);
  size_ = 0;
  make_header();
}

std::shared_ptr<RegionBytes> RegionFile::allocate(std::uint64_t bytes) {
  const std::uint64_t offset = size_, size = whole_pages(std::max<std::uint64_t>(bytes, 1));
  grow(size);
  return std::make_shared<RegionBytes>(file_, offset, size);
}

std::shared_ptr<RegionBytes> RegionFile::map(std::uint64_t offset, std::uint64_t bytes) const {
  if (offset % page_bytes() != 0 || bytes == 0 || bytes > size_ || offset > size_ - bytes) {
    throw DataError(kWhereRegion, concat("the state of the process before is said to have bytes ", offset,
                                         " to ", offset + bytes, " of ", size_));
  }
  return std::make_shared<RegionBytes>(file_, offset, whole_pages(bytes));
}

void RegionFile::mark_changing(std::uint64_t steps) {
  std::atomic_ref(header().word).store(steps << 2 | kInChange, std::memory_order_release);
  std::atomic_thread_fence(std::memory_order_seq_cst);  // before any change
}

void RegionFile::mark_empty() {
  if (head_ == nullptr) return;  // clear() has failed, and left nothing
  std::atomic_ref(header().word).store(kNone, std::memory_order_release);
}

// Where the record of slot `i` is to be written.
std::byte* RegionFile::place_of_record(std::size_t i, std::uint64_t bytes) {
  Slot& slot = header().slots[i];
  if (slots_[i] != nullptr && slot.capacity >= bytes) return slots_[i]->data();
  auto memory = allocate(std::max(kLeastRecord, 2 * bytes));
  memory->reserve(0, memory->bytes());
  if (slots_[i] != nullptr) slots_[i]->drop();
  slot = {.offset = memory->offset(), .capacity = memory->bytes(), .bytes = 0, .checksum = 0, .steps = 0};
  slots_[i] = std::move(memory);
  return slots_[i]->data();
}

void RegionFile::commit(std::uint64_t steps, std::span<const std::span<const std::byte>> parts) {
  const std::uint64_t before = std::atomic_ref(header().word).load(std::memory_order_relaxed) & 3;
  const std::size_t i = before == kFirstSlot ? 1 : 0;
  std::uint64_t bytes = 0;
  for (const auto& part : parts) bytes += part.size();
  std::byte* const begin = place_of_record(i, bytes);
  std::byte* place = begin;
  for (const auto& part : parts) {
    if (part.empty()) continue;
    std::memcpy(place, part.data(), part.size());
    place += part.size();
    base::reach_fault_point("record");
  }
  Slot& slot = header().slots[i];
  slot.bytes = bytes;
  slot.checksum = checkpoint::checksum({begin, bytes});
  slot.steps = steps;
  base::reach_fault_point("before word");
  std::atomic_ref(header().word)
      .store(steps << 2 | (i == 0 ? kFirstSlot : kSecondSlot), std::memory_order_release);
  base::reach_fault_point("committed");
}

}  // namespace cohort::elastic
