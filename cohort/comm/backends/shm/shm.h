#pragma once

#include <ATen/core/Tensor.h>

#include <chrono>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include "cohort/base/threads/deadline.h"

/// The ranks of one host, over memory that they share: a backend of c10d for CPU tensors.
///
///     auto backend = comm::make_shm_backend(store, rank, size, std::chrono::minutes(10));
///     process_group->setBackend(c10::kCPU, c10d::ProcessGroup::BackendType::CUSTOM, backend);
///
///     at::Tensor gradients = comm::shared_empty({n});   // reduced where it is: several times as fast
///
/// This library, libcohort_shm, needs LibTorch, and of Cohort neither libcohort_comm nor the launcher.
namespace cohort::comm {

constexpr int kMaxShmRanks = 64;

/// Returns the backend "shm" of this rank. Blocks until all `size` ranks of `store` have called it, at most
/// `timeout`, which is also the deadline of calls that give none. Ranks may be processes or threads,
/// kMaxShmRanks at most.
/// Numbers: sums go in the order of the ranks, so all ranks and all runs have the same bits; half and
/// bfloat16 are summed as float.
/// Throws: UsageError when ranks are on different hosts; RendezvousError; SystemError when there is no
/// memory.
c10::intrusive_ptr<c10d::Backend> make_shm_backend(const c10::intrusive_ptr<c10d::Store>& store, int rank,
                                                   int size, std::chrono::milliseconds timeout);

/// The same, and the others are waited for until `deadline`.
c10::intrusive_ptr<c10d::Backend> make_shm_backend_until(const c10::intrusive_ptr<c10d::Store>& store,
                                                         int rank, int size,
                                                         std::chrono::milliseconds timeout,
                                                         base::Deadline deadline);

/// Returns a tensor, not initialised, on the CPU, that a backend shm need not copy: all_reduce works on it
/// where it is when every rank's tensor is one. Its memory is kept for the next one when it goes. Throws:
/// SystemError when there is no memory; UsageError for another device.
at::Tensor shared_empty(at::IntArrayRef sizes, const at::TensorOptions& options = {});

/// Whether the tensor's memory is of shared_empty().
bool is_shared(const at::Tensor& tensor);

}  // namespace cohort::comm
