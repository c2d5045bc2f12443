// A sample goes to its row of the batch's buffer, which its place in the order decides, and no other
// thread. So workers share no state but a list of failures. Skipped samples leave gaps, which compact()
// closes once all rows are there.
#include "cohort/data/internal/sample_reader.h"

#include <algorithm>
#include <cstring>

#include "cohort/base/error.h"

namespace cohort::data {

SampleReader::SampleReader(std::shared_ptr<const Dataset> dataset, Options options, std::size_t jobs)
    : dataset_(std::move(dataset)), options_(options), jobs_(jobs) {
  for (const Field& field : dataset_->fields()) bytes_.push_back(static_cast<std::size_t>(field.bytes()));
}

std::int64_t SampleReader::position_of(const BatchJob& job, std::int64_t item) const {
  // Share r of w has every w-th sample of the global batch, from r on.
  return job.part.first + job.part.share + options_.world_size * item;
}

std::int64_t SampleReader::index_of(const BatchJob& job, std::int64_t item) const {
  return (*job.order)[static_cast<std::size_t>(position_of(job, item))];
}

void SampleReader::read(std::int64_t number, std::int64_t item) {
  BatchJob& current = job(number);
  std::vector<std::byte*> out(bytes_.size());
  const auto row = static_cast<std::size_t>(item);
  for (std::size_t field = 0; field < out.size(); ++field) {
    out[field] = current.buffer->base[field] + row * bytes_[field];
  }
  const std::int64_t position = position_of(current, item);
  const std::int64_t index = (*current.order)[static_cast<std::size_t>(position)];
  current.buffer->indices[row] = index;
  // From the place in the epoch, not from the thread or the rank: transforms draw the same numbers however
  // the work is shared out.
  base::RandomStream random(options_.seed, static_cast<std::uint64_t>(current.epoch),
                            static_cast<std::uint64_t>(position), base::Purpose::kTransform);
  try {
    dataset_->read(index, random, out);
  } catch (...) {
    // Several workers may fail in one job. An error is kept for the caller's thread: here nobody could catch
    // it.
    const std::lock_guard lock(current.mutex);
    current.failures.push_back({item, std::current_exception()});
  }
}

std::int64_t SampleReader::compact(BatchJob& job) const {
  if (job.failures.empty()) return job.part.count;
  std::vector<bool> bad(static_cast<std::size_t>(job.part.count), false);
  for (const auto& failure : job.failures) bad[static_cast<std::size_t>(failure.item)] = true;
  std::size_t kept = 0;
  for (std::size_t item = 0; item < bad.size(); ++item) {
    if (bad[item]) continue;
    // Rows only move towards the front and never overlap, so memcpy is enough.
    if (kept != item) {
      for (std::size_t field = 0; field < bytes_.size(); ++field) {
        std::byte* base = job.buffer->base[field];
        std::memcpy(base + kept * bytes_[field], base + item * bytes_[field], bytes_[field]);
      }
      job.buffer->indices[kept] = job.buffer->indices[item];
    }
    ++kept;
  }
  return static_cast<std::int64_t>(kept);
}

std::string SampleReader::explain(const BatchJob& job, const BatchJob::Failure& failure) const {
  const std::string name = dataset_->describe(index_of(job, failure.item));
  std::string what = "unknown exception";
  try {
    std::rethrow_exception(failure.error);
  } catch (const std::exception& error) {
    what = error.what();
  } catch (...) {
  }
  // Errors of image files name the file already.
  return what.find(name) == std::string::npos ? name + ": " + what : what;
}

}  // namespace cohort::data
