#pragma once

#include <cstddef>
#include <deque>
#include <exception>
#include <list>
#include <vector>

#include "cohort/comm/backends/shm/internal/collectives.h"
#include "cohort/comm/backends/shm/internal/communicator.h"
#include "cohort/comm/backends/shm/internal/task.h"

namespace cohort::comm::shm {

/// What one rank says to one other. Messages advance beside each other and beside collectives; each task
/// must be begun, by one advance(), in the order of the calls. Messages with one tag from one rank to one
/// other come in the order in which they were sent.
class Messages {
 public:
  explicit Messages(Communicator& ranks);

  /// Done when all is in the ring, which takes kRingBytes before the peer asks for it.
  Task send(int to, Span data, int tag);
  /// `from`: -1 is any rank. `*source` becomes the one that it was.
  /// Throws: UsageError when the message has another size. It stays where it is, for another receive.
  Task recv(int from, Span data, int tag, int* source);

 private:
  struct Header {
    std::uint64_t bytes = 0;
    std::int64_t tag = 0;
  };
  // A receive that waits.
  struct Posted {
    int from;
    std::int64_t tag;
    Span data;
    int source = -1;  // once it has found its message
    bool done = false;
    bool takes(int rank, std::int64_t of_tag) const {
      return source < 0 && (from < 0 || from == rank) && tag == of_tag;
    }
  };
  // A message that came before anyone asked for it, but after one that somebody asks for.
  struct Early {
    int source;
    std::int64_t tag;
    std::vector<std::byte> data;
    bool whole = false;
    Posted* taker = nullptr;  // who has asked for it since
  };
  // What is coming from a rank. Once whoever asked for it is gone, the rest is dropped.
  struct Incoming {
    bool in_message = false;
    Header header;
    std::uint64_t got = 0;
    Posted* posted = nullptr;          // who has asked for it
    std::list<Early>::iterator early;  // else where it goes; the list's end: nowhere
  };
  // A receive is in no list once its task ends, also by an error or before it is done.
  struct Withdrawal {
    Messages& messages;
    Posted& posted;
    ~Withdrawal() { messages.withdraw(posted); }
  };
  void withdraw(Posted& posted);
  void take_early(std::list<Early>::iterator early, Posted& posted);
  void pump(int source);
  bool begin_message(int source, Incoming& incoming);
  std::byte* target_of(const Incoming& incoming);

  Communicator& ranks_;
  std::vector<std::uint64_t> begun_;  // sends to each rank
  std::vector<std::uint64_t> over_;
  std::vector<Incoming> incoming_;
  std::list<Posted*> posted_;
  std::list<Early> early_;
};

}  // namespace cohort::comm::shm
