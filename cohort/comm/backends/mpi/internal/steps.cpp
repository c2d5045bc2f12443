// A reduction gathers bytes through MPI and sums them here, in rank order, whatever way MPI takes. A small
// piece goes to every rank, or to the root, which reduces it: that saves a round. Of a larger piece each rank
// gets its share from all ranks, reduces it, and hands the result on. Always: the scratch memory belongs to
// the group's OrderedQueue. Calls of a queue run one at a time, so the next step of a call finds there what
// the step before has gathered.
#include "cohort/comm/backends/mpi/internal/steps.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <numeric>

namespace cohort::comm::mpi {
namespace {

constexpr std::int64_t kPiece = std::int64_t{16} << 20;
// What all ranks hold together of a tensor that every rank reduces by itself: it saves a round.
constexpr std::int64_t kSmall = std::int64_t{64} << 10;
// Between two ranks a message is one as a rule, so that one from any rank can be.
constexpr std::int64_t kMessage = std::int64_t{1} << 30;
constexpr int kTag = 0;

std::int64_t nbytes(const at::Tensor& tensor) {
  return static_cast<std::int64_t>(tensor.nbytes());
}

std::int64_t length_of(const Message& message) {
  return static_cast<std::int64_t>(message.data.bytes);
}

// body(begin, size) for each piece of `total`.
template <typename Body>
void for_pieces(std::int64_t total, std::int64_t piece, Body body) {
  for (std::int64_t begin = 0; begin < total; begin += piece) body(begin, std::min(piece, total - begin));
}

// `bytes` bytes of every `stride` bytes, one item for each rank.
class Rows {
 public:
  Rows(std::int64_t bytes, std::int64_t stride) {
    MPI_Datatype row = MPI_DATATYPE_NULL;
    check(MPI_Type_contiguous(static_cast<int>(bytes), MPI_BYTE, &row), "MPI_Type_contiguous");
    check(MPI_Type_create_resized(row, 0, static_cast<MPI_Aint>(stride), &type_), "MPI_Type_create_resized");
    MPI_Type_free(&row);
    check(MPI_Type_commit(&type_), "MPI_Type_commit");
  }
  ~Rows() { MPI_Type_free(&type_); }  // what is under way keeps it
  Rows(const Rows&) = delete;
  Rows& operator=(const Rows&) = delete;
  MPI_Datatype type() const { return type_; }

 private:
  MPI_Datatype type_ = MPI_DATATYPE_NULL;
};

// How a piece of a tensor is dealt out to the ranks, in bytes.
struct Shares {
  std::vector<int> counts, begins;

  Shares(std::int64_t numel, std::int64_t itemsize, int ranks) {
    std::int64_t begin = 0;
    for (int rank = 0; rank < ranks; ++rank) {
      const std::int64_t share = numel / ranks + (rank < numel % ranks ? 1 : 0);
      counts.push_back(static_cast<int>(share * itemsize));
      begins.push_back(static_cast<int>(begin * itemsize));
      begin += share;
    }
  }
};

// MPI only moves bytes: what is added up is added up here, so that the order, and with it every bit, is ours.
// `all` holds `numel` elements of each rank, one after the other; `out` may be the first part.
void reduce_parts(const ReductionType& numbers, const std::byte* all, int ranks, std::int64_t numel,
                  std::byte* out) {
  const std::size_t n = static_cast<std::size_t>(numel) * numbers.per_element;
  std::vector<const void*> parts;
  for (int rank = 0; rank < ranks; ++rank) {
    parts.push_back(all + static_cast<std::size_t>(rank) * n * size_of(numbers.dtype));
  }
  void* const to = out;
  const StandardFloats same_everywhere;
  reducer(numbers.dtype, numbers.op)(&to, 1, parts.data(), ranks, n, false);
}

// A piece of a tensor on its way to be reduced.
struct Piece {
  CommunicatorsPtr comms;
  at::Tensor tensor;  // keeps the memory
  std::byte* data = nullptr;
  std::int64_t numel = 0;
  ReductionType numbers;
  int root = -1;

