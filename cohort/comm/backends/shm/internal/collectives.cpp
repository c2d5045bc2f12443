// A tensor goes in chunks: each rank fills its slot, arrives, waits until all have, and reads what the peers
// offer. all_reduce has three ways. A small tensor, or a group of two: each rank reduces all of it, in a
// round per chunk. A larger tensor: each rank reduces its part of a chunk, and hands the result out in the
// next round. Where the memory of all ranks lies in arenas, each rank reduces its part there, for all, and
// nothing is copied. Always: size and words decide the way, and each rank sees the same, so all ranks go
// through the same rounds.
#include "cohort/comm/backends/shm/internal/collectives.h"

#include <algorithm>
#include <array>

#include "cohort/base/error.h"

namespace cohort::comm::shm {
namespace {

// Up to here every rank of three or more sums all for itself, in one round; above, each sums a part.
constexpr std::size_t kOneRoundBytes = 16 * 1024;
// From here on memory that lies in arenas is reduced where it is: it takes a round more.
constexpr std::size_t kInPlaceBytes = 8 * 1024;
// From here on what is written will not be in the cache when it is read: past it.
constexpr std::size_t kStreamBytes = std::size_t{32} << 20;
constexpr std::size_t kLine = 64;

using Pointers = std::array<const void*, kMaxRanks>;

void copy_bytes(std::byte* to, const std::byte* from, std::size_t bytes) {
  if (bytes > 0) kernels().copy(to, from, bytes);
}

struct ByteRange {
  std::size_t begin = 0;
  std::size_t end = 0;
  std::size_t size() const { return end - begin; }
};

// Of `total` bytes, that of `rank`: whole lines, so that no two ranks write to one.
ByteRange range_of(std::size_t total, int rank, int size) {
  const std::size_t lines = (total + kLine - 1) / kLine;
  const auto at = [&](int r) {
    return std::min(total, lines * static_cast<std::size_t>(r) / static_cast<std::size_t>(size) * kLine);
  };
  return {at(rank), at(rank + 1)};
}

struct Reduction {
  Dtype dtype;
  Op op;
  std::size_t width;  // of a number
  Reduce run;

