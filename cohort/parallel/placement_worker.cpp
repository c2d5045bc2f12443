// A registry of weak pointers keeps a single worker for each name of a placement. A function travels with its
// caller's thread-local state, random scope and streams. Its thread restores its own afterwards. A thread
// that is stuck cannot be stopped: a new thread takes its place, and the worker itself stays. Threads are
// started and stopped without the lock, since both may take long.
#include "cohort/parallel/placement_worker.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/ThreadLocalState.h>
#include <ATen/autocast_mode.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "cohort/base/error.h"
#include "cohort/base/log.h"
#include "cohort/core/device.h"
#include "cohort/core/random_scope.h"
#include "cohort/core/thread_settings.h"

namespace cohort::parallel {
namespace placement_detail {

struct CallerState::Impl {
  // The state says that a core::RandomScope is open, and these are what it draws from.
  bool is_in_scope() const { return generator.defined() || global != at::detail::getDefaultCPUGenerator(); }

  at::ThreadLocalState state;
  bool caches_casts = at::autocast::is_autocast_cache_enabled();  // LibTorch's state lacks this one
  at::Generator generator = core::RandomScope::current(), global = core::RandomScope::global();
  std::optional<c10::Stream> own;  // of the worker's device
  std::vector<c10::Stream> all;    // of every GPU
};

// Note [Streams between placements]
// What one placement has computed is copied on the thread of another: from a GPU to the next one, or to the
// CPU. A copy is ordered after what the current stream of its source does, so the thread must have, for each
// GPU, the stream that the caller has, on which all placements compute.
CallerState::CallerState(c10::Device device) : impl_(std::make_unique<Impl>()) {
  if (!device.is_cpu()) impl_->own = c10::impl::VirtualGuardImpl(device.type()).getStream(device);
  if (!c10::impl::hasDeviceGuardImpl(c10::kCUDA)) return;
  const c10::impl::VirtualGuardImpl cuda(c10::kCUDA);
  for (c10::DeviceIndex i = 0; i < cuda.deviceCount(); ++i) {
    impl_->all.push_back(cuda.getStream(c10::Device(c10::kCUDA, i)));
  }
}
CallerState::~CallerState() = default;
CallerState::CallerState(CallerState&&) noexcept = default;

struct CallerState::Scope::Impl {
  explicit Impl(const CallerState::Impl& given)
      : state(given.state), cached_casts_before(at::autocast::is_autocast_cache_enabled()) {
    at::autocast::set_autocast_cache_enabled(given.caches_casts);
    for (const c10::Stream& stream : given.all) before.push_back(cuda().exchangeStream(stream));
    if (given.own) own.emplace(*given.own);  // its device too
    if (given.is_in_scope()) random.emplace(given.generator, given.global);
  }
  ~Impl() {
    own.reset();
    for (auto each = before.rbegin(); each != before.rend(); ++each) cuda().exchangeStream(*each);
    at::autocast::set_autocast_cache_enabled(cached_casts_before);
  }
  Impl(const Impl&) = delete;
  Impl& operator=(const Impl&) = delete;
  static c10::impl::VirtualGuardImpl cuda() { return c10::impl::VirtualGuardImpl(c10::kCUDA); }

  at::ThreadLocalStateGuard state;
  bool cached_casts_before;
  std::vector<c10::Stream> before;
  std::optional<c10::StreamGuard> own;
  std::optional<core::RandomScope> random;
};

CallerState::Scope::Scope(const CallerState& state) : impl_(std::make_unique<Impl>(*state.impl_)) {}
CallerState::Scope::~Scope() = default;

}  // namespace placement_detail

namespace {

struct Registry {
  std::mutex mutex;
  std::map<std::string, std::weak_ptr<PlacementWorker>> workers;
};

Registry& worker_registry() {
  static Registry& instance = *new Registry;  // leaked: workers may outlive statics
  return instance;
}

}  // namespace

PlacementWorker::PlacementWorker(const base::Placement& placement)
    : placement_(placement),
      device_(core::device_of(placement)),
      intra_op_threads_(
          placement.is_cpu() ? std::max(1, std::min(placement.cpus.size(), base::usable_cores())) : 1),
      thread_(start()) {}

std::shared_ptr<base::SerialQueue> PlacementWorker::start() const {
  return std::make_shared<base::SerialQueue>(base::SerialQueue::Options{
      .name = placement_.name,
      .cpus = placement_.cpus,
      .start = [threads = intra_op_threads_] { core::set_num_threads_this_thread(threads); },
  });
}

std::shared_ptr<PlacementWorker> PlacementWorker::of(const base::Placement& placement) {
  Registry& all = worker_registry();
  const std::lock_guard lock(all.mutex);
  std::weak_ptr<PlacementWorker>& known = all.workers[placement.name];
  if (auto worker = known.lock()) return worker;
  std::shared_ptr<PlacementWorker> worker(new PlacementWorker(placement));
  for (const auto& [name, other] : all.workers) {
    const auto alive = other.lock();
    if (!alive || !placement.is_cpu() || !alive->placement().is_cpu()) continue;
    if (!placement.cpus.intersects(alive->placement().cpus)) continue;
    base::warn_once("parallel.placements_share_cores",
                    base::concat("placements ", name, " and ", placement.name,
                                 " share a core: a thread each, which take turns there"));
  }
  known = worker;
  return worker;
}

int PlacementWorker::num_queued() const {
  const std::lock_guard lock(mutex_);
  return thread_->num_queued();
}

bool PlacementWorker::is_current() const {
  const std::lock_guard lock(mutex_);
  return thread_->is_current();
}

// Returns with the lock, under which no other caller replaces the thread. A start may take long, and a stop
// destroys functions that the thread has not begun: both are made without it.
std::unique_lock<std::mutex> PlacementWorker::replace_if_stuck() {
  std::unique_lock lock(mutex_);
  while (thread_->is_stuck()) {
    const std::shared_ptr<base::SerialQueue> stuck = thread_;
    lock.unlock();
    std::shared_ptr<base::SerialQueue> next = start();
    lock.lock();
    const bool is_needed = thread_ == stuck && stuck->is_stuck();  // else it came back, or another was first
    if (is_needed) std::swap(thread_, next);
    lock.unlock();
    if (is_needed) {
      stuck->stop(std::chrono::milliseconds(0));
      base::log_warning(
          base::concat("placement ", placement_.name,
                       " gets a new thread: the one that it had is stuck in what it was given"));
    }
    next.reset();
    lock.lock();
  }
  return lock;
}

PlacementThreads::PlacementThreads(const std::vector<base::Placement>& placements) {
  for (const base::Placement& placement : placements) {
    workers_.push_back(PlacementWorker::of(placement));
    ids_.push_back(workers_.back()->run("who", [] { return std::this_thread::get_id(); }));
  }
}

}  // namespace cohort::parallel
