// The engine's thread runs a loop. It takes new calls, tests the requests of each call that runs, and begins
// the next step where they are done. Then it looks at deadlines, and pauses the longer the less moves.
// Always: no step blocks, so each call's deadline is seen in time; only the making of a group blocks. Calls
// of an OrderedQueue run in the order in which they came. A failed call stays at the front of its queue, so
// that none after it runs. MPI cannot continue after a late call: that fails at once, and MPI_Abort ends the
// job some seconds later.
#include "cohort/comm/backends/mpi/internal/engine.h"

#include <sched.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <random>
#include <thread>

#include "cohort/base/error.h"
#include "cohort/base/log.h"
#include "cohort/base/threads/future.h"
#include "cohort/base/threads/wait.h"

namespace cohort::comm::mpi {
namespace {

using std::chrono::milliseconds;

// A late call fails at once, and the job ends this much later: the program may say more than the engine can,
// which ranks did not come and what they were doing. With a sanitizer it is slower to say so.
#ifdef COHORT_IS_SANITIZED
constexpr milliseconds kGrace(25'000);
#else
constexpr milliseconds kGrace(5000);
#endif
constexpr milliseconds kEndTime(300);  // for the engine to end a call, unless MPI does not come back to it

milliseconds time_left(base::Deadline deadline) {
  return milliseconds(deadline.remaining_ms());
}

std::string text_of(const at::Tensor& tensor) {
  return base::concat(tensor.dtype().name(), tensor.sizes());
}

}  // namespace

void check(int code, const char* function) {
  if (code == MPI_SUCCESS) return;
  std::array<char, MPI_MAX_ERROR_STRING + 1> words{};
  int size = 0;
  MPI_Error_string(code, words.data(), &size);
  throw std::runtime_error(base::concat(function, " failed: ", words.data()));
}

std::byte* OrderedQueue::scratch(std::size_t size) {
  if (size > bytes) {
    memory.reset();
    memory.reset(new std::byte[size]);
    bytes = size;
  }
  return memory.get();
}

MpiWork::MpiWork(CpuCall call, CallGroup group, std::vector<Step> steps, std::shared_ptr<OrderedQueue> queue)
    : CpuWork(group.rank, call.op_type, call.outputs),
      call_(std::move(call)),
      group_(std::move(group)),
      steps_(std::move(steps)),
      deadline_(call_.timeout),
      queue_(std::move(queue)) {}

bool MpiWork::wait(milliseconds timeout) {
  std::unique_lock lock(mutex_);
  const auto over = [&] { return completed_; };
  if (timeout == kNoTimeout) timeout = time_left(deadline_);
  if (!base::wait(cv_, lock, over, base::Deadline(timeout))) {
    is_cut_short_ = true;
    if (!base::wait(cv_, lock, over, base::Deadline(kEndTime))) {
      throw std::runtime_error(base::concat(describe(), " timed out, and MPI does not come back"));
    }
  }
  if (exception_) std::rethrow_exception(exception_);
  return true;
}

std::string MpiWork::describe() const {
  const Tensors& tensors = results_.empty() ? call_.inputs : results_;
  std::string shapes;
  for (std::size_t i = 0; i < std::min<std::size_t>(tensors.size(), 3); ++i) {
    shapes += base::concat(", ", text_of(tensors[i]));
  }
  if (tensors.size() > 3) shapes += base::concat(" and ", tensors.size() - 3, " more");
  return base::concat(name_of(call_.type), ", call ", call_.number, " of group '", group_.name, "' (rank ",
                      group_.rank, "/", group_.size, shapes, ")");
}

// Returns whether all requests of the step are done. A message of another size than expected is an error:
// MPI reports only one that is too long.
bool MpiWork::has_arrived() {
  std::vector<MPI_Request>& requests = pending_.requests;
  statuses_.resize(requests.size());
  int done = 0;
  const int code = MPI_Testall(static_cast<int>(requests.size()), requests.data(), &done, statuses_.data());
  if (code == MPI_ERR_IN_STATUS) {
    for (const MPI_Status& status : statuses_) {
      if (status.MPI_ERROR != MPI_ERR_PENDING) check(status.MPI_ERROR, name_of(call_.type));
    }
  }
  check(code, name_of(call_.type));
  if (done == 0) return false;
  for (std::size_t i = 0; i < requests.size(); ++i) {
    if (pending_.expected[i] < 0) continue;
    int bytes = 0;
    MPI_Get_count(&statuses_[i], MPI_BYTE, &bytes);
    source_ = statuses_[i].MPI_SOURCE;
    if (bytes == pending_.expected[i]) continue;
    throw std::runtime_error(base::concat(describe(), ": got ", bytes, " bytes from rank ", source_.load(),
                                          ", expected ", pending_.expected[i]));
  }
  return true;
}

// Steps without requests, such as additions, run one after the other without a return to the loop.
bool MpiWork::advance() {
  while (pending_.requests.empty() || has_arrived()) {
    pending_ = {};
    if (next_ == steps_.size()) return true;
    steps_[next_++](pending_);
  }
  return false;
}

void MpiWork::end(std::exception_ptr error) {
  call_.profiled.reset();
  if (!error) {
    steps_.clear();
    Tensors inputs;
    const std::lock_guard lock(mutex_);  // describe() reads them in wait()
    inputs.swap(call_.inputs);
  }
  CpuWork::end(error);
}

Engine& Engine::start(base::Deadline deadline) {
  static std::mutex mutex;
  static Engine* engine = nullptr;
  static base::Future<void> ready;
  const std::lock_guard lock(mutex);
  if (engine == nullptr) {
    // It is leaked on purpose: its thread may sit in MPI when the process ends.
    engine = new Engine;
    base::Promise<void> begun("MPI_Init");
    ready = begun.future();
    std::thread([begun = std::move(begun)]() mutable {
      try {
        engine->begin();
        begun.set();
      } catch (...) {
        begun.set_error(std::current_exception());
        return;
      }
      engine->loop();
    }).detach();
  }
  if (!ready.wait(deadline)) {
    deadline.check("comm.mpi", "MPI_Init, which waits until all processes that mpirun has started call it",
                   "look at those that do not");
  }
  base::Future<void>(ready).get(deadline);  // an error comes out at each call
  return *engine;
}

void Engine::begin() {
  int running = 0, level = MPI_THREAD_SINGLE;
  check(MPI_Initialized(&running), "MPI_Initialized");
  if (running != 0) {
    check(MPI_Query_thread(&level), "MPI_Query_thread");
    if (level != MPI_THREAD_MULTIPLE) {
      throw UsageError("comm.mpi", "the program has started MPI for its own threads only",
                       "MPI_Init_thread(..., MPI_THREAD_MULTIPLE, ...), or leave starting MPI to Cohort");
    }
  } else {
    check(MPI_Init_thread(nullptr, nullptr, MPI_THREAD_FUNNELED, &level), "MPI_Init_thread");
    if (level < MPI_THREAD_FUNNELED) {
      throw UsageError("comm.mpi", "this MPI cannot be used by programs with threads", "backend gloo");
    }
    MPI_Comm_set_errhandler(MPI_COMM_WORLD, MPI_ERRORS_RETURN);
    owner_ = true;
  }
  check(MPI_Comm_rank(MPI_COMM_WORLD, &rank_), "MPI_Comm_rank");
  check(MPI_Comm_size(MPI_COMM_WORLD, &size_), "MPI_Comm_size");
  int* tag = nullptr;
  int found = 0;
  if (MPI_Comm_get_attr(MPI_COMM_WORLD, MPI_TAG_UB, static_cast<void*>(&tag), &found) == MPI_SUCCESS &&
      found != 0) {
    largest_tag_ = *tag;
  }
  // Rank 0's random number names the job: ranks of two mpiruns may share one store.
  std::random_device random;
  job_ = (std::uint64_t{random()} << 32) | random();
  check(MPI_Bcast(&job_, sizeof(job_), MPI_BYTE, 0, MPI_COMM_WORLD), "MPI_Bcast");
  // A child that fork() made has the handler too, and no thread of the engine.
  static Engine* const self = this;
  static const pid_t process = ::getpid();
  if (owner_) {
    ::on_exit(
        [](int status, void*) {
          if (::getpid() == process) self->at_exit(status);
        },
        nullptr);
  }
}

void Engine::submit(MpiWorkPtr call) {
  {
    const std::lock_guard lock(mutex_);
    new_calls_.push_back(std::move(call));
  }
  changed_.notify_one();
}

void Engine::run(std::function<void()> task, base::Deadline deadline, const char* what) {
  const auto promise = std::make_shared<base::Promise<void>>(what);
  base::Future<void> done = promise->future();
  {
    const std::lock_guard lock(mutex_);
    if (!over_) blocking_tasks_.emplace_back([promise, task = std::move(task)] { promise->run(task); });
  }
  changed_.notify_one();
  if (!done.wait(deadline)) {
    // The task may block the engine's thread for ever, so at exit nobody may wait for MPI_Finalize.
    failed_ = true;
    deadline.check("comm.mpi", what);
  }
  done.get(deadline);
}

void Engine::post(std::function<void()> task) {
  {
    const std::lock_guard lock(mutex_);
    if (over_) return;
    tasks_.push_back(std::move(task));
  }
  changed_.notify_one();
}

void Engine::set_exit_timeout(milliseconds timeout) {
  const std::lock_guard lock(mutex_);
  exit_timeout_ = std::max(exit_timeout_, timeout);
}

void Engine::loop() {
  last_moved_ = base::Deadline::Clock::now();
  while (true) {
    bool moved = take_new();
    moved = advance_calls() || moved;
    moved = run_blocking() || moved;
    check_deadlines();
    {
      const std::lock_guard lock(mutex_);
      if (stopping_) break;
    }
    pause(moved);
  }
  finalize();
}

bool Engine::take_new() {
  std::vector<MpiWorkPtr> calls;
  std::vector<std::function<void()>> tasks;
  {
    const std::lock_guard lock(mutex_);
    calls.swap(new_calls_);
    tasks.swap(tasks_);
  }
  for (const auto& task : tasks) task();
  for (MpiWorkPtr& call : calls) {
    if (call->queue_ != nullptr) call->queue_->calls.push_back(call.get());
    running_.push_back(std::move(call));
  }
  return !calls.empty() || !tasks.empty();
}

// True when one has run.
bool Engine::run_blocking() {
  const bool has_collectives = std::ranges::any_of(
      running_, [](const MpiWorkPtr& call) { return call->queue_ != nullptr && !call->isCompleted(); });
  std::function<void()> task;
  {
    const std::lock_guard lock(mutex_);
    // A collective that was begun before the task may not have been taken yet.
    if (has_collectives || !new_calls_.empty() || blocking_tasks_.empty()) return false;
    task = std::move(blocking_tasks_.front());
    blocking_tasks_.erase(blocking_tasks_.begin());
  }
  task();
  return true;
}

// True when a call has ended.
bool Engine::advance_calls() {
  std::vector<MpiWorkPtr> over;
  for (MpiWorkPtr& call : running_) {
    if (call->isCompleted()) continue;  // it failed: its requests may be under way for ever
    OrderedQueue* const queue = call->queue_.get();
    if (queue != nullptr && queue->calls.front() != call.get()) continue;
    try {
      if (!call->advance()) continue;
    } catch (...) {
      failed_ = true;  // and stays at the front of its queue
      call->end(std::current_exception());
      continue;
    }
    if (queue != nullptr) queue->calls.pop_front();
    over.push_back(std::move(call));
  }
  if (over.empty()) return false;
  std::erase(running_, nullptr);
  for (const MpiWorkPtr& call : over) call->end(nullptr);
  return true;
}

void Engine::check_deadlines() {
  for (const MpiWorkPtr& call : running_) {
    if (!call->isCompleted() && call->is_late()) end_late(*call);
  }
  if (abort_at_ && abort_at_->expired()) end_job(abort_because_);
}

void Engine::end_late(MpiWork& call) {
  const auto waited = std::chrono::duration_cast<milliseconds>(call.deadline_.elapsed()).count();
  const std::string what =
      base::concat(call.describe(), " timed out after ", waited, " ms: not all ranks have joined it");
  base::log_error(base::concat("[comm.mpi] ", what,
                               ". MPI cannot continue after that: the job ends by MPI_Abort within ",
                               kGrace.count() / 1000, " s"));
  failed_ = true;
  // The first late call is named as the cause: what is late after it often waited for it.
  if (!abort_at_) {
    abort_at_ = base::Deadline(kGrace);
    abort_because_ = what;
  }
  call.end(std::make_exception_ptr(std::runtime_error(what)));
}

// Spins while something is likely to come soon, and sleeps the longer the less it is. MPI moves only while it
// is called, so it is called now and then though nothing is asked of it: others may wait for what it holds.
void Engine::pause(bool moved) {
  using namespace std::chrono_literals;
  const auto now = base::Deadline::Clock::now();
  if (moved) last_moved_ = now;
  const auto quiet = now - last_moved_;
  if (running_.empty() && owner_) {
    int found = 0;
    MPI_Iprobe(MPI_ANY_SOURCE, MPI_ANY_TAG, MPI_COMM_WORLD, &found, MPI_STATUS_IGNORE);
  }
  if (!running_.empty() && quiet < 2ms) {
    ::sched_yield();
    return;
  }
  std::unique_lock lock(mutex_);
  const auto asked = [&] {
    return !new_calls_.empty() || !tasks_.empty() || !blocking_tasks_.empty() || stopping_;
  };
  const std::chrono::microseconds most = running_.empty() ? 10ms
                                         : quiet < 100ms  ? std::chrono::microseconds(50)
                                                          : 1ms;
  base::wait(changed_, lock, asked, base::Deadline(most));
}

void Engine::end_job(const std::string& why) {
  base::log_error(base::concat("[comm.mpi] MPI_Abort: ", why));
  MPI_Abort(MPI_COMM_WORLD, 1);
  ::_exit(1);
}

void Engine::at_exit(int status) {
  // A rank that failed leaves without MPI_Finalize: that would wait for ranks that are in the middle of
  // something, where mpirun ends them.
  if (status != 0 && !failed_) return;
  std::unique_lock lock(mutex_);
  stopping_ = true;
  changed_.notify_one();
  base::wait(ended_, lock, [&] { return over_; }, base::Deadline(failed_ ? kGrace : exit_timeout_ + kGrace));
}

void Engine::finalize() {
  if (failed_) end_job(abort_because_.empty() ? "a call has failed before" : abort_because_);
  milliseconds exit_timeout{0};
  {
    const std::lock_guard lock(mutex_);
    exit_timeout = exit_timeout_;
  }
  // MPI_Finalize waits without a limit. So the ranks first make a barrier that this rank can give up.
  const base::Deadline deadline(exit_timeout);
  MPI_Request request = MPI_REQUEST_NULL;
  int done = MPI_Ibarrier(MPI_COMM_WORLD, &request) == MPI_SUCCESS ? 0 : 1;
  while (done == 0) {
    if (MPI_Test(&request, &done, MPI_STATUS_IGNORE) != MPI_SUCCESS) break;
    if (deadline.expired()) {
      end_job(base::concat("rank ", rank_, " of ", size_, " has ended well and waited ", exit_timeout.count(),
                           " ms for others to end"));
    }
    if (done == 0) base::sleep(milliseconds(1), deadline);
  }
  MPI_Finalize();
  {
    const std::lock_guard lock(mutex_);
    over_ = true;
  }
  ended_.notify_all();
}

}  // namespace cohort::comm::mpi
