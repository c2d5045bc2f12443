// PartCutter cuts the epoch's order into jobs: parts of a share of a batch. Workers fill the jobs' buffers,
// and next() takes the jobs strictly in order, so the place in the order alone decides what a batch holds. A
// leap first drains the workers, so no buffer is used twice. Of several failures the first in the batch is
// told.
#include "cohort/data/loader.h"

#include <ATen/DeviceAccelerator.h>
#include <ATen/Parallel.h>
#include <ATen/core/grad_mode.h>
#include <dlfcn.h>
#include <pthread.h>

#include <algorithm>
#include <set>

#include "cohort/base/error.h"
#include "cohort/base/log.h"
#include "cohort/base/threads/deadline.h"
#include "cohort/core/parallel.h"
#include "cohort/data/internal/batch_buffer.h"
#include "cohort/data/internal/device_copy.h"
#include "cohort/data/internal/loader_checks.h"
#include "cohort/data/internal/sample_reader.h"
#include "cohort/data/internal/worker_pool.h"

namespace cohort::data {
namespace {

using std::chrono::milliseconds;

constexpr std::size_t kSkipsRemembered = 1000;
constexpr std::size_t kSkipsNamed = 20;

bool use_pinned_memory(const LoaderOptions& options) {
  if (!options.pin_memory) return false;
  if (at::accelerator::getAccelerator().has_value() && at::accelerator::deviceCount() > 0) return true;
  base::warn_once("data.pin_memory", "pin_memory has no effect: this LibTorch sees no accelerator");
  return false;
}

// An error of ours that names the sample already is passed on as it is.
void rethrow_if_it_says(const std::exception_ptr& error, const std::string& what) {
  try {
    std::rethrow_exception(error);
  } catch (const DataError& data_error) {
    if (data_error.what() == what) throw;
  } catch (...) {
  }
}

/// Adds the time of its life to what next() took from the caller.
class WaitTimer {
 public:
  explicit WaitTimer(LoaderCounters& counters) : counters_(counters) {}
  ~WaitTimer() { counters_.wait += std::chrono::steady_clock::now() - start_; }
  WaitTimer(const WaitTimer&) = delete;
  WaitTimer& operator=(const WaitTimer&) = delete;

 private:
  LoaderCounters& counters_;
  std::chrono::steady_clock::time_point start_ = std::chrono::steady_clock::now();
};

// A worker that splits its tensor operations over threads would multiply workers by cores: tensor operations
// of a dataset run on the worker alone. at::set_num_threads would change the whole process, so the OpenMP
// runtime that LibTorch has loaded is asked for this thread only.
void enter_worker(int worker) {
  const std::string name = "cohort-data-" + std::to_string(worker);
  ::pthread_setname_np(::pthread_self(), name.substr(0, 15).c_str());
  at::GradMode::set_enabled(false);
  static_cast<void>(at::get_num_threads());  // makes this thread's default, which the next line replaces
  if (void* symbol = ::dlsym(RTLD_DEFAULT, "omp_set_num_threads")) {
    reinterpret_cast<void (*)(int)>(symbol)(1);
  }
}

}  // namespace

struct Loader::Impl {
  // A batch that was read, and perhaps is on its way to the accelerator.
  struct Ready {
    std::shared_ptr<BatchBuffer> buffer;
    std::int64_t size = 0;
    std::int64_t epoch = 0;
    Part part;
    std::vector<at::Tensor> fields;
    std::optional<DeviceCopy::Copy> copy;
  };

  Impl(std::shared_ptr<const Dataset> given, LoaderOptions o)
      : options(with_both_sizes(std::move(o))),
        dataset(std::move(given)),
        sampler(sampler_of(dataset->size(), options)),
        part_size(options.part_size()),
        pool(std::make_shared<BufferPool>(dataset->fields(), part_size, use_pinned_memory(options))),
        reader(std::make_shared<SampleReader>(dataset,
                                              SampleReader::Options{options.seed, options.world_size},
                                              static_cast<std::size_t>(options.prefetch) + 1)),
        cutter({.global_batch = options.global_batch_size,
                .part_size = part_size,
                .world_size = options.world_size,
                .drop_last = options.drop_last}) {
    cutter.go_to(0, options.rank, options.num_shares);
    if (!options.device.is_cpu()) device_copy.emplace(options.device);
  }

