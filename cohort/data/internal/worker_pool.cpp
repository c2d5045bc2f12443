// A counter gives each worker a ticket, which alone says the job and the chunk: workers share no queue. Every
// job has equally many tickets, also with fewer items, so a ticket's job needs no look-up. The worker that
// finishes the last chunk of a job wakes the caller. To cancel is to raise a mark: items below it are passed
// over, and the counts of chunks still come to zero. A worker stuck in an item is left behind; the state is
// shared with it, so nothing is freed under it.
#include "cohort/data/internal/worker_pool.h"

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <mutex>
#include <vector>

#include "cohort/base/threads/thread_pool.h"
#include "cohort/base/threads/wait.h"

namespace cohort::data {
namespace {

using Clock = std::chrono::steady_clock;

std::int64_t now_ns() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(Clock::now().time_since_epoch()).count();
}

// On a cache line of its own, as different workers write to neighbours at the same time.
struct alignas(64) Slot {
  std::int64_t num_items = 0;
  std::atomic<std::int64_t> chunks_left{0};
};

// What a worker is busy with; `since` is 0 when it is idle.
struct alignas(64) Activity {
  std::atomic<std::int64_t> job{0};
  std::atomic<std::int64_t> item{0};
  std::atomic<std::int64_t> since{0};
};

}  // namespace

// Owned by the pool and by every worker, so that a worker that was left behind finds it alive.
struct WorkerPool::Shared {
  Shared(Options given, ItemFunction given_work)
      : options(given),
        work(std::move(given_work)),
        chunks((given.items + given.chunk - 1) / given.chunk),
        slots(static_cast<std::size_t>(given.slots)),
        activity(static_cast<std::size_t>(given.workers)) {}

  Slot& slot(std::int64_t job) { return slots[static_cast<std::size_t>(job % options.slots)]; }
  void run(int worker);
  bool wait_published(std::int64_t job);
  void run_chunk(int worker, std::int64_t job, std::int64_t chunk);

  const Options options;
  const ItemFunction work;
  const std::int64_t chunks;  // tickets per job, also of a job with fewer items
  std::vector<Slot> slots;
  std::vector<Activity> activity;

  alignas(64) std::atomic<std::int64_t> next_ticket{0};
  alignas(64) std::atomic<std::int64_t> published{0};
  std::atomic<std::int64_t> cancelled_below{0};
  std::atomic<bool> stopping{false};

  std::mutex mutex;
  std::condition_variable job_published;
  std::condition_variable job_done;
  base::ThreadPool threads{{.name = "data", .max_threads = options.workers}};  // one function each
};

bool WorkerPool::Shared::wait_published(std::int64_t job) {
  const auto ready = [&] { return published.load(std::memory_order_acquire) > job || stopping.load(); };
  if (!ready()) {
    std::unique_lock lock(mutex);
    base::wait_for_task(job_published, lock, ready);
  }
  return !stopping.load();
}

void WorkerPool::Shared::run_chunk(int worker, std::int64_t job, std::int64_t chunk) {
  Slot& current = slot(job);
  Activity& own = activity[static_cast<std::size_t>(worker)];
  const std::int64_t end = std::min((chunk + 1) * options.chunk, current.num_items);
  for (std::int64_t item = chunk * options.chunk; item < end; ++item) {
    if (job < cancelled_below.load(std::memory_order_relaxed)) break;
    own.job.store(job, std::memory_order_relaxed);
    own.item.store(item, std::memory_order_relaxed);
    own.since.store(now_ns(), std::memory_order_release);
    work(worker, job, item);
  }
  own.since.store(0, std::memory_order_release);
  if (current.chunks_left.fetch_sub(1, std::memory_order_acq_rel) == 1) {
    // The lock orders this with a caller that has just seen the job unfinished.
    { const std::lock_guard lock(mutex); }
    job_done.notify_all();
  }
}

void WorkerPool::Shared::run(int worker) {
  for (;;) {
    const std::int64_t ticket = next_ticket.fetch_add(1, std::memory_order_relaxed);
    if (!wait_published(ticket / chunks)) return;
    run_chunk(worker, ticket / chunks, ticket % chunks);
  }
}

WorkerPool::WorkerPool(Options options, ItemFunction work, Start start)
    : shared_(std::make_shared<Shared>(options, std::move(work))) {
  try {
    for (int worker = 0; worker < options.workers; ++worker) {
      // noexcept: an item that throws would never be done, and nobody looks at this result.
      shared_->threads.submit("load", [shared = shared_, start, worker]() noexcept {
        if (start) start(worker);
        shared->run(worker);
      });
    }
  } catch (...) {  // no more threads to be had: end those that did start
    stop(std::chrono::seconds(5));
    throw;
  }
}

WorkerPool::~WorkerPool() {
  stop(std::chrono::seconds(5));
}

void WorkerPool::publish(std::int64_t num_items) {
  const std::int64_t job = published();
  Slot& slot = shared_->slot(job);
  slot.num_items = num_items;
  slot.chunks_left.store(shared_->chunks, std::memory_order_relaxed);
  {
    // With the mutex, so that a worker that has just found nothing does not sleep through the wake-up.
    const std::lock_guard lock(shared_->mutex);
    shared_->published.store(job + 1, std::memory_order_release);
  }
  shared_->job_published.notify_all();
}

std::int64_t WorkerPool::published() const {
  return shared_->published.load(std::memory_order_relaxed);
}

bool WorkerPool::done(std::int64_t job) const {
  return shared_->slot(job).chunks_left.load(std::memory_order_acquire) == 0;
}

bool WorkerPool::wait(std::int64_t job, base::Deadline deadline) {
  if (done(job)) return true;
  std::unique_lock lock(shared_->mutex);
  const auto ready = [&] { return done(job); };
  return base::wait(shared_->job_done, lock, ready, deadline);
}

void WorkerPool::cancel() {
  shared_->cancelled_below.store(published(), std::memory_order_relaxed);
}

std::optional<WorkerPool::Busy> WorkerPool::longest() const {
  std::optional<Busy> found;
  const std::int64_t now = now_ns();
  for (std::size_t worker = 0; worker < shared_->activity.size(); ++worker) {
    const Activity& activity = shared_->activity[worker];
    const std::int64_t since = activity.since.load(std::memory_order_acquire);
    if (since == 0 || (found && found->since.count() >= now - since)) continue;
    found = Busy{static_cast<int>(worker), activity.job.load(std::memory_order_relaxed),
                 activity.item.load(std::memory_order_relaxed), std::chrono::nanoseconds(now - since)};
  }
  return found;
}

int WorkerPool::stop(std::chrono::milliseconds patience) {
  cancel();
  {
    const std::lock_guard lock(shared_->mutex);
    shared_->stopping.store(true);
  }
  shared_->job_published.notify_all();
  return shared_->threads.stop(patience);
}

}  // namespace cohort::data
