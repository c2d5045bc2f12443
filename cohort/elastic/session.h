#pragma once

#include <ATen/core/Tensor.h>

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "cohort/base/error.h"
#include "cohort/base/threads/deadline.h"
#include "cohort/comm/group.h"
#include "cohort/parallel/virtual_ranks/slice_exchange.h"

/// A process of an elastic run: which generation it is in, and how it gets the state that it lacks.
namespace cohort::elastic {

/// The processes that a step was made with are no longer those of the run: nobody finishes the step, and the
/// state is that of before it. What waits for another process throws it, within milliseconds of the news.
class GenerationEnded : public CommError {
 public:
  using CommError::CommError;
};

/// The run is over for this process: it has ended, or the process has left it with its node (as one that has
/// succeeded). Session::finish() throws it only where the run has failed.
class RunEnded : public CommError {
 public:
  RunEnded(bool has_succeeded, const std::string& cause, int stop_signal = 0)
      : CommError("elastic.session", base::concat("the run has ended", cause.empty() ? "" : ": ", cause),
                  has_succeeded ? "" : "the same command again: it resumes from the last checkpoint"),
        has_succeeded_(has_succeeded),
        stop_signal_(stop_signal) {}
  /// A process that was in no generation at the end has nothing to do, and no fault.
  bool has_succeeded() const { return has_succeeded_; }
  /// The signal that has stopped the run before its last step, after which processes end with 128 + its
  /// number; 0: none has.
  int stop_signal() const { return stop_signal_; }

