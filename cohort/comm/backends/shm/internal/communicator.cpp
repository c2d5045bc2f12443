// Rank 0 makes a block of zeroed shared memory and hands it to each peer as a file descriptor. It holds, for
// each rank, its arrivals, its state while it sleeps, and two slots, and a ring of bytes for each pair of
// ranks. Always: a rank writes its arrival, then looks who sleeps; a sleeper says that it sleeps, then looks
// for arrivals. All four accesses are sequentially consistent, so no arrival goes unseen. A peer that is
// awake costs no system call. That a rank has died stands nowhere in this memory: PeerConnections says so.
#include "cohort/comm/backends/shm/internal/communicator.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cstring>

#include "cohort/base/cpu.h"
#include "cohort/base/error.h"
#include "cohort/base/exception_text.h"
#include "cohort/base/text/format_list.h"
#include "cohort/base/threads/wait.h"
#include "cohort/comm/backends/shm/internal/arena.h"
#include "cohort/comm/backends/shm/internal/futex.h"
#include "cohort/comm/internal/missing_ranks.h"

namespace cohort::comm::shm {
namespace {

using std::chrono::milliseconds;

// An arena's number above, how far into it below: 256 TiB.
constexpr int kOffsetBits = 48;
constexpr std::uint64_t kOffsetMask = (std::uint64_t{1} << kOffsetBits) - 1;

std::size_t whole_pages(std::size_t bytes) {
  constexpr std::size_t kPage = 4096;
  return (bytes + kPage - 1) / kPage * kPage;
}

std::uint64_t bit(int rank) {
  return std::uint64_t{1} << rank;
}

// Where a rank says why it cannot make the group that has no memory to say it in.
std::string last_words_key(int rank) {
  return base::concat("not made/", rank);
}

// A rank is gone as the group is made.
[[noreturn]] void fail_without(KeyValueStore& kv_store, int rank, std::string why) {
  try {
    const std::string key = last_words_key(rank);
    if (kv_store.has(key)) why = base::concat("rank ", rank, " gave up: ", kv_store.get(key));
  } catch (const std::exception&) {  // the store went with the rank that kept it
  }
  throw PeerError("comm.shm", why + " while the group was made");
}

}  // namespace

std::size_t Communicator::segment_bytes(int size) {
  const auto n = static_cast<std::size_t>(size);
  return whole_pages(n * (sizeof(Arrival) + sizeof(Sleeper))) + n * 2 * kSlotBytes + n * n * sizeof(Ring);
}

Communicator::Communicator(KeyValueStore& kv_store, int rank, int size, base::Deadline deadline)
    : rank_(rank),
      size_(size),
      connections_(kv_store, rank, size, deadline),
      arenas_(static_cast<std::size_t>(size)) {
  try {
    share_segment(kv_store, deadline);
    slots_ =
        segment_.data() + whole_pages(static_cast<std::size_t>(size) * (sizeof(Arrival) + sizeof(Sleeper)));
    rings_ = reinterpret_cast<Ring*>(slots_ + static_cast<std::size_t>(size) * 2 * kSlotBytes);
    find_cores(kv_store, deadline);
  } catch (const std::exception& error) {
    report_init_failure(kv_store, base::message_of(error));
    throw;
  }
}

Communicator::~Communicator() {
  if (sleeper(rank_).state.load() == kHere) sleeper(rank_).state.store(kLeft);
  wake_all();
}

// The others wait for this rank. Without the memory that all share, the store tells them, before the
// connections are closed: who sees that looks there.
void Communicator::report_init_failure(KeyValueStore& kv_store, const std::string& why) {
  if (slots_ != nullptr) {
    give_up(why);  // nothing is written yet
    return;
  }
  try {
    kv_store.set(last_words_key(rank_), why);
  } catch (const std::exception&) {  // the store went with the rank that kept it
  }
}

// Rank 0 makes the memory, zero, and hands it to the others.
void Communicator::share_segment(KeyValueStore& kv_store, base::Deadline deadline) {
  if (rank_ == 0) {
    segment_ = base::SharedMemory::create("comm.shm", segment_bytes(size_), false);
    for (int peer = 1; peer < size_; ++peer) connections_.send(peer, segment_.fd(), 0);
    return;
  }
  for (;;) {
    // Both before the last look: what came before rank 0 went, or before the deadline, counts.
    const bool is_over = deadline.expired();
    const std::string gone = connections_.why_gone(0);
    if (auto memory = connections_.receive(0)) {
      segment_ = base::SharedMemory::map("comm.shm", memory->second);
      if (segment_.size() == segment_bytes(size_)) return;
      throw CommError("comm.shm", "rank 0 was built with another version of this backend",
                      "the same Cohort on all ranks");
    }
    if (!gone.empty()) fail_without(kv_store, 0, "rank 0 " + gone);
    if (is_over) deadline.check("comm.shm", "the memory that rank 0 makes");
    base::sleep(milliseconds(1), deadline);
  }
}

std::vector<int> ranks_of(std::uint64_t mask) {
  std::vector<int> ranks;
  for (int rank = 0; rank < kMaxRanks; ++rank) {
    if ((mask >> rank & 1) != 0) ranks.push_back(rank);
  }
  return ranks;
}

// Each rank says on which cores it may run: as many bits as fit two words. One round for both, as the
// deadline may pass right after the last rank's coming.
void Communicator::find_cores(KeyValueStore& kv_store, base::Deadline deadline) {
  std::array<std::uint64_t, 2> cores{};
  // A container's share may be less than the cores that it may run on.
  const auto quota = base::core_limits().quota;
  const base::CpuSet own_cores = quota && *quota < size_ ? base::CpuSet() : base::CpuSet::of_current_thread();
  for (const int id : own_cores.ids())
    cores[static_cast<std::size_t>(id % 128 / 64)] |= std::uint64_t{1} << (id % 64);
  std::memcpy(outgoing(), cores.data(), sizeof(cores));
  arrive({.type = CollectiveType::kRendezvous});
  Everyone all = everyone();
  while (!all.ready()) {
    const std::uint64_t awaited = all.waits_for();
    const auto gone = why_gone(awaited);
    const bool is_over = deadline.expired();
    if (all.ready()) break;  // the last one came before it went, or before the deadline
    if (gone) fail_without(kv_store, gone->rank, gone->why);
    if (is_over) deadline.check("comm.shm", base::format_list("rank", ranks_of(awaited)) + " of the group");
    sleep(milliseconds(100), [&] { return all.ready(); });
  }
  for (int rank = 0; rank < size_; ++rank) {
    std::array<std::uint64_t, 2> theirs{};
    std::memcpy(theirs.data(), incoming(rank), sizeof(theirs));
    for (std::size_t i = 0; i < cores.size(); ++i) cores[i] |= theirs[i];
  }
  core_each_ = std::popcount(cores[0]) + std::popcount(cores[1]) >= size_;
}

void Communicator::arrive(const Signature& signature, std::uint64_t word) {
  Arrival& own_arrival = arrival(rank_);
  ++round_;
  own_arrival.rounds[round_ % 2] = {signature.pack(), word};
  own_arrival.count.store(round_);  // before a look at who sleeps, for all: sequentially consistent
  wake_all();
}

bool Communicator::Everyone::ready() {
  const std::uint64_t round = ranks_->round_;
  for (; next_ < ranks_->size_; ++next_) {
    // Before sleep it is to be seen what others did before they looked who sleeps: sequentially consistent.
    if (ranks_->arrival(next_).count.load() < round) return false;
  }
  const std::uint64_t own_signature = ranks_->arrival(ranks_->rank_).rounds[round % 2].signature;
  for (int rank = 0; rank < ranks_->size_; ++rank) {
    const std::uint64_t theirs = ranks_->arrival(rank).rounds[round % 2].signature;
    if (theirs == own_signature) continue;
    throw UsageError("comm.shm",
                     base::concat("ranks call different things: rank ", ranks_->rank_, " ",
                                  Signature::unpack(own_signature).text(), ", rank ", rank, " ",
                                  Signature::unpack(theirs).text()),
                     "the same calls in the same order on every rank");
  }
  return true;
}

std::uint64_t Communicator::Everyone::waits_for() const {
  std::uint64_t mask = 0;
  for (int rank = 0; rank < ranks_->size_; ++rank) {
    if (ranks_->arrival(rank).count.load(std::memory_order_acquire) < ranks_->round_) mask |= bit(rank);
  }
  return mask;
}

Ring& Communicator::ring(int from, int to) const {
  return rings_[static_cast<std::size_t>(from) * static_cast<std::size_t>(size_) +
                static_cast<std::size_t>(to)];
}

std::uint64_t Communicator::place_of(const void* data, std::size_t bytes) {
  const auto place = arena_find(data, bytes);
  if (!place) return 0;
  if (std::find(handed_.begin(), handed_.end(), place->arena) == handed_.end()) {
    const int fd = arena_fd(place->arena);
    for (int peer = 0; peer < size_; ++peer) {
      if (peer != rank_) connections_.send(peer, fd, place->arena);
    }
    handed_.push_back(place->arena);
  }
  return place->arena << kOffsetBits | place->offset;
}

// Note [Late writes]: a rank that gives up hands its memory back to its caller, and a peer that comes late
// sees that all have arrived. So before it writes, a rank says so and then looks whether one has given up;
// one that gives up says so and then looks who writes. Both are sequentially consistent, so one of the two
// sees the other. What is begun takes as long as a copy.
// A peer writes from its word on until it arrives at the next round. The one that gives up may have arrived
// there already, so its own round says nothing of who writes.
void Communicator::begin_writes() {
  arrival(rank_).writes.store(round_);
  for (int rank = 0; rank < size_; ++rank) {
    if (sleeper(rank).state.load() != kGaveUp) continue;
    const auto gone =
        why_gone(~std::uint64_t{0}).value_or(Gone{rank, base::concat("rank ", rank, " gave up")});
    throw MissingRanks<PeerError>({gone.rank}, "comm.shm", gone.why);
  }
}

bool Communicator::is_written_to() const {
  for (int rank = 0; rank < size_; ++rank) {
    // One that has given up or left has ended what it wrote, or has not begun it.
    if (rank == rank_ || sleeper(rank).state.load() != kHere) continue;
    const std::uint64_t round = arrival(rank).writes.load();
    if (round == 0 || arrival(rank).count.load() != round) continue;
    if (connections_.why_gone(rank).empty()) return true;
  }
  return false;
}

std::byte* Communicator::find(int rank, std::uint64_t place) {
  const std::uint64_t arena = place >> kOffsetBits;
  auto& known = arenas_[static_cast<std::size_t>(rank)];
  auto found = known.find(arena);
  while (found == known.end()) {  // it was handed over before the place was named
    auto memory = connections_.receive(rank);
    if (!memory)
      throw PeerError("comm.shm", base::concat("rank ", rank, " names memory that it did not hand over"));
    known.insert_or_assign(memory->first, base::SharedMemory::map("comm.shm", memory->second));
    found = known.find(arena);
  }
  return found->second.data() + (place & kOffsetMask);
}

void Communicator::wake_all() {
  for (int rank = 0; rank < size_; ++rank) {
    if (rank != rank_) wake(rank);
  }
}

void Communicator::wake(int rank) {
  Sleeper& other = sleeper(rank);
  if (other.asleep.load() == 0) return;
  other.wake_word.fetch_add(1);
  futex_wake(other.wake_word);
}

void Communicator::ask(std::uint64_t mask) {
  for (int rank = 0; rank < size_; ++rank) {
    if ((mask & bit(rank)) == 0) continue;
    Sleeper& other = sleeper(rank);
    other.asked.fetch_add(1);
    if (other.waits_to_be.load() != 0) futex_wake(other.asked);
  }
}

void Communicator::sleep_until_asked(std::uint32_t times) {
  constexpr std::chrono::hours kLong(1);  // who calls it looks again
  Sleeper& own_sleeper = sleeper(rank_);
  own_sleeper.waits_to_be.store(1);
  futex_wait(own_sleeper.asked, times, kLong);  // not at all where it was asked since
  own_sleeper.waits_to_be.store(0);
}

// The others change wake_word for what they do after this; what they did before, `ready` sees.
void Communicator::begin_sleep() {
  Sleeper& own_sleeper = sleeper(rank_);
  seen_wake_word_ = own_sleeper.wake_word.load();
  own_sleeper.asleep.store(1);
}

void Communicator::sleep_on_wake_word(std::chrono::nanoseconds timeout) {
  futex_wait(sleeper(rank_).wake_word, seen_wake_word_, timeout);
}

void Communicator::end_sleep() {
  sleeper(rank_).asleep.store(0);
}

// One that died is why others gave up, so it comes first.
std::optional<Communicator::Gone> Communicator::why_gone(std::uint64_t mask) const {
  std::optional<Gone> gave_up, left;
  for (int rank = 0; rank < size_; ++rank) {
    if (rank == rank_) continue;
    const Sleeper& other = sleeper(rank);
    std::uint32_t state = other.state.load();
    if (state == kHere) {
      const std::string why = connections_.why_gone(rank);
      if (why.empty()) continue;
      state = other.state.load();  // it says that it leaves before it closes
      if (state == kHere) return Gone{rank, base::concat("rank ", rank, " ", why)};
    }
    if (state == kGaveUp && !gave_up) {
      gave_up = Gone{rank, base::concat("rank ", rank, " gave up: ", other.why)};
    } else if (state == kLeft && !left && (mask & bit(rank)) != 0) {
      left = Gone{rank, base::concat("rank ", rank, " has left the group")};
    }
  }
  return gave_up ? gave_up : left;
}

bool Communicator::did_any_give_up() const {
  for (int rank = 0; rank < size_; ++rank) {
    if (rank != rank_ && sleeper(rank).state.load(std::memory_order_relaxed) == kGaveUp) return true;
  }
  return false;
}

bool Communicator::give_up(const std::string& why) {
  Sleeper& own_sleeper = sleeper(rank_);
  if (own_sleeper.state.load() == kHere) {
    own_sleeper.why[why.copy(own_sleeper.why, sizeof(own_sleeper.why) - 1)] = 0;
    own_sleeper.state.store(kGaveUp);
    wake_all();
  }
  // A peer that throws before it writes gives up too.
  const base::Deadline deadline(milliseconds(500));
  return base::poll_until([this] { return !is_written_to(); }, deadline, milliseconds(1));
}

}  // namespace cohort::comm::shm
