#pragma once

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "cohort/base/files/shared_memory.h"
#include "cohort/comm/backends/shm/internal/peer_connections.h"
#include "cohort/comm/backends/shm/internal/signature.h"
#include "cohort/comm/backends/shm/internal/task.h"

/// The ranks of a group and the memory that they share.
///
/// Note [Rounds]: ranks go through rounds together. For round k a rank fills its slot k % 2, arrives, and
/// when every rank has, may read what the others have in their slots k % 2, until it arrives at round k + 1.
/// So slot k % 2 may be filled for round k + 2 as soon as all have arrived at round k + 1: nobody reads it
/// any more. One word per rank and round is all that is waited for.
namespace cohort::comm::shm {

/// The ranks whose bits are set.
std::vector<int> ranks_of(std::uint64_t mask);

constexpr int kMaxRanks = 64;
constexpr std::size_t kChunkBytes = 128 * 1024;          ///< goes through a slot at a time
constexpr std::size_t kSlotBytes = kChunkBytes * 3 / 2;  ///< a chunk, and as much as half of one beside it
constexpr std::size_t kRingBytes = 128 * 1024;           ///< of messages from one rank to another

/// Bytes on their way from one rank to another, in a ring.
struct Ring {
  alignas(64) std::atomic<std::uint64_t> written;
  alignas(64) std::atomic<std::uint64_t> read;
  alignas(64) std::byte bytes[kRingBytes];
};

/// Threads: one caller at a time, except wake(), ask(), times_asked() and sleep_until_asked().
class Communicator {
 public:
  /// Every rank has one. Blocks until then. Throws: as PeerConnections; SystemError when there is no memory.
  Communicator(KeyValueStore& kv_store, int rank, int size, base::Deadline deadline);
  /// The others learn that this rank has left.
  ~Communicator();
  Communicator(const Communicator&) = delete;
  Communicator& operator=(const Communicator&) = delete;

  /// Of the memory that `size` ranks share.
  static std::size_t segment_bytes(int size);

  int rank() const { return rank_; }
  int size() const { return size_; }

  // See Note [Rounds].

  /// This rank's slot for the round that it arrives at next.
  std::byte* outgoing() { return slot(rank_, round_ + 1); }
  /// `word` goes along.
  void arrive(const Signature& signature, std::uint64_t word = 0);
  /// Holds when every rank has arrived. Throws: UsageError when one of them called something else.
  class Everyone : public Condition {
   public:
    Everyone(Communicator& ranks, bool have_begun) : ranks_(&ranks), have_begun_(have_begun) {}
    bool ready() override;
    std::uint64_t waits_for() const override;
    std::uint64_t can_be_asked() const override { return have_begun_ ? waits_for() : 0; }

   private:
    Communicator* ranks_;
    bool have_begun_;
    int next_ = 0;  // those before it have arrived
  };
  Everyone everyone() { return {*this, false}; }
  /// The same, for a round of a collective that every rank has begun: its first round is over.
  Everyone everyone_again() { return {*this, true}; }
  /// What a rank has in its slot, and the word that went along.
  const std::byte* incoming(int rank) const { return slot(rank, round_); }
  std::uint64_t word(int rank) const { return arrival(rank).rounds[round_ % 2].word; }

  Ring& ring(int from, int to) const;

  // Tensors that live in shared memory (Arena). Where is the same for all ranks: which memory, and how far
  // into it.

  /// A word for memory that lies in an arena of this process, which every peer can then find; 0 if it does
  /// not.
  std::uint64_t place_of(const void* data, std::size_t bytes);
  /// Where that is here.
  std::byte* find(int rank, std::uint64_t place);

  /// Before this rank writes to memory that the others have named in this round: see Note [Late writes].
  /// Throws: PeerError where one of them has given up.
  void begin_writes();

  // Waiting.

  /// Wakes the ranks that sleep; wake(rank) one of them.
  void wake_all();
  void wake(int rank);
  /// Sleeps until another rank does something, at most `timeout`; not at all once `ready` is true.
  template <typename Ready>
  void sleep(std::chrono::nanoseconds timeout, const Ready& ready) {
    begin_sleep();
    if (!ready()) sleep_on_wake_word(timeout);
    end_sleep();
  }
  /// Asks the ranks of `mask` to continue what they have begun: wakes the thread that sleeps in
  /// sleep_until_asked() there.
  void ask(std::uint64_t mask);
  /// How often this rank has been asked so far, by itself too.
  std::uint32_t times_asked() const { return sleeper(rank_).asked.load(); }
  /// Sleeps until this rank has been asked once more than `times`. May come back early. Threads: any.
  void sleep_until_asked(std::uint32_t times);
  /// Whether this rank sleeps, or looks for the last time before it does.
  bool is_asleep() const { return sleeper(rank_).asleep.load() != 0; }
  struct Gone {
    int rank;
    std::string why;  ///< "rank 1 died (process 71)"
  };
  /// A rank of `mask` that will never come; nothing while all may.
  std::optional<Gone> why_gone(std::uint64_t mask) const;
  bool did_any_give_up() const;
  /// This rank gives up, and the others learn why. Only the first time counts. Returns whether nobody writes
  /// to memory that this rank has named, which takes half a second where a peer hangs as it does.
  bool give_up(const std::string& why);
  /// Whether each rank can have a core of its own.
  bool has_core_each() const { return core_each_; }

 private:
  struct Round {
    std::uint64_t signature;
    std::uint64_t word;
  };
  struct alignas(64) Arrival {  // written by its rank
    std::atomic<std::uint64_t> count;
    Round rounds[2];
    std::atomic<std::uint64_t> writes;  // the last round in which it wrote to the others' memory; 0: none yet
  };
  enum State : std::uint32_t { kHere, kLeft, kGaveUp };
  struct alignas(64) Sleeper {
    std::atomic<std::uint32_t> wake_word;  // changed by the others, who wake this rank then
    std::atomic<std::uint32_t> asleep;
    std::atomic<std::uint32_t> state;
    std::atomic<std::uint32_t> asked;        // how often
    std::atomic<std::uint32_t> waits_to_be;  // a thread sleeps until it is
    char why[236];                           // it gave up
  };
  Arrival& arrival(int rank) const { return reinterpret_cast<Arrival*>(segment_.data())[rank]; }
  Sleeper& sleeper(int rank) const {
    return reinterpret_cast<Sleeper*>(segment_.data() +
                                      sizeof(Arrival) * static_cast<std::size_t>(size_))[rank];
  }
  std::byte* slot(int rank, std::uint64_t round) const {
    return slots_ + (static_cast<std::size_t>(rank) * 2 + round % 2) * kSlotBytes;
  }
  bool is_written_to() const;
  void share_segment(KeyValueStore& kv_store, base::Deadline deadline);
  void find_cores(KeyValueStore& kv_store, base::Deadline deadline);
  void report_init_failure(KeyValueStore& kv_store, const std::string& why);
  void begin_sleep();
  void sleep_on_wake_word(std::chrono::nanoseconds timeout);
  void end_sleep();

  const int rank_;
  const int size_;
  PeerConnections connections_;
  base::SharedMemory segment_;
  std::byte* slots_ = nullptr;
  Ring* rings_ = nullptr;
  std::uint64_t round_ = 0;  // that this rank has arrived at
  std::uint32_t seen_wake_word_ = 0;
  bool core_each_ = false;
  std::vector<std::uint64_t> handed_;                                // arenas that the peers have
  std::vector<std::map<std::uint64_t, base::SharedMemory>> arenas_;  // of each peer
};

}  // namespace cohort::comm::shm
