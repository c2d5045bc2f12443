#pragma once

#include <ATen/core/Tensor.h>

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "cohort/data/dataset.h"
#include "cohort/data/loader_options.h"

/// The loader: batches of a dataset, in order, read ahead by worker threads.
///
///     Loader loader(std::make_shared<ImageFolder>("data/train", options),
///                   {.batch_size = 128, .workers = 2});
///     for (std::int64_t epoch = 0; epoch < 10; ++epoch) {
///       while (auto batch = loader.next()) train(batch->input(), batch->target());
///     }
///
/// What a batch holds is a function of (dataset, seed, epoch, global batch size, world_size, share) and never
/// of `workers` or of time. All ranks make equally many batches: with several shares one may be empty (size
/// 0), where a share has no sample or all of them were skipped.
namespace cohort::data {

/// One batch. Its tensors alias memory of the loader that is used again after the last copy of the Batch is
/// destroyed and no tensor of it is held any more; so a tensor that was kept stays valid.
struct Batch {
  /// Keeps the memory of `fields` and `indices`. First, so that it goes last.
  std::shared_ptr<void> lease;
  /// One tensor per field, [size, ...].
  std::vector<at::Tensor> fields;
  /// Samples in this batch, or in this part of it.
  std::int64_t size = 0;
  /// Samples in all parts of its share: `size` where there is one part.
  std::int64_t whole_size = 0;
  /// The share of the global batch that these samples are of: `rank` where the loader reads one share.
  std::int64_t share = 0;
  std::int64_t epoch = 0;
  /// Number of this batch in its epoch (of this rank), from 0, as if the epoch had been read from its start.
  std::int64_t number = 0;
  /// Dataset indices of the samples.
  std::span<const std::int64_t> indices;

  /// The first field, by convention what the model gets. Throws: std::out_of_range where there is none.
  at::Tensor& input() { return fields.at(0); }
  /// The second field, by convention the label. Throws: std::out_of_range where there is none.
  at::Tensor& target() { return fields.at(1); }

  /// Puts the next part of this batch in place of this one, where LoaderOptions::parts or num_shares asked
  /// for several: the rest of this share, then the next share that has a sample. Returns false, and changes
  /// nothing, after the last of this loader's. All parts must be taken before the loader's next next(). While
  /// the loader lives. Throws: as next(), and the batch is empty then, or unchanged with on_error: skip;
  /// UsageError where the loader has advanced since, or to another epoch.
  bool advance() {
    const auto take = take_next;  // the next part brings its own
    return take != nullptr && take(*this);
  }
  /// The loader's.
  std::function<bool(Batch&)> take_next = nullptr;
};

/// Where the loader stands: all that is needed to resume.
struct LoaderState {
  std::int64_t epoch = 0;
  /// Samples of this epoch that were delivered, over all ranks (skipped ones too).
  std::int64_t samples_consumed = 0;
  /// Size of the dataset, to notice that it changed; 0 is not checked.
  std::int64_t dataset_size = 0;
  bool operator==(const LoaderState&) const = default;
};

/// Totals since the loader was made.
struct LoaderCounters {
  std::int64_t batches = 0;
  std::int64_t samples = 0;
  /// Batch-sized memory blocks made so far: constant from the third batch on.
  std::int64_t buffer_allocations = 0;
  /// Samples left out, each time that they were.
  std::int64_t samples_skipped = 0;
  /// Time that next() and Batch::advance() took from their caller: waiting for workers, or reading when there
  /// are none.
  std::chrono::nanoseconds wait{0};
};

/// A sample that was left out.
struct SkippedSample {
  std::int64_t index = 0;  ///< in the data set
  std::string what;        ///< what reading it threw
};

/// Ownership: shares the dataset. Threads: one caller at a time.
class Loader {
 public:
  /// Throws: UsageError naming the option and its value.
  Loader(std::shared_ptr<const Dataset> dataset, LoaderOptions options);
  /// Stops the workers. One that is stuck inside Dataset::read is left behind after `stop_grace`.
  ~Loader();
  Loader(const Loader&) = delete;
  Loader& operator=(const Loader&) = delete;

  /// Goes to the start of `epoch`; what was read ahead is dropped. Epochs follow one another without it.
  /// Throws: TimeoutError, as next(); the loader is there all the same.
  void set_epoch(std::int64_t epoch);
  /// Reads the shares [rank, rank + num_shares) from the next batch on; what was read ahead is dropped.
  /// Throws: UsageError for shares that are not there, and where parts of the last batch were not taken;
  /// TimeoutError, as set_epoch().
  void set_shares(std::int64_t rank, std::int64_t num_shares);
  /// Begins to read ahead now, for instance while a model is still being made. next() does it otherwise.
  /// Throws: UsageError, as next().
  void start();
  /// Returns the next batch of this epoch (its first part), or nothing at its end. Called again after the
  /// end, it begins the next epoch. Throws: DataError naming the sample that cannot be read (calling again
  /// tries the same batch again); TimeoutError naming the sample that a worker is stuck in; UsageError naming
  /// the sampler, where its order has an index that is not in the dataset or another length than it says, or
  /// where parts of the last batch were not taken.
  std::optional<Batch> next();

  /// At the end of an epoch that is the epoch with all its samples, until next() begins another: a loader
  /// that is restored to it returns nothing once, and continues with the next epoch.
  LoaderState state() const;
  /// Goes to `state`, which may come from a loader with another number of workers, or of ranks.
  /// Throws: DataError if the dataset's size is another than that in `state`; TimeoutError, as set_epoch().
  void restore(const LoaderState& state);

  /// Batches in a whole epoch: as many for each share.
  std::int64_t batches_per_epoch() const;
  /// Samples in a whole epoch over all ranks, padding included.
  std::int64_t samples_per_epoch() const;
  /// Totals of this loader, of this rank.
  LoaderCounters counters() const;
  /// Samples left out so far, each once, at most the first thousand.
  std::vector<SkippedSample> skipped() const;
  /// Options as they were given, with both batch sizes, and the shares of set_shares().
  const LoaderOptions& options() const;
  /// The data set that is read.
  const Dataset& dataset() const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace cohort::data
