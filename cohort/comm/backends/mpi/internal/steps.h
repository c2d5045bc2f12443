#pragma once

#include <ATen/core/Tensor.h>

#include "cohort/comm/backends/mpi/internal/engine.h"
#include "cohort/comm/internal/tensors.h"

/// Collectives as steps of MPI's own. Tensors are contiguous and on the CPU. Long ones go in pieces, so that
/// no number of bytes is more than MPI's int holds and what is kept beside the tensor stays small.
namespace cohort::comm::mpi {

/// The ranks of a group, as MPI knows them.
struct Communicators {
  explicit Communicators(Engine& of) : engine(of) {}
  ~Communicators();
  Communicators(const Communicators&) = delete;
  Communicators& operator=(const Communicators&) = delete;

  Engine& engine;
  MPI_Comm collectives = MPI_COMM_NULL;
  MPI_Comm messages = MPI_COMM_NULL;
  int rank = 0;
  int size = 1;
  std::shared_ptr<OrderedQueue> queue;
};
using CommunicatorsPtr = std::shared_ptr<const Communicators>;
using Steps = std::vector<MpiWork::Step>;

/// Memory that the call keeps, and the rank to which, or from which, it goes.
struct Message {
  Span data;
  int peer = 0;
};

void add_broadcast(Steps& steps, const CommunicatorsPtr& comms, const at::Tensor& tensor, int root);
/// In place, in the order of the ranks. `root` -1: on all of them; else the others' tensors are left as they
/// are.
void add_reduce(Steps& steps, const CommunicatorsPtr& comms, const at::Tensor& tensor,
                const ReductionType& numbers, int root = -1);
/// Ranks one after the other in `output`, which may hold `input` in its place.
void add_all_gather(Steps& steps, const CommunicatorsPtr& comms, const at::Tensor& output,
                    const at::Tensor& input);
void add_reduce_scatter(Steps& steps, const CommunicatorsPtr& comms, const at::Tensor& output,
                        const at::Tensor& input, const ReductionType& numbers);
/// Each rank sends and receives what the others expect. What a rank sends itself is copied.
void add_exchange(Steps& steps, const CommunicatorsPtr& comms, std::vector<Message> to,
                  std::vector<Message> from);
void add_barrier(Steps& steps, const CommunicatorsPtr& comms);
void add_send(Steps& steps, const CommunicatorsPtr& comms, const at::Tensor& tensor, int to, int tag);
/// Whether it may be received from MPI_ANY_SOURCE.
bool is_one_message(const at::Tensor& tensor);
void add_receive(Steps& steps, const CommunicatorsPtr& comms, const at::Tensor& tensor, int from, int tag);

}  // namespace cohort::comm::mpi
