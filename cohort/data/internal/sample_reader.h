#pragma once

#include <cstddef>
#include <cstdint>
#include <exception>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "cohort/data/dataset.h"
#include "cohort/data/internal/batch_buffer.h"
#include "cohort/data/internal/part_cutter.h"

namespace cohort::data {

/// A part of a batch that is being read: its samples go to `buffer`.
struct BatchJob {
  std::shared_ptr<BatchBuffer> buffer;
  std::shared_ptr<const std::vector<std::int64_t>> order;
  std::int64_t epoch = 0;
  Part part;

  struct Failure {
    std::int64_t item = 0;
    std::exception_ptr error;
  };
  std::mutex mutex;
  std::vector<Failure> failures;  // under mutex until the job is done
};

/// Reads single samples of jobs, on any thread; what it needs is in it, so that a thread that is stuck in a
/// dataset can outlive the loader.
class SampleReader {
 public:
  struct Options {
    std::uint64_t seed = 0;
    std::int64_t world_size = 1;  ///< shares of a batch, over all loaders
  };
  /// `jobs` are under way at once.
  SampleReader(std::shared_ptr<const Dataset> dataset, Options options, std::size_t jobs);

  BatchJob& job(std::int64_t number) { return jobs_[static_cast<std::size_t>(number) % jobs_.size()]; }
  /// Reads sample `item` of a job. A failure is kept in the job.
  void read(std::int64_t job, std::int64_t item);
  /// Dataset index of sample `item`.
  std::int64_t index_of(const BatchJob& job, std::int64_t item) const;
  /// Moves the samples that were read to the front of the buffer; returns how many there are.
  std::int64_t compact(BatchJob& job) const;
  /// What went wrong with a sample, naming it.
  std::string explain(const BatchJob& job, const BatchJob::Failure& failure) const;
  const Dataset& dataset() const { return *dataset_; }

 private:
  /// Position of sample `item` in the order of the epoch.
  std::int64_t position_of(const BatchJob& job, std::int64_t item) const;

  const std::shared_ptr<const Dataset> dataset_;
  const Options options_;
  std::vector<std::size_t> bytes_;
  std::vector<BatchJob> jobs_;
};

}  // namespace cohort::data