  std::int64_t global_batch() const { return options.global_batch_size; }

  void go_to(std::int64_t new_epoch, std::int64_t position, bool is_at_end = false);
  void drain();
  bool plan(std::int64_t number);
  void read_ahead();
  void read_inline(std::int64_t number);
  std::optional<Ready> collect();
  Ready finish(BatchJob& job);
  void note_skips(const BatchJob& job);
  [[noreturn]] void throw_stuck(std::int64_t job_number);
  Batch deliver(Ready ready);
  std::optional<Batch> next();
  std::optional<Ready> next_ready();
  bool advance(Batch& batch);

  LoaderOptions options;  // of these the shares may change
  const std::shared_ptr<const Dataset> dataset;
  const std::shared_ptr<const Sampler> sampler;
  const std::int64_t part_size;  // samples of a share in a part of a batch
  const std::shared_ptr<BufferPool> pool;
  const std::shared_ptr<SampleReader> reader;
  std::optional<DeviceCopy> device_copy;
  std::unique_ptr<WorkerPool> workers;

  std::int64_t epoch = 0;
  std::int64_t consumed = 0;    // delivered to the caller
  PartCutter cutter;            // of what is handed to the workers
  bool has_more_parts = false;  // the caller has not taken all of the batch
  std::int64_t generation = 0;  // a new one with each batch, and each leap
  std::shared_ptr<const std::vector<std::int64_t>> order;
  std::int64_t next_job = 0;     // first job that was not collected
  bool must_drain = false;       // published jobs were cancelled, and are not to be delivered
  std::int64_t inline_jobs = 0;  // jobs that were planned without workers
  std::optional<Ready> pending;  // read, and on its way to the accelerator
  bool at_end = false;           // the caller was told that the epoch is over
  std::int64_t began_at = 0;     // where in the epoch the next two count from
  std::int64_t delivered_in_epoch = 0;
  std::int64_t skipped_in_epoch = 0;

