#pragma once

#include <cstddef>
#include <vector>

#include "cohort/comm/backends/shm/internal/communicator.h"
#include "cohort/comm/backends/shm/internal/task.h"

/// Collectives on memory. Every rank makes the same tasks in the same order, and runs one after the other.
/// What they write to is complete when they are done. Sums go in the order of the ranks, whatever the size
/// and the path, so all ranks and all runs have the same bits.
namespace cohort::comm::shm {

/// Whether the others need nothing more of a rank once its collective has begun.
enum class Rounds : std::uint8_t {
  kMany,  ///< they do
  kOne,   ///< they do not; where tensors lie in arenas there is a second round, which they ask for
};

/// In place. Memory that lies in an arena on every rank is reduced where it is.
Task all_reduce(Communicator& ranks, std::byte* data, std::size_t numel, Dtype dtype, Op op);
/// In place. What the others hold afterwards is what they had.
Task reduce(Communicator& ranks, std::byte* data, std::size_t numel, Dtype dtype, Op op, int root);
Task broadcast(Communicator& ranks, Span data, int root);
/// `to`: one of `from`'s size for each rank.
Task all_gather(Communicator& ranks, std::vector<std::byte*> to, Span from);
/// `to`: as all_gather's, on the root; elsewhere empty.
Task gather(Communicator& ranks, std::vector<std::byte*> to, Span from, int root);
/// `from`: one of `to`'s size for each rank, on the root; elsewhere empty.
Task scatter(Communicator& ranks, Span to, std::vector<std::byte*> from, int root);
/// `from`: `numel` numbers for each rank.
Task reduce_scatter(Communicator& ranks, std::byte* to, std::vector<std::byte*> from, std::size_t numel,
                    Dtype dtype, Op op);
/// `to` and `from`: one for each rank, of any size, as long as both ends say the same.
Task all_to_all(Communicator& ranks, std::vector<Span> to, std::vector<Span> from);
Task barrier(Communicator& ranks);
/// Of a call with `bytes` bytes on this rank. Of those that send each rank something else it is kMany.
Rounds rounds_of(const Communicator& ranks, CollectiveType type, std::size_t bytes = 0);
/// One after the other.
Task sequence(std::vector<Task> tasks);

}  // namespace cohort::comm::shm