 private:
  bool has_succeeded_;
  int stop_signal_;
};

/// What may be set of a session.
struct SessionOptions {
  /// Of each wait for another process that lives: above the longest step. The link to a process from which
  /// nothing has come by then counts as lost: the agents make a generation with new links, or without it.
  std::chrono::milliseconds timeout{600'000};
  /// Bytes of the state that are asked for at once.
  std::uint64_t chunk_bytes = std::uint64_t{4} << 20;

  bool operator==(const SessionOptions&) const = default;
};

/// A group of the processes of a generation.
struct GroupOptions {
  /// As comm::InitOptions, for tensors on the CPU: nothing could end a call on a GPU.
  std::string backend = "auto";
  /// Of making it, and of its calls that name no other; 0: SessionOptions::timeout. A process for which they
  /// have waited so long counts as lost, as there. A call that names one throws comm's TimeoutError.
  std::chrono::milliseconds timeout{0};
  comm::ConsistencyCheck check_consistency = comm::ConsistencyCheck::kFirst;
};

/// All that a process needs to make the next step. The tensors have the same bits on each process after the
/// same step.
struct StateSnapshot {
  /// Counters, rates and the like; it comes from one process, also where several have the state.
  std::string text;
  /// Contiguous, on the CPU or a device; aliases of the process's own where it can be.
  std::vector<at::Tensor> tensors;
  /// By tensor: whether it changes between begin_changes() and commit() alone, as parameters do, and running
  /// statistics do not. Such a tensor moves, once, to memory that outlives the process; the others are copied
  /// there at each commit. Empty: the state dies with the process. It is shared with processes that fork()
  /// makes.
  std::vector<bool> in_place = {};
};

/// Where a session takes a process's state from, and puts that of another process.
struct StateAccess {
  /// Called at each commit, too.
  std::function<StateSnapshot()> save;
  /// Of another process: what its save() gave. Where all tensors were as this process's own in number, sizes,
  /// strides and types, and lie on the CPU, they are those that save() gave here, already written.
  std::function<void(const StateSnapshot& state)> load;
};

/// A generation as one of its processes sees it.
struct GenerationInfo {
  std::uint64_t generation = 0;
  int process = 0, num_processes = 1;  ///< process 0 writes what is written once
  std::uint64_t steps = 0;             ///< that are committed: the next step to make
  bool has_copied = false;  ///< the state came from another process, or from the one before in its place
  std::string origin = {};  ///< the same on all processes of the run; another run has another one
};

/// The run as a process sees it. elastic::run (run.h) is the loop below, with VirtualRankSync::commit_step()
/// and abandon_step(). A process has one session, and one run with it. Threads: one caller.
///
///     session->set_state({.save = ..., .load = ...});
///     elastic::GenerationInfo info = session->enter(0);              // blocks until there is a generation
///     while (info.steps < total) {
///       try {
///         if (session->must_enter()) info = session->enter(info.steps);
///         make_step(info.steps, *session->exchange());   // throws GenerationEnded: nothing has changed
///         session->commit(++info.steps);
///       } catch (const elastic::GenerationEnded&) {
///         info = session->enter(info.steps);
///       }
///     }
///     session->finish();
class Session {
 public:
  virtual ~Session() = default;
  virtual int virtual_ranks() const = 0;
  /// Where the state is. Before enter().
  virtual void set_state(StateAccess state) = 0;
  /// Enters the newest generation with so many committed steps, and has the newest state when it returns.
  /// Where generations end meanwhile it enters the next one. Before the first step all have the state of one
  /// process. Blocks until there is a generation that this process is in. Throws: RunEnded; CommError where
  /// the agent is gone, or where processes have different states after the same step; TimeoutError where the
  /// generation's store did not answer; UsageError where the processor has other instructions than that of
  /// the run's first process, and for a second run.
  virtual GenerationInfo enter(std::uint64_t committed_steps) = 0;
  /// Whether no step can be made in this generation: there is another one to enter, or will be, as a process
  /// is lost. Between two steps. Does not wait.
  virtual bool must_enter() const = 0;
  /// The same, but false for a planned change while all processes of this generation are in it: what they do
  /// together between two steps, as an evaluation, may be ended first. Does not wait.
  virtual bool must_leave() const { return must_enter(); }
  /// Of the generation that this process is in. Its begin_step() says that a step begins, which a change may
  /// drop. Its transfers throw GenerationEnded. Tensors that were given to a transfer that has thrown must
  /// not be written any more: another process may still read them.
  virtual std::shared_ptr<parallel::SliceExchange> exchange() const = 0;
  /// Returns a group of this generation's processes, for metrics and evaluations of the user's own: process p
  /// is rank p. It ends with the generation: its calls throw GenerationEnded from then on, also those that
  /// wait, and the next generation needs another group. Each process makes its groups in the same order. It
  /// calls them in a step, before begin_changes(): an evaluation too. Between two steps a call may end on one
  /// process and fail on another one. In the next generation only that one would repeat it, as no step is
  /// made again, and their calls would not match. A process in finish() makes no group, so nobody makes one
  /// after the last step. Sums depend on the number of processes, so they must not get into the state:
  /// exchange() is for that. A group may outlast the session. What gloo sends is neither encrypted nor
  /// authenticated.
  ///
  ///     comm::Group group;
  ///     options.on_enter = [&](const elastic::GenerationInfo&) { group = elastic::make_group(session); };
  ///     ...                                       // in a step, before context.begin_changes():
  ///     group.all_reduce(loss).wait();
  ///
  /// Collective over the generation's processes. Blocks until all have come. Throws: GenerationEnded,
  /// RunEnded; as comm::init_process_group(); UsageError before enter(), and after it has failed in this
  /// generation: others may have made that group, and number the next one in another way.
  virtual comm::Group make_group(const GroupOptions& options);
  /// Returns a key-value store of this generation. Its requests throw GenerationEnded once the generation has
  /// ended. A c10d::ProcessGroup over it does not end. make_group(...).process_group() does, by errors of its
  /// backend: comm::fail_call() throws GenerationEnded for one. Blocks, and throws: as make_group().
  virtual c10::intrusive_ptr<c10d::Store> store();
  /// The state is being changed from here on: it is of no use to others until commit().
  virtual void begin_changes() = 0;
  /// The state is that after so many steps. A process that follows this one in its place, when it has died,
  /// continues from here, where nothing has changed the state since.
  virtual void commit(std::uint64_t steps) = 0;
  /// A signal has stopped the run on all processes of the generation, which have saved: agents end with 128 +
  /// its number, also those that have no part. Before finish(). Does nothing, as a rule.
  virtual void set_stop_signal(int /*signal*/) {}
  /// All steps are made. Stays in the run, so that others can have the state, until it has ended. Where
  /// processes change meanwhile it enters further generations: save() is called, and load() where this
  /// process's last state was not complete. Throws: as enter(), but not where the run has succeeded. Returns
  /// its place at the end: process 0 writes what another one may not have written any more.
  virtual GenerationInfo finish() = 0;
};

/// The same for a process that may be alone: it is its group's only one where the session is null.
comm::Group make_group(const std::shared_ptr<Session>& session, const GroupOptions& options = {});

/// The session with the agent that has started this process (`cohort run --elastic`), or null where none has.
/// Throws: UsageError where the process's session is destroyed already.
std::shared_ptr<Session> session_of_process();
/// The same with options. Throws: UsageError also where the process has its session with other ones.
std::shared_ptr<Session> session_of_process(const SessionOptions& options);

}  // namespace cohort::elastic
