#pragma once

#include <ATen/core/Tensor.h>

#include "cohort/comm/mpi/engine.h"
#include "cohort/comm/mpi/reduce.h"

/// Collectives as steps of MPI's own. Tensors are contiguous and on the CPU. Long ones go in pieces, so that
/// no number of bytes is more than MPI's int holds and what is kept beside the tensor stays small.
namespace cohort::comm::mpi {

/// The ranks of a group, as MPI knows them.
struct Place {
  explicit Place(Engine& of) : engine(of) {}
  ~Place();
  Place(const Place&) = delete;
  Place& operator=(const Place&) = delete;

  Engine& engine;
  MPI_Comm collectives = MPI_COMM_NULL;
  MPI_Comm messages = MPI_COMM_NULL;
  int rank = 0;
  int size = 1;
  std::shared_ptr<Lane> lane;
};
using PlacePtr = std::shared_ptr<const Place>;
using Steps = std::vector<Call::Step>;

/// Memory of a tensor and the rank to which, or from which, it goes.
struct Message {
  at::Tensor tensor;
  int peer = 0;
};

void add_broadcast(Steps& steps, const PlacePtr& place, const at::Tensor& tensor, int root);
/// In place. `root` -1: on all ranks; else the others' tensors are left as they are.
void add_reduce(Steps& steps, const PlacePtr& place, const at::Tensor& tensor, ReduceOp op, int root = -1);
/// Ranks one after the other in `output`, which may hold `input` in its place.
void add_all_gather(Steps& steps, const PlacePtr& place, const at::Tensor& output, const at::Tensor& input);
void add_reduce_scatter(Steps& steps, const PlacePtr& place, const at::Tensor& output,
                        const at::Tensor& input, ReduceOp op);
/// Each rank sends and receives what the others expect. What a rank sends itself is copied.
void add_exchange(Steps& steps, const PlacePtr& place, std::vector<Message> to, std::vector<Message> from);
void add_barrier(Steps& steps, const PlacePtr& place);
void add_send(Steps& steps, const PlacePtr& place, const at::Tensor& tensor, int to, int tag);
/// Whether it may be received from MPI_ANY_SOURCE.
bool is_one_message(const at::Tensor& tensor);
void add_receive(Steps& steps, const PlacePtr& place, const at::Tensor& tensor, int from, int tag);

}  // namespace cohort::comm::mpi