  Reduction(Dtype dtype, Op op) : dtype(dtype), op(op), width(size_of(dtype)), run(reducer(dtype, op)) {}
  void into_one(std::byte* to, const Pointers& from, int num_from, std::size_t bytes) const {
    void* target = to;
    into_many(&target, 1, from, num_from, bytes, false);
  }
  // The same bits on every rank, whichever thread comes to it: its own state is the caller's or the engine's.
  void into_many(void* const* to, int num_to, const Pointers& from, int num_from, std::size_t bytes,
                 bool stream) const {
    const StandardFloats same_everywhere;
    run(to, num_to, from.data(), num_from, bytes / width, stream);
  }
};

// Every rank sees what all have, and reduces it for itself: one round for each chunk.
void reduce_chunk(Communicator& ranks, const Reduction& reduction, std::byte* to, std::size_t bytes) {
  Pointers from{};
  for (int rank = 0; rank < ranks.size(); ++rank) {
    // Its own has just been copied from `to`, which is as near.
    from[static_cast<std::size_t>(rank)] = rank == ranks.rank() ? to : ranks.incoming(rank);
  }
  reduction.into_one(to, from, ranks.size(), bytes);
}

// Where every rank's memory is, if all of it is in arenas. What was handed over is taken in any case.
bool find_all(Communicator& ranks, std::byte* data, std::array<void*, kMaxRanks>& where) {
  bool all = true;
  for (int rank = 0; rank < ranks.size(); ++rank) {
    const std::uint64_t place = ranks.word(rank);
    if (place == 0) {
      all = false;
    } else {
      where[static_cast<std::size_t>(rank)] = rank == ranks.rank() ? data : ranks.find(rank, place);
    }
  }
  return all;
}

bool any_in_arena(const Communicator& ranks) {
  for (int rank = 0; rank < ranks.size(); ++rank) {
    if (ranks.word(rank) != 0) return true;
  }
  return false;
}

// Reduces this rank's part of everyone's memory, into everyone's memory.
void reduce_in_place(const Communicator& ranks, const Reduction& reduction,
                     std::array<void*, kMaxRanks> where, std::size_t bytes) {
  const ByteRange own_part = range_of(bytes, ranks.rank(), ranks.size());
  Pointers from{};
  for (std::size_t rank = 0; rank < static_cast<std::size_t>(ranks.size()); ++rank) {
    where[rank] = static_cast<std::byte*>(where[rank]) + own_part.begin;
    from[rank] = where[rank];
  }
  const bool stream = bytes * static_cast<std::size_t>(ranks.size()) >= kStreamBytes;
  reduction.into_many(where.data(), ranks.size(), from, ranks.size(), own_part.size(), stream);
}

// Into the slot, for each rank but this one its part of the chunk, in its place.
void offer_parts(Communicator& ranks, const std::byte* chunk, std::size_t bytes) {
  for (int rank = 0; rank < ranks.size(); ++rank) {
    if (rank == ranks.rank()) continue;
    const ByteRange part = range_of(bytes, rank, ranks.size());
    copy_bytes(ranks.outgoing() + part.begin, chunk + part.begin, part.size());
  }
}

// Reduces this rank's part of what all offer into `chunk`, and the result into the slot for the next round.
void reduce_part(Communicator& ranks, const Reduction& reduction, std::byte* chunk, std::size_t bytes) {
  const ByteRange own_part = range_of(bytes, ranks.rank(), ranks.size());
  Pointers from{};
  for (int rank = 0; rank < ranks.size(); ++rank) {
    from[static_cast<std::size_t>(rank)] =
        (rank == ranks.rank() ? chunk : ranks.incoming(rank)) + own_part.begin;
  }
  std::array<void*, 2> to = {chunk + own_part.begin, ranks.outgoing() + kChunkBytes};
  reduction.into_many(to.data(), 2, from, ranks.size(), own_part.size(), false);
}

void take_results(Communicator& ranks, std::byte* chunk, std::size_t bytes) {
  for (int rank = 0; rank < ranks.size(); ++rank) {
    if (rank == ranks.rank()) continue;
    const ByteRange part = range_of(bytes, rank, ranks.size());
    copy_bytes(chunk + part.begin, ranks.incoming(rank) + kChunkBytes, part.size());
  }
}

struct Chunk {
  std::byte* data;
  std::size_t bytes;
};

Chunk chunk_at(std::byte* data, std::size_t bytes, std::size_t index) {
  const std::size_t start = std::min(bytes, index * kChunkBytes);
  return {data + start, std::min(kChunkBytes, bytes - start)};
}

[[noreturn]] void throw_other_rows(int from, std::uint64_t sent, int to, std::uint64_t expected) {
  throw UsageError("comm.shm",
                   base::concat("all_to_all: rank ", from, " sends rank ", to, " ", sent,
                                " bytes, which expects ", expected),
                   "rows that match on both ends");
}

// The bytes of each of `parts` that go through a slot at a time: whole lines, so that no two parts share one.
std::size_t piece_bytes(int parts) {
  return kChunkBytes / static_cast<std::size_t>(parts) / kLine * kLine;
}

}  // namespace

Rounds rounds_of(const Communicator& ranks, CollectiveType type, std::size_t bytes) {
  bool is_one = false;
  switch (type) {
    case CollectiveType::kAllReduce:
      is_one = bytes <= (ranks.size() == 2 ? kChunkBytes : kOneRoundBytes);
      break;
    case CollectiveType::kBroadcast:
    case CollectiveType::kReduce:
    case CollectiveType::kAllGather:
    case CollectiveType::kGather:
      is_one = bytes <= kChunkBytes;
      break;
    default:
      is_one = type == CollectiveType::kBarrier;
  }
  return is_one ? Rounds::kOne : Rounds::kMany;
}

Task all_reduce(Communicator& ranks, std::byte* data, std::size_t numel, Dtype dtype, Op op) {
  const Reduction reduction(dtype, op);
  const std::size_t bytes = numel * reduction.width;
  const Signature signature{.type = CollectiveType::kAllReduce, .dtype = dtype, .op = op, .bytes = bytes};
  // With two ranks each needs all of the other's either way.
  const bool whole = ranks.size() == 2 || bytes <= kOneRoundBytes;
  const auto fill_slot = [&](const Chunk& chunk) {
    if (whole) {
      copy_bytes(ranks.outgoing(), chunk.data, chunk.bytes);
    } else {
      offer_parts(ranks, chunk.data, chunk.bytes);
    }
  };
  Chunk chunk = chunk_at(data, bytes, 0);
  if (bytes >= kInPlaceBytes && ranks.size() > 1) {
    const std::uint64_t place = ranks.place_of(data, bytes);
    if (place == 0) fill_slot(chunk);
    ranks.arrive(signature, place);
    co_await ranks.everyone();
    std::array<void*, kMaxRanks> where{};
    if (find_all(ranks, data, where)) {
      ranks.begin_writes();
      reduce_in_place(ranks, reduction, where, bytes);
      ranks.arrive(signature);
      co_await ranks.everyone_again();
      co_return;
    }
    if (any_in_arena(ranks)) {  // then some have offered nothing: once more
      fill_slot(chunk);
      ranks.arrive(signature);
      co_await ranks.everyone_again();
    }
  } else {
    fill_slot(chunk);
    ranks.arrive(signature);
    co_await ranks.everyone();
  }
  const std::size_t chunks = std::max<std::size_t>(1, (bytes + kChunkBytes - 1) / kChunkBytes);
  for (std::size_t i = 0; i < chunks; ++i) {
    chunk = chunk_at(data, bytes, i);
    const Chunk next = chunk_at(data, bytes, i + 1);
    if (whole) {
      if (next.bytes > 0) copy_bytes(ranks.outgoing(), next.data, next.bytes);
      reduce_chunk(ranks, reduction, chunk.data, chunk.bytes);
      if (next.bytes == 0) co_return;
    } else {
      // The others' results of the chunk before this one came with this round.
      reduce_part(ranks, reduction, chunk.data, chunk.bytes);
      if (i > 0) {
        const Chunk before = chunk_at(data, bytes, i - 1);
        take_results(ranks, before.data, before.bytes);
      }
      if (next.bytes > 0) offer_parts(ranks, next.data, next.bytes);
    }
    ranks.arrive(signature);
    co_await ranks.everyone();
  }
  take_results(ranks, chunk.data, chunk.bytes);
}

Task reduce(Communicator& ranks, std::byte* data, std::size_t numel, Dtype dtype, Op op, int root) {
  const Reduction reduction(dtype, op);
  const std::size_t bytes = numel * reduction.width;
  const Signature signature{
      .type = CollectiveType::kReduce, .dtype = dtype, .op = op, .root = root, .bytes = bytes};
  std::size_t i = 0;
  do {
    const Chunk chunk = chunk_at(data, bytes, i);
    if (ranks.rank() != root) copy_bytes(ranks.outgoing(), chunk.data, chunk.bytes);
    ranks.arrive(signature);
    co_await ranks.everyone();
    if (ranks.rank() == root) reduce_chunk(ranks, reduction, chunk.data, chunk.bytes);
  } while (++i * kChunkBytes < bytes);
}

Task broadcast(Communicator& ranks, Span data, int root) {
  const Signature signature{.type = CollectiveType::kBroadcast, .root = root, .bytes = data.bytes};
  std::size_t i = 0;
  do {
    const Chunk chunk = chunk_at(data.data, data.bytes, i);
    if (ranks.rank() == root) copy_bytes(ranks.outgoing(), chunk.data, chunk.bytes);
    ranks.arrive(signature);
    co_await ranks.everyone();
    if (ranks.rank() != root) copy_bytes(chunk.data, ranks.incoming(root), chunk.bytes);
  } while (++i * kChunkBytes < data.bytes);
}

Task all_gather(Communicator& ranks, std::vector<std::byte*> to, Span from) {
  const Signature signature{.type = CollectiveType::kAllGather, .bytes = from.bytes};
  const auto own = static_cast<std::size_t>(ranks.rank());
  if (to[own] != from.data) copy_bytes(to[own], from.data, from.bytes);
  std::size_t i = 0;
  do {
    const Chunk chunk = chunk_at(from.data, from.bytes, i);
    copy_bytes(ranks.outgoing(), chunk.data, chunk.bytes);
    ranks.arrive(signature);
    co_await ranks.everyone();
    for (std::size_t rank = 0; rank < to.size(); ++rank) {
      if (rank == own) continue;
      copy_bytes(to[rank] + i * kChunkBytes, ranks.incoming(static_cast<int>(rank)), chunk.bytes);
    }
  } while (++i * kChunkBytes < from.bytes);
}

Task gather(Communicator& ranks, std::vector<std::byte*> to, Span from, int root) {
  const Signature signature{.type = CollectiveType::kGather, .root = root, .bytes = from.bytes};
  std::size_t i = 0;
  do {
    const Chunk chunk = chunk_at(from.data, from.bytes, i);
    if (ranks.rank() != root) copy_bytes(ranks.outgoing(), chunk.data, chunk.bytes);
    ranks.arrive(signature);
    co_await ranks.everyone();
    for (std::size_t rank = 0; rank < to.size(); ++rank) {
      copy_bytes(to[rank] + i * kChunkBytes,
                 static_cast<int>(rank) == root ? chunk.data : ranks.incoming(static_cast<int>(rank)),
                 chunk.bytes);
    }
  } while (++i * kChunkBytes < from.bytes);
}

Task scatter(Communicator& ranks, Span to, std::vector<std::byte*> from, int root) {
  const Signature signature{.type = CollectiveType::kScatter, .root = root, .bytes = to.bytes};
  const std::size_t piece = piece_bytes(ranks.size());
  const auto own = static_cast<std::size_t>(ranks.rank());
  std::size_t start = 0;
  do {
    const std::size_t bytes = std::min(piece, to.bytes - start);
    for (std::size_t rank = 0; rank < from.size(); ++rank) {
      copy_bytes(static_cast<int>(rank) == root ? to.data + start : ranks.outgoing() + rank * piece,
                 from[rank] + start, bytes);
    }
    ranks.arrive(signature);
    co_await ranks.everyone();
    if (ranks.rank() != root) copy_bytes(to.data + start, ranks.incoming(root) + own * piece, bytes);
    start += piece;
  } while (start < to.bytes);
}

Task reduce_scatter(Communicator& ranks, std::byte* to, std::vector<std::byte*> from, std::size_t numel,
                    Dtype dtype, Op op) {
  const Reduction reduction(dtype, op);
  const std::size_t whole = numel * reduction.width;
  const Signature signature{.type = CollectiveType::kReduceScatter, .dtype = dtype, .op = op, .bytes = whole};
  const std::size_t piece = piece_bytes(ranks.size());
  const auto own = static_cast<std::size_t>(ranks.rank());
  std::size_t start = 0;
  do {
    const std::size_t bytes = std::min(piece, whole - start);
    for (std::size_t rank = 0; rank < from.size(); ++rank) {
      if (rank != own) copy_bytes(ranks.outgoing() + rank * piece, from[rank] + start, bytes);
    }
    ranks.arrive(signature);
    co_await ranks.everyone();
    Pointers parts{};
    for (std::size_t rank = 0; rank < from.size(); ++rank) {
      parts[rank] = rank == own ? from[own] + start : ranks.incoming(static_cast<int>(rank)) + own * piece;
    }
    reduction.into_one(to + start, parts, ranks.size(), bytes);
    start += piece;
  } while (start < whole);
}

Task all_to_all(Communicator& ranks, std::vector<Span> to, std::vector<Span> from) {
  const Signature signature{.type = CollectiveType::kAllToAll};
  const std::size_t piece = piece_bytes(ranks.size());
  const auto own = static_cast<std::size_t>(ranks.rank());
  std::size_t most = 0;
  for (const Span& part : from) most = std::max(most, part.bytes);
  const auto rest = [](const Span& part, std::size_t start, std::size_t limit) {
    return part.bytes <= start ? 0 : std::min(limit, part.bytes - start);
  };
  if (to[own].bytes != from[own].bytes)
    throw_other_rows(ranks.rank(), from[own].bytes, ranks.rank(), to[own].bytes);
  copy_bytes(to[own].data, from[own].data, to[own].bytes);
  // Beside the parts of the first round: how much each rank will get.
  auto* const sizes = reinterpret_cast<std::uint64_t*>(ranks.outgoing() + kChunkBytes);
  for (std::size_t rank = 0; rank < from.size(); ++rank) sizes[rank] = from[rank].bytes;
  std::size_t start = 0;
  do {
    for (std::size_t rank = 0; rank < from.size(); ++rank) {
      if (rank == own) continue;
      copy_bytes(ranks.outgoing() + rank * piece, from[rank].data + start, rest(from[rank], start, piece));
    }
    ranks.arrive(signature, most);
    co_await ranks.everyone();
    // All continue as long as the longest part takes.
    for (int rank = 0; rank < ranks.size(); ++rank) most = std::max(most, ranks.word(rank));
    // The first round brings the sizes, and they are compared before a byte is copied out.
    for (std::size_t rank = 0; start == 0 && rank < to.size(); ++rank) {
      const std::uint64_t sent =
          reinterpret_cast<const std::uint64_t*>(ranks.incoming(static_cast<int>(rank)) + kChunkBytes)[own];
      if (sent != to[rank].bytes)
        throw_other_rows(static_cast<int>(rank), sent, ranks.rank(), to[rank].bytes);
    }
    for (std::size_t rank = 0; rank < to.size(); ++rank) {
      if (rank == own) continue;
      copy_bytes(to[rank].data + start, ranks.incoming(static_cast<int>(rank)) + own * piece,
                 rest(to[rank], start, piece));
    }
    start += piece;
  } while (start < most);
}

Task barrier(Communicator& ranks) {
  ranks.arrive({.type = CollectiveType::kBarrier});
  co_await ranks.everyone();
}

Task sequence(std::vector<Task> tasks) {
  for (Task& task : tasks) {
    class Done : public Condition {
     public:
      explicit Done(Task& task) : task_(&task) {}
      bool ready() override { return task_->advance(); }
      std::uint64_t waits_for() const override { return task_->waits_for(); }
      std::uint64_t can_be_asked() const override { return task_->can_be_asked(); }

     private:
      Task* task_;
    };
    co_await Done(task);
  }
}

}  // namespace cohort::comm::shm