  LoaderCounters counters;
  std::vector<SkippedSample> skipped;
  std::set<std::int64_t> skipped_indices;
};

// What was read ahead is of another place, and is dropped. The order of an epoch does not depend on the
// place in it, so it is kept. Draining comes last: where it throws, read_ahead() drains again before it
// reads.
void Loader::Impl::go_to(std::int64_t new_epoch, std::int64_t position, bool is_at_end) {
  pending.reset();
  if (new_epoch != epoch) order.reset();
  epoch = new_epoch;
  consumed = position;
  cutter.go_to(position, options.rank, options.num_shares);
  has_more_parts = false;
  ++generation;
  at_end = is_at_end;
  began_at = position;
  delivered_in_epoch = skipped_in_epoch = 0;
  drain();
}

// Afterwards no worker touches a job. A worker that reads a sample cannot be stopped, so the samples under
// way are waited for; those that were not begun are cancelled.
void Loader::Impl::drain() {
  if (workers == nullptr) return;
  must_drain = true;
  workers->cancel();
  const base::Deadline deadline(options.timeout);
  for (; next_job < workers->published(); ++next_job) {
    if (!workers->wait(next_job, deadline)) throw_stuck(next_job);
    reader->job(next_job).buffer.reset();
    reader->job(next_job).failures.clear();
  }
  must_drain = false;
}

// Lays out job `number` as the next part; returns false at the end of the epoch.
bool Loader::Impl::plan(std::int64_t number) {
  if (order == nullptr) {
    order =
        std::make_shared<const std::vector<std::int64_t>>(checked_order(*sampler, epoch, dataset->size()));
  }
  const std::optional<Part> part = cutter.next(std::ssize(*order));
  if (!part) return false;
  BatchJob& job = reader->job(number);
  job.buffer = pool->acquire();
  job.order = order;
  job.epoch = epoch;
  job.part = *part;
  job.failures.clear();
  return true;
}

// Has workers fill the job that is collected next, and `prefetch` jobs after it. There are prefetch + 1
// slots, so no job is laid out again before it was collected.
void Loader::Impl::read_ahead() {
  if (options.workers == 0) return;
  if (workers == nullptr) {
    const std::int64_t chunk = std::clamp<std::int64_t>(part_size / (8 * options.workers), 1, 16);
    workers = std::make_unique<WorkerPool>(
        WorkerPool::Options{options.workers, options.prefetch + 1, part_size, chunk},
        [shared = reader](int, std::int64_t job, std::int64_t item) { shared->read(job, item); },
        enter_worker);
  }
  if (must_drain) drain();
  while (workers->published() - next_job <= options.prefetch && plan(workers->published())) {
    workers->publish(reader->job(workers->published()).part.count);
  }
}

void Loader::Impl::throw_stuck(std::int64_t job_number) {
  const BatchJob& job = reader->job(job_number);
  std::string what = base::concat("batch ", job.part.first / global_batch(), " of epoch ", job.epoch,
                                  " was not ready after ", options.timeout.count(), " ms");
  const auto busy = workers->longest();
  // Job and item are not read in one moment: the item may be of the job before.
  if (busy && busy->item < reader->job(busy->job).part.count) {
    const BatchJob& of = reader->job(busy->job);
    what += base::concat(": worker ", busy->worker, " has been reading ",
                         dataset->describe(reader->index_of(of, busy->item)), " for ",
                         std::chrono::duration_cast<milliseconds>(busy->since).count(), " ms");
  }
  throw TimeoutError("data.loader", what, "look at that sample, or raise LoaderOptions::timeout");
}

void Loader::Impl::note_skips(const BatchJob& job) {
  for (const BatchJob::Failure& failure : job.failures) {
    ++counters.samples_skipped;
    ++skipped_in_epoch;
    const std::int64_t index = reader->index_of(job, failure.item);
    if (skipped.size() >= kSkipsRemembered || !skipped_indices.insert(index).second) continue;
    skipped.push_back({index, reader->explain(job, failure)});
    if (skipped.size() <= kSkipsNamed) {
      base::log_warning("skipped a sample: " + skipped.back().what);
    } else if (skipped.size() == kSkipsNamed + 1) {
      base::log_warning("more samples are skipped; they are counted, and no longer named here");
    }
  }
}

// Makes a batch of a job that was read: reports failures, closes the gaps of skipped samples, and begins the
// copy to the accelerator.
Loader::Impl::Ready Loader::Impl::finish(BatchJob& job) {
  // Whoever failed first in time depends on the workers; first in the batch does not.
  std::ranges::sort(job.failures, {}, &BatchJob::Failure::item);
  if (!job.failures.empty() && options.on_error == OnError::kRaise) {
    const BatchJob::Failure first = job.failures.front();
    const std::string what = reader->explain(job, first);
    go_to(epoch, job.part.whole_first);  // so that the next call tries this batch again
    rethrow_if_it_says(first.error, what);
    throw DataError("data.loader", what, "repair or remove it, or skip such samples (on_error: skip)");
  }
  note_skips(job);
  Ready ready;
  ready.size = reader->compact(job);
  ready.epoch = job.epoch;
  ready.part = job.part;
  ready.buffer = std::move(job.buffer);
  for (const at::Tensor& tensor : ready.buffer->tensors) {
    ready.fields.push_back(ready.size == part_size ? tensor.alias() : tensor.narrow(0, 0, ready.size));
  }
  if (device_copy && ready.size > 0) ready.copy = device_copy->begin(ready.fields, *ready.buffer);
  return ready;
}

// Without workers: the threads that compute are idle while the caller waits for its input.
void Loader::Impl::read_inline(std::int64_t number) {
  core::parallel_for(reader->job(number).part.count, 1, [&](std::int64_t begin, std::int64_t end) {
    const at::NoGradGuard no_grad;
    for (std::int64_t item = begin; item < end; ++item) reader->read(number, item);
  });
}

// The next batch in order, waiting for it; nothing at the end of the epoch.
std::optional<Loader::Impl::Ready> Loader::Impl::collect() {
  if (options.workers == 0) {
    if (!plan(inline_jobs)) return std::nullopt;
    read_inline(inline_jobs);
    return finish(reader->job(inline_jobs++));
  }
  read_ahead();
  if (next_job == workers->published()) return std::nullopt;
  if (!workers->wait(next_job, base::Deadline(options.timeout))) throw_stuck(next_job);
  return finish(reader->job(next_job++));
}

// Hands a part to the caller, and counts it as consumed. After this loader's last part the whole batch is
// consumed: what is left of it belongs to other loaders.
Batch Loader::Impl::deliver(Ready ready) {
  const Part& part = ready.part;
  Batch batch;
  batch.size = ready.size;
  batch.share = part.share;
  // With one part a share has what was not skipped.
  batch.whole_size =
      options.parts == 1 ? ready.size : cutter.samples_of(part.share, part.whole_next - part.whole_first);
  has_more_parts = !part.is_last;
  // A state between two shares begins the batch anew.
  const std::int64_t so_far = options.num_shares == 1 ? part.next : part.whole_first;
  consumed = has_more_parts ? so_far : part.whole_next;
  if (has_more_parts) {
    batch.take_next = [this, now = generation](Batch& current) {
      // The batch may outlive the place at which it was made: the number shows that the loader has advanced.
      require_of_loader(now == generation, "a part of a batch was asked for when the loader had advanced");
      return advance(current);
    };
  }
  batch.epoch = ready.epoch;
  batch.number = part.first / global_batch();
  batch.indices = std::span(ready.buffer->indices).first(static_cast<std::size_t>(ready.size));
  batch.fields = ready.copy ? device_copy->finish(std::move(*ready.copy)) : std::move(ready.fields);
  batch.lease = std::move(ready.buffer);
  ++counters.batches;
  counters.samples += batch.size;
  delivered_in_epoch += batch.size;
  // On an accelerator the next batch travels while the caller computes with this one.
  if (device_copy && workers != nullptr && next_job < workers->published() && workers->done(next_job)) {
    BatchJob& job = reader->job(next_job);
    if (job.failures.empty() || options.on_error == OnError::kSkip) {
      ++next_job;
      pending = finish(job);
    }
  }
  return batch;
}

std::optional<Loader::Impl::Ready> Loader::Impl::next_ready() {
  for (;;) {
    std::optional<Ready> ready = std::exchange(pending, std::nullopt);
    if (!ready) ready = collect();
    // Of shares whose samples were all skipped the last one says that the batch is over.
    if (!ready || ready->size > 0 || ready->part.is_last) return ready;
  }
}

std::optional<Batch> Loader::Impl::next() {
  const at::NoGradGuard no_grad;
  const WaitTimer timer(counters);
  require_of_loader(!has_more_parts, "the last batch has parts that were not taken",
                    options.num_shares == 1
                        ? "while (batch.advance()) in the step, or LoaderOptions::parts of 1"
                        : "while (batch.advance()) in the step: the loader reads several shares");
  if (at_end) go_to(epoch + 1, 0);
  ++generation;
  while (std::optional<Ready> ready = next_ready()) {
    consumed = ready->part.whole_next;
    if (ready->size > 0 || options.world_size > 1) return deliver(std::move(*ready));
  }
  if (began_at == 0 && delivered_in_epoch == 0 && skipped_in_epoch > 0) {
    throw DataError("data.loader",
                    base::concat("every sample was skipped (", skipped_in_epoch,
                                 "), the first: ", skipped.empty() ? "" : skipped.front().what));
  }
  at_end = true;
  return std::nullopt;
}

bool Loader::Impl::advance(Batch& batch) {
  if (!has_more_parts) return false;
  const at::NoGradGuard no_grad;
  const WaitTimer timer(counters);
  std::optional<Ready> ready;
  if (options.on_error == OnError::kSkip) {  // what follows may be empty, and then this part stays
    ready = next_ready();
    if (ready->size == 0) {
      has_more_parts = false;
      consumed = ready->part.whole_next;
      return false;
    }
  }
  batch.fields.clear();  // its memory may hold a part that follows
  batch.lease.reset();
  batch.indices = {};
  if (!ready) ready = next_ready();
  batch = deliver(std::move(*ready));
  return true;
}

Loader::Loader(std::shared_ptr<const Dataset> dataset, LoaderOptions options) {
  require_of_loader(dataset != nullptr, "there is no dataset");
  check_loader_options(*dataset, options);
  impl_ = std::make_unique<Impl>(std::move(dataset), std::move(options));
}

Loader::~Loader() {
  if (impl_->workers == nullptr) return;
  if (const int left = impl_->workers->stop(impl_->options.stop_grace); left > 0) {
    base::log_warning(base::concat("data loader: ", left, " worker(s) were still reading a sample after ",
                                   impl_->options.stop_grace.count(), " ms and were left behind"));
  }
}

void Loader::set_epoch(std::int64_t epoch) {
  require_of_loader(epoch >= 0, base::concat("epoch is ", epoch, ", expected at least 0"));
  impl_->go_to(epoch, 0);
}

void Loader::set_shares(std::int64_t rank, std::int64_t num_shares) {
  check_shares(rank, num_shares, impl_->options.world_size);
  require_of_loader(!impl_->has_more_parts, "shares are set between two parts of a batch",
                    "while (batch.advance())");
  impl_->options.rank = rank;
  impl_->options.num_shares = num_shares;
  // At the end the next call of next() begins another epoch, as it would have.
  impl_->go_to(impl_->epoch, impl_->consumed, impl_->at_end);
}

void Loader::start() {
  impl_->read_ahead();
}

std::optional<Batch> Loader::next() {
  return impl_->next();
}

LoaderState Loader::state() const {
  return {impl_->epoch, impl_->consumed, impl_->dataset->size()};
}

void Loader::restore(const LoaderState& state) {
  require_of_loader(state.epoch >= 0 && state.samples_consumed >= 0,
                    base::concat("cannot go to epoch ", state.epoch, ", sample ", state.samples_consumed));
  const std::int64_t size = impl_->dataset->size();
  if (state.dataset_size != 0 && state.dataset_size != size) {
    throw DataError("data.loader",
                    base::concat("cannot resume: the dataset had ", state.dataset_size,
                                 " samples when the state was saved, and has ", size, " now"),
                    "restore the dataset, or start anew");
  }
  impl_->go_to(state.epoch, state.samples_consumed);
}

std::int64_t Loader::batches_per_epoch() const {
  const std::int64_t batch = impl_->global_batch();
  return (impl_->sampler->size() + (impl_->options.drop_last ? 0 : batch - 1)) / batch;
}

std::int64_t Loader::samples_per_epoch() const {
  return impl_->sampler->size();
}

LoaderCounters Loader::counters() const {
  LoaderCounters counters = impl_->counters;
  counters.buffer_allocations = impl_->pool->allocations();
  return counters;
}

std::vector<SkippedSample> Loader::skipped() const {
  return impl_->skipped;
}

const LoaderOptions& Loader::options() const {
  return impl_->options;
}

const Dataset& Loader::dataset() const {
  return *impl_->dataset;
}

}  // namespace cohort::data
