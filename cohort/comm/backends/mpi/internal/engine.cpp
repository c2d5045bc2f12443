// The engine's thread runs a loop. It takes new calls, tests the requests of each call that runs, and begins
// the next step where they are done. Then it looks at deadlines, and pauses the longer the less moves.
// Always: only the making of a group blocks. MPI cannot continue after a late call, so MPI_Abort ends the job
// some seconds after one.
#include "cohort/comm/backends/mpi/internal/engine.h"

#include <mpi.h>
#include <sched.h>
#include <unistd.h>

#include <cstdint>
#include <memory>
#include <random>
#include <thread>
#include <utility>

#include "cohort/base/error.h"
#include "cohort/base/log.h"
#include "cohort/base/threads/future.h"
#include "cohort/base/threads/wait.h"

namespace cohort::comm::mpi {
namespace {

using std::chrono::milliseconds;

// Starts MPI, or joins one that the program has started. Throws: as Engine::start.
Process begin_process() {
  Process process;
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
    process.is_owner = true;
  }
  check(MPI_Comm_rank(MPI_COMM_WORLD, &process.rank), "MPI_Comm_rank");
  check(MPI_Comm_size(MPI_COMM_WORLD, &process.size), "MPI_Comm_size");
  int* tag = nullptr;
  int found = 0;
  if (MPI_Comm_get_attr(MPI_COMM_WORLD, MPI_TAG_UB, static_cast<void*>(&tag), &found) == MPI_SUCCESS &&
      found != 0) {
    process.largest_tag = *tag;
  }
  // Rank 0's random number names the job: ranks of two mpiruns may share one store.
  std::random_device random;
  process.job = (std::uint64_t{random()} << 32) | random();
  check(MPI_Bcast(&process.job, sizeof(process.job), MPI_BYTE, 0, MPI_COMM_WORLD), "MPI_Bcast");
  return process;
}

}  // namespace

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
  process_ = begin_process();
  // A child that fork() made has the handler too, and no thread of the engine.
  static Engine* const self = this;
  static const pid_t process = ::getpid();
  if (process_.is_owner) {
    ::on_exit(
        [](int status, void*) {
          if (::getpid() == process) self->at_exit(status);
        },
        nullptr);
  }
}

void Engine::run(std::function<void()> task, base::Deadline deadline, const char* what) {
  const auto promise = std::make_shared<base::Promise<void>>(what);
  base::Future<void> done = promise->future();
  inbox_.add_blocking_task([promise, task = std::move(task)] { promise->run(task); });
  if (!done.wait(deadline)) {
    // The task may block the engine's thread for ever, so at exit nobody may wait for MPI_Finalize.
    failed_ = true;
    deadline.check("comm.mpi", what);
  }
  done.get(deadline);
}

void Engine::loop() {
  while (true) {
    bool has_moved = take_new();
    has_moved = progress_.advance() || has_moved;
    has_moved = run_blocking() || has_moved;
    progress_.end_late_calls();
    if (progress_.must_abort()) end_job(progress_.abort_reason());
    if (inbox_.is_stopping()) break;
    pause(has_moved);
  }
  finalize();
}

bool Engine::take_new() {
  Inbox::News news = inbox_.take();
  for (const auto& task : news.tasks) task();
  for (MpiWorkPtr& call : news.calls) progress_.add(std::move(call));
  return !news.calls.empty() || !news.tasks.empty();
}

// True when one has run.
bool Engine::run_blocking() {
  if (progress_.has_collectives()) return false;
  const Inbox::Task task = inbox_.take_blocking_task();
  if (task == nullptr) return false;
  task();
  return true;
}

// Spins while something is likely to come soon, and sleeps the longer the less it is. MPI moves only while it
// is called, so it is called now and then though nothing is asked of it: others may wait for what it holds.
void Engine::pause(bool has_moved) {
  const std::chrono::microseconds most = progress_.pause_time(has_moved);
  if (progress_.is_empty() && process_.is_owner) {
    int found = 0;
    MPI_Iprobe(MPI_ANY_SOURCE, MPI_ANY_TAG, MPI_COMM_WORLD, &found, MPI_STATUS_IGNORE);
  }
  if (most.count() == 0) {
    ::sched_yield();
  } else {
    inbox_.wait(most);
  }
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
  inbox_.stop(kAbortGrace, !failed_);
}

void Engine::finalize() {
  const std::string& reason = progress_.abort_reason();
  if (failed_) end_job(reason.empty() ? "a call has failed before" : reason);
  // MPI_Finalize waits without a limit. So the ranks first make a barrier that this rank can give up.
  const milliseconds exit_timeout = inbox_.exit_timeout();
  const base::Deadline deadline(exit_timeout);
  MPI_Request request = MPI_REQUEST_NULL;
  int done = MPI_Ibarrier(MPI_COMM_WORLD, &request) == MPI_SUCCESS ? 0 : 1;
  while (done == 0) {
    if (MPI_Test(&request, &done, MPI_STATUS_IGNORE) != MPI_SUCCESS) break;
    if (deadline.expired()) {
      end_job(base::concat("rank ", process_.rank, " of ", process_.size, " has ended well and waited ",
                           exit_timeout.count(), " ms for others to end"));
    }
    if (done == 0) base::sleep(milliseconds(1), deadline);
  }
  MPI_Finalize();
  inbox_.close();
}

}  // namespace cohort::comm::mpi
