// Each ordered pair of ranks has a ring with one writer and one reader: a header, then the bytes of the
// message. Both counts only grow, and their difference is what is under way; so the two ranks need no lock. A
// receiver takes a message only while some receive waits for that rank. A message with a tag that nobody
// waits for moves to `early_`, so that it does not block those after it. Always: sends to a peer take
// tickets, and write in their order, so no message is cut by another. No list points to a receive whose task
// has ended; one that fails leaves its message to another.
#include "cohort/comm/backends/shm/internal/messages.h"

#include <algorithm>
#include <utility>

#include "cohort/base/error.h"

namespace cohort::comm::shm {
namespace {

std::uint64_t bit(int rank) {
  return std::uint64_t{1} << rank;
}

// Between a ring, from byte `at` of its stream on, and memory.
template <typename Move>
void for_pieces(std::uint64_t at, std::size_t bytes, const Move& move) {
  std::size_t done = 0;
  while (done < bytes) {
    const std::size_t place = (at + done) % kRingBytes;
    const std::size_t piece = std::min(bytes - done, kRingBytes - place);
    move(place, done, piece);
    done += piece;
  }
}

void write_ring(Ring& ring, const std::byte* from, std::size_t bytes) {
  const std::uint64_t at = ring.written.load(std::memory_order_relaxed);
  for_pieces(at, bytes, [&](std::size_t place, std::size_t done, std::size_t piece) {
    kernels().copy(ring.bytes + place, from + done, piece);
  });
  // After the bytes: the reader copies as many as this count promises.
  ring.written.store(at + bytes);
}

// How many bytes can be read.
std::size_t bytes_in(const Ring& ring) {
  return static_cast<std::size_t>(ring.written.load() - ring.read.load(std::memory_order_relaxed));
}

// Copies the next bytes, and leaves them in the ring.
void peek_ring(const Ring& ring, std::byte* to, std::size_t bytes) {
  for_pieces(ring.read.load(std::memory_order_relaxed), bytes,
             [&](std::size_t place, std::size_t done, std::size_t piece) {
               kernels().copy(to + done, ring.bytes + place, piece);
             });
}

void consume_ring(Ring& ring, std::size_t bytes) {
  ring.read.store(ring.read.load(std::memory_order_relaxed) + bytes);
}

void check_size(int source, std::int64_t tag, std::size_t bytes, std::size_t expected) {
  if (bytes == expected) return;
  throw UsageError("comm.shm", base::concat("rank ", source, " sent ", bytes, " bytes with tag ", tag,
                                            ", expected ", expected));
}

}  // namespace

Messages::Messages(Communicator& ranks)
    : ranks_(ranks),
      begun_(static_cast<std::size_t>(ranks.size())),
      over_(static_cast<std::size_t>(ranks.size())),
      incoming_(static_cast<std::size_t>(ranks.size())) {}

Task Messages::send(int to, Span data, int tag) {
  const auto peer = static_cast<std::size_t>(to);
  const std::uint64_t ticket = begun_[peer]++;
  co_await until(bit(to), [this, peer, ticket] { return over_[peer] == ticket; });
  Ring& ring = ranks_.ring(ranks_.rank(), to);
  const auto space = [&ring] {
    return kRingBytes -
           static_cast<std::size_t>(ring.written.load(std::memory_order_relaxed) - ring.read.load());
  };
  co_await until(bit(to), [&space] { return space() >= sizeof(Header); });
  const Header header{.bytes = data.bytes, .tag = tag};
  write_ring(ring, reinterpret_cast<const std::byte*>(&header), sizeof(header));
  ranks_.wake(to);
  std::size_t sent = 0;
  while (sent < data.bytes) {
    // Half a ring at a time, so that both ends move.
    const std::size_t wanted = std::min(data.bytes - sent, kRingBytes / 2);
    co_await until(bit(to), [&space, wanted] { return space() >= wanted; });
    write_ring(ring, data.data + sent, wanted);
    ranks_.wake(to);
    sent += wanted;
  }
  ++over_[peer];
}

Task Messages::recv(int from, Span data, int tag, int* source) {
  Posted posted{.from = from, .tag = tag, .data = data};
  const Withdrawal withdrawal{*this, posted};
  const auto early = std::find_if(early_.begin(), early_.end(), [&](const Early& message) {
    return message.taker == nullptr && posted.takes(message.source, message.tag);
  });
  if (early == early_.end()) {
    posted_.push_back(&posted);
  } else {
    check_size(early->source, early->tag, early->data.size(), data.bytes);
    // Also a message that has come in part: pump() copies it to its taker once it is whole.
    early->taker = &posted;
    posted.source = early->source;
    if (early->whole) take_early(early, posted);
  }
  std::uint64_t mask = 0;
  for (int rank = 0; rank < ranks_.size(); ++rank) {
    if (rank != ranks_.rank() && (from < 0 || from == rank)) mask |= bit(rank);
  }
  co_await until(mask, [this, mask, &posted] {
    for (int rank = 0; rank < ranks_.size() && !posted.done; ++rank) {
      if ((mask & bit(rank)) != 0) pump(rank);
    }
    return posted.done;
  });
  *source = posted.source;
}

void Messages::withdraw(Posted& posted) {
  if (posted.done) return;
  posted_.remove(&posted);
  for (Incoming& incoming : incoming_) {
    if (incoming.posted == &posted) incoming.posted = nullptr;
  }
  for (Early& early : early_) {
    if (early.taker == &posted) early.taker = nullptr;
  }
}

void Messages::take_early(std::list<Early>::iterator early, Posted& posted) {
  std::copy(early->data.begin(), early->data.end(), posted.data.data);
  posted.done = true;
  early_.erase(early);
}

// Takes the header of the next message, if somebody waits for one from there. All that may throw comes
// before.
bool Messages::begin_message(int source, Incoming& incoming) {
  Ring& ring = ranks_.ring(source, ranks_.rank());
  const bool wanted = std::any_of(posted_.begin(), posted_.end(), [&](const Posted* posted) {
    return posted->source < 0 && (posted->from < 0 || posted->from == source);
  });
  if (!wanted || bytes_in(ring) < sizeof(Header)) return false;
  Header header;
  peek_ring(ring, reinterpret_cast<std::byte*>(&header), sizeof(header));
  const auto taker = std::find_if(posted_.begin(), posted_.end(),
                                  [&](const Posted* posted) { return posted->takes(source, header.tag); });
  incoming.posted = nullptr;
  incoming.early = early_.end();
  if (taker == posted_.end()) {
    std::vector<std::byte> data(header.bytes);
    incoming.early = early_.insert(
        early_.end(), {.source = source, .tag = header.tag, .data = std::move(data), .taker = nullptr});
  } else {
    check_size(source, header.tag, header.bytes, (*taker)->data.bytes);
    incoming.posted = *taker;
    incoming.posted->source = source;
    posted_.erase(taker);
  }
  incoming.header = header;
  incoming.got = 0;
  incoming.in_message = true;
  consume_ring(ring, sizeof(header));
  return true;
}

std::byte* Messages::target_of(const Incoming& incoming) {
  if (incoming.posted != nullptr) return incoming.posted->data.data;
  return incoming.early != early_.end() ? incoming.early->data.data() : nullptr;
}

void Messages::pump(int source) {
  Incoming& incoming = incoming_[static_cast<std::size_t>(source)];
  Ring& ring = ranks_.ring(source, ranks_.rank());
  while (incoming.in_message || begin_message(source, incoming)) {
    const std::size_t bytes = std::min<std::size_t>(bytes_in(ring), incoming.header.bytes - incoming.got);
    if (bytes > 0) {
      if (std::byte* const to = target_of(incoming)) peek_ring(ring, to + incoming.got, bytes);
      consume_ring(ring, bytes);
      ranks_.wake(source);
      incoming.got += bytes;
    }
    if (incoming.got < incoming.header.bytes) return;
    incoming.in_message = false;
    if (Posted* const posted = std::exchange(incoming.posted, nullptr)) {
      posted->done = true;
      continue;
    }
    if (incoming.early == early_.end()) continue;
    incoming.early->whole = true;
    if (incoming.early->taker != nullptr) take_early(incoming.early, *incoming.early->taker);
  }
}

}  // namespace cohort::comm::shm
