#pragma once

#include <c10/core/Device.h>

#include <chrono>
#include <cstdint>
#include <memory>

#include "cohort/data/sampler.h"

namespace cohort::data {

/// What happens to a sample that cannot be read.
enum class OnError {
  kRaise,  ///< next() throws, naming the sample.
  kSkip,   ///< The sample is left out of its batch, counted, and named once in the log.
};

/// How a Loader reads. The defaults read each batch on the caller's thread, in order, for one rank.
struct LoaderOptions {
  /// Samples of one batch on each rank; the last batch of an epoch may have fewer.
  std::int64_t batch_size = 1;
  /// Samples of one step over all ranks, where ranks do not divide it: shares then differ by one, and
  /// batch_size is the largest. 0: batch_size * world_size.
  std::int64_t global_batch_size = 0;
  /// Each share is read and handed out in so many parts, one after the other (Batch::advance), each of a
  /// parts-th of batch_size, rounded up: a step that accumulates gradients holds one part of its input at a
  /// time. An order, and what a step holds, is the same for any number of parts.
  std::int64_t parts = 1;
  /// Threads that read ahead while the caller computes. 0: next() itself reads each batch, on LibTorch's
  /// compute threads, which are idle then; at::set_num_threads(1) leaves that to the caller's thread alone.
  int workers = 0;
  /// Batches, or parts of them, read ahead of the one that is in use; at least 1 when there are workers.
  int prefetch = 2;
  /// Reads each epoch in an order of its own, a function of `seed` and the epoch.
  bool shuffle = false;
  /// Leave out the last batch if it is short.
  bool drop_last = false;
  /// Lay batches out in page-locked memory. Without an accelerator this is logged once and does nothing.
  bool pin_memory = false;
  /// Where the batches end up. On an accelerator they are copied on a stream of their own, one batch ahead.
  c10::Device device = c10::kCPU;
  /// Of the order and of the samples' random streams: the same on all ranks.
  std::uint64_t seed = 0;
  /// Which share of each global batch is read, 0 to world_size - 1.
  std::int64_t rank = 0;
  /// Shares of a global batch, over all ranks.
  std::int64_t world_size = 1;
  /// Shares that this loader reads: rank, rank + 1, ..., handed out one after the other (Batch::advance). The
  /// shares of all loaders together are those of one loader for each share.
  std::int64_t num_shares = 1;
  /// What happens where the data set does not divide by the ranks.
  LastBatchPolicy last_batch = LastBatchPolicy::kPad;
  /// What happens to a sample that cannot be read.
  OnError on_error = OnError::kRaise;
  /// How long next() waits for the workers before it throws TimeoutError.
  std::chrono::milliseconds timeout = std::chrono::minutes(10);
  /// How long the destructor waits for a worker inside Dataset::read before it leaves the thread behind.
  std::chrono::milliseconds stop_grace = std::chrono::seconds(5);
  /// Order of the samples; if empty, made from shuffle, seed, world_size and last_batch.
  std::shared_ptr<const Sampler> sampler = nullptr;

  /// Returns the samples of a part of a batch on each rank. The last part of a share may have fewer. Of
  /// Loader::options(), which have both batch sizes.
  std::int64_t part_size() const { return (batch_size + parts - 1) / parts; }
};

}  // namespace cohort::data