  std::int64_t itemsize() const { return tensor.element_size(); }
  bool is_here() const { return root < 0 || comms->rank == root; }
};

// Everybody, or the root, gets all and reduces it.
void add_small_reduce(Steps& steps, const Piece& piece) {
  const auto bytes = static_cast<int>(piece.numel * piece.itemsize());
  steps.push_back([piece, bytes](PendingRequests& pending) {
    const Communicators& at = *piece.comms;
    std::byte* const all =
        at.queue->scratch(static_cast<std::size_t>(bytes) * static_cast<std::size_t>(at.size));
    if (piece.root < 0) {
      check(MPI_Iallgather(piece.data, bytes, MPI_BYTE, all, bytes, MPI_BYTE, at.collectives, pending.add()),
            "MPI_Iallgather");
    } else {
      check(MPI_Igather(piece.data, bytes, MPI_BYTE, all, bytes, MPI_BYTE, piece.root, at.collectives,
                        pending.add()),
            "MPI_Igather");
    }
  });
  steps.push_back([piece](PendingRequests&) {
    if (!piece.is_here()) return;
    const Communicators& at = *piece.comms;
    reduce_parts(piece.numbers, at.queue->scratch(0), at.size, piece.numel, piece.data);
  });
}

// Each rank gets its share from all, reduces it, and hands it on.
void add_shared_reduce(Steps& steps, const Piece& piece) {
  const auto shares = std::make_shared<const Shares>(piece.numel, piece.itemsize(), piece.comms->size);
  const auto rank = static_cast<std::size_t>(piece.comms->rank);
  const int share_bytes = shares->counts[rank];
  // As many bytes from each; kept until MPI has read it.
  const auto from = std::make_shared<std::vector<int>>(shares->counts.size(), share_bytes);
  const auto at_bytes = std::make_shared<std::vector<int>>(shares->counts.size(), share_bytes);
  std::exclusive_scan(from->begin(), from->end(), at_bytes->begin(), 0);
  steps.push_back([piece, shares, from, at_bytes, share_bytes](PendingRequests& pending) {
    const Communicators& at = *piece.comms;
    std::byte* const all =
        at.queue->scratch(static_cast<std::size_t>(share_bytes) * static_cast<std::size_t>(at.size));
    check(MPI_Ialltoallv(piece.data, shares->counts.data(), shares->begins.data(), MPI_BYTE, all,
                         from->data(), at_bytes->data(), MPI_BYTE, at.collectives, pending.add()),
          "MPI_Ialltoallv");
  });
  steps.push_back([piece, shares, share_bytes, rank](PendingRequests& pending) {
    const Communicators& at = *piece.comms;
    std::byte* const all = at.queue->scratch(0);
    reduce_parts(piece.numbers, all, at.size, share_bytes / piece.itemsize(), all);
    if (piece.root < 0) {
      if (share_bytes > 0)
        std::memcpy(piece.data + shares->begins[rank], all, static_cast<std::size_t>(share_bytes));
      check(MPI_Iallgatherv(MPI_IN_PLACE, 0, MPI_BYTE, piece.data, shares->counts.data(),
                            shares->begins.data(), MPI_BYTE, at.collectives, pending.add()),
            "MPI_Iallgatherv");
    } else {
      check(MPI_Igatherv(all, share_bytes, MPI_BYTE, piece.data, shares->counts.data(), shares->begins.data(),
                         MPI_BYTE, piece.root, at.collectives, pending.add()),
            "MPI_Igatherv");
    }
  });
}

void copy_bytes(Span to, Span from) {
  if (from.bytes != to.bytes) throw std::runtime_error("a rank sends itself something else than it expects");
  if (to.bytes > 0) std::memmove(to.data, from.data, to.bytes);
}

}  // namespace

// MPI_Comm_free waits for nobody in the MPIs that there are.
Communicators::~Communicators() {
  if (collectives == MPI_COMM_NULL || messages == MPI_COMM_NULL) return;
  engine.post([comms = std::array{collectives, messages}]() mutable {
    int over = 0;
    if (MPI_Finalized(&over) != MPI_SUCCESS || over != 0) return;
    for (MPI_Comm& comm : comms) MPI_Comm_free(&comm);
  });
}

bool is_one_message(const at::Tensor& tensor) {
  return nbytes(tensor) <= kMessage;
}

void add_broadcast(Steps& steps, const CommunicatorsPtr& comms, const at::Tensor& tensor, int root) {
  for_pieces(nbytes(tensor), kPiece, [&](std::int64_t begin, std::int64_t size) {
    steps.push_back([=](PendingRequests& pending) {
      check(MPI_Ibcast(data_of(tensor) + begin, static_cast<int>(size), MPI_BYTE, root, comms->collectives,
                       pending.add()),
            "MPI_Ibcast");
    });
  });
}

void add_reduce(Steps& steps, const CommunicatorsPtr& comms, const at::Tensor& tensor,
                const ReductionType& numbers, int root) {
  if (comms->size == 1) return;
  const std::int64_t itemsize = tensor.element_size();
  for_pieces(tensor.numel(), kPiece / itemsize, [&](std::int64_t begin, std::int64_t numel) {
    const Piece piece{.comms = comms,
                      .tensor = tensor,
                      .data = data_of(tensor) + begin * itemsize,
                      .numel = numel,
                      .numbers = numbers,
                      .root = root};
    if (numel * itemsize * comms->size <= kSmall) return add_small_reduce(steps, piece);
    add_shared_reduce(steps, piece);
  });
}

void add_all_gather(Steps& steps, const CommunicatorsPtr& comms, const at::Tensor& output,
                    const at::Tensor& input) {
  const std::int64_t stride = nbytes(input);
  const bool in_place = data_of(input) == data_of(output) + comms->rank * stride;
  for_pieces(stride, kPiece, [&](std::int64_t begin, std::int64_t size) {
    steps.push_back([=](PendingRequests& pending) {
      const Rows rows(size, stride);
      const void* const from = in_place ? MPI_IN_PLACE : data_of(input) + begin;
      check(MPI_Iallgather(from, static_cast<int>(size), MPI_BYTE, data_of(output) + begin, 1, rows.type(),
                           comms->collectives, pending.add()),
            "MPI_Iallgather");
    });
  });
}

void add_reduce_scatter(Steps& steps, const CommunicatorsPtr& comms, const at::Tensor& output,
                        const at::Tensor& input, const ReductionType& numbers) {
  const std::int64_t itemsize = output.element_size();
  const std::int64_t piece = std::max<std::int64_t>(1, kPiece / itemsize / comms->size);
  for_pieces(output.numel(), piece, [&](std::int64_t begin, std::int64_t numel) {
    const std::int64_t bytes = numel * itemsize;
    steps.push_back([=](PendingRequests& pending) {
      const Rows rows(bytes, nbytes(output));
      std::byte* const all = comms->queue->scratch(static_cast<std::size_t>(bytes * comms->size));
      check(MPI_Ialltoall(data_of(input) + begin * itemsize, 1, rows.type(), all, static_cast<int>(bytes),
                          MPI_BYTE, comms->collectives, pending.add()),
            "MPI_Ialltoall");
    });
    steps.push_back([=](PendingRequests&) {
      reduce_parts(numbers, comms->queue->scratch(0), comms->size, numel, data_of(output) + begin * itemsize);
    });
  });
}

// An empty part is a message too: the other rank may expect one that is not empty, or have one to send, and
// its message would be taken for one of the next exchange.
template <typename Body>
void for_messages(std::int64_t total, Body body) {
  if (total == 0) return body(0, 0);
  for_pieces(total, kPiece, body);
}

void add_exchange(Steps& steps, const CommunicatorsPtr& comms, std::vector<Message> to,
                  std::vector<Message> from) {
  steps.push_back([comms, to = std::move(to), from = std::move(from)](PendingRequests& pending) {
    for (const Message& message : from) {
      if (message.peer == comms->rank) continue;
      for_messages(length_of(message), [&](std::int64_t begin, std::int64_t size) {
        check(MPI_Irecv(message.data.data + begin, static_cast<int>(size), MPI_BYTE, message.peer, kTag,
                        comms->collectives, pending.add(size)),
              "MPI_Irecv");
      });
    }
    for (const Message& message : to) {
      if (message.peer == comms->rank) continue;
      for_messages(length_of(message), [&](std::int64_t begin, std::int64_t size) {
        check(MPI_Isend(message.data.data + begin, static_cast<int>(size), MPI_BYTE, message.peer, kTag,
                        comms->collectives, pending.add()),
              "MPI_Isend");
      });
    }
    const auto is_own = [&](const Message& message) { return message.peer == comms->rank; };
    const auto own = std::ranges::find_if(to, is_own), here = std::ranges::find_if(from, is_own);
    if (own != to.end() && here != from.end()) copy_bytes(here->data, own->data);
  });
}

void add_barrier(Steps& steps, const CommunicatorsPtr& comms) {
  steps.push_back([=](PendingRequests& pending) {
    check(MPI_Ibarrier(comms->collectives, pending.add()), "MPI_Ibarrier");
  });
}

void add_send(Steps& steps, const CommunicatorsPtr& comms, const at::Tensor& tensor, int to, int tag) {
  const auto send = [=](PendingRequests& pending, std::int64_t begin, std::int64_t size) {
    check(MPI_Isend(data_of(tensor) + begin, static_cast<int>(size), MPI_BYTE, to, tag, comms->messages,
                    pending.add()),
          "MPI_Isend");
  };
  steps.push_back([=](PendingRequests& pending) {
    if (tensor.numel() == 0) return send(pending, 0, 0);
    for_pieces(nbytes(tensor), kMessage,
               [&](std::int64_t begin, std::int64_t size) { send(pending, begin, size); });
  });
}

void add_receive(Steps& steps, const CommunicatorsPtr& comms, const at::Tensor& tensor, int from, int tag) {
  const auto receive = [=](PendingRequests& pending, std::int64_t begin, std::int64_t size) {
    check(MPI_Irecv(data_of(tensor) + begin, static_cast<int>(size), MPI_BYTE, from, tag, comms->messages,
                    pending.add(size)),
          "MPI_Irecv");
  };
  steps.push_back([=](PendingRequests& pending) {
    if (tensor.numel() == 0) return receive(pending, 0, 0);
    for_pieces(nbytes(tensor), kMessage,
               [&](std::int64_t begin, std::int64_t size) { receive(pending, begin, size); });
  });
}

}  // namespace cohort::comm::mpi
