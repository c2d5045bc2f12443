// An attempt starts the ranks and watches them. A failure, a signal, or word from another node ends them all.
// Then the nodes agree: each posts what came of it, node 0 joins the reports, and its result holds for all.
// Always: node 0 alone decides on a restart, so either all nodes start the ranks again or none does. Ranks
// are told once in an attempt to end, and get one time of grace. The loop waits neither for the store nor for
// who reads the output, so a node whose store or terminal hangs still ends its ranks.
#include "cohort/launch/internal/agent.h"

#include <limits.h>
#include <poll.h>
#include <signal.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <charconv>
#include <utility>

#include "cohort/base/error.h"
#include "cohort/base/log.h"
#include "cohort/base/signals.h"
#include "cohort/base/text/format_list.h"
#include "cohort/base/threads/wait.h"

namespace cohort::launch {
namespace {

using base::concat;
using std::chrono::milliseconds;
using std::chrono::seconds;

constexpr auto kFlushTime = std::chrono::minutes(10);  // a reader such as less may take its time
constexpr auto kSeenTime = seconds(10);

std::string named(int number) {
  return concat("signal ", number, " (", ::strsignal(number), ")");
}

// The signal that another agent says has asked to stop: one of those that this agent takes, else SIGTERM, as
// nodes may have other --signals-to-handle. 0 where the word, which came over the network, names none that
// an agent could have taken.
int signal_in(const std::string& word, const std::vector<int>& taken) {
  int number = 0;
  const char* const end = word.data() + word.size();
  const auto [next, error] = std::from_chars(word.data(), end, number);
  if (error != std::errc() || next != end || number < 1 || number >= SIGRTMIN) return 0;
  for (const int never : {SIGKILL, SIGSTOP, SIGUSR1, SIGUSR2, SIGTSTP}) {
    if (number == never) return 0;
  }
  return std::ranges::find(taken, number) != taken.end() ? number : SIGTERM;
}

bool is_file(int fd) {
  struct stat info {};
  return ::fstat(fd, &info) == 0 && S_ISREG(info.st_mode);
}

}  // namespace

Agent::Agent(const RunOptions& options, const WorkerGroupSpec& place, const AgentParts& parts)
    : options_(options),
      place_(place),
      folder_(parts.folder),
      watchdog_(parts.watchdog),
      signals_(parts.signals),
      store_client_(parts.store_client) {
  place_.secret_fd = parts.secret_fd;
}

int Agent::run() {
  if (folder_.stays()) {
    log_line(base::LogLevel::kInfo, concat("output of ranks is kept in ", folder_.path().string()));
  }
  AttemptReport exit_result;
  try {
    if (store_client_ != nullptr) {
      store_client_->watch("signal");
      store_client_->watch("abort");
    }
    for (int number = 0;; ++number) {
      exit_result = attempt(number);
      report_exit(exit_result);
      if (!exit_result.restart) break;
    }
  } catch (const std::exception& error) {
    console_.flush(base::Deadline(seconds(1)));
    if (store_client_ != nullptr)
      store_client_->post("abort", concat("node ", options_.node_rank, ": ", error.what()));
    throw;
  }
  // Its reader may be slow, but a signal ends the wait.
  console_.flush(base::Deadline(kFlushTime), [&] {
    handle_signals(nullptr);
    return force_kill_ || (signal_ != 0 && exit_result.signal == 0);
  });
  return exit_result.status;
}

AttemptReport Agent::attempt(int number) {
  place_.attempt = number;
  place_.log_folder = folder_.attempt(number);
  ending_ = false;
  grace_ = base::Deadline::never();
  if (store_client_ != nullptr) store_client_->watch(key("fail"));
  if (store_client_ != nullptr) store_client_->busy_until(base::Deadline(kStartTime));
  WorkerGroup workers(options_, place_, display_, watchdog_);
  if (store_client_ != nullptr) store_client_->acknowledge();
  if (signal_ != 0) {  // it came between two attempts
    const int before = std::exchange(signal_, 0);
    stop_by_signal(&workers, before);
  }
  supervise(workers);
  return agree_on_result(outcome_of(workers));
}

// The store client is to be asked often enough who is lost, whatever the interval is.
milliseconds Agent::poll_interval() const {
  return store_client_ == nullptr ? options_.monitor_interval
                                  : std::min(options_.monitor_interval, store_client_->round_time());
}

std::vector<int> Agent::wake_fds() const {
  std::vector<int> fds{signals_.fd()};
  if (store_client_ != nullptr) fds.push_back(store_client_->fd());
  return fds;
}

void Agent::supervise(WorkerGroup& workers) {
  bool killed = false;
  base::Deadline after_kill = base::Deadline::never();
  while (workers.running()) {
    const auto wait = std::min<std::chrono::nanoseconds>(poll_interval(), grace_.remaining());
    workers.step(std::chrono::ceil<milliseconds>(wait), wake_fds());
    // Before failures are looked at: ranks that end by a signal to the job have not failed.
    handle_signals(&workers);
    if (signal_ == 0 && !workers.failures().empty()) stop_by_failure(workers);
    handle_other_nodes(workers);
    if (!killed && (force_kill_ || grace_.expired()) && workers.running()) {
      const std::string late = base::join(workers.running_ranks());
      workers.kill();
      killed = true;
      grace_ = base::Deadline::never();
      // A process that sleeps in the kernel (D in ps) does not die of SIGKILL: an error says so then.
      after_kill = base::Deadline(seconds(30));
      if (!force_kill_) {
        log_line(base::LogLevel::kWarning, concat("local rank ", late, " did not end within ",
                                                  options_.shutdown_timeout.count(), " ms, and is killed"));
      }
    }
    after_kill.check("launch.run",
                     concat("local rank ", base::join(workers.running_ranks()), " to die of SIGKILL"),
                     "look what it waits for in the kernel: /proc/PID/wchan");
  }
}

void Agent::handle_signals(WorkerGroup* workers) {
  while (const int number = signals_.take()) {
    if (number == SIGUSR1 || number == SIGUSR2) {
      if (workers != nullptr) notify(*workers, number);
    } else if (number == SIGTSTP) {
      // Ranks have process groups of their own, which the terminal does not stop.
      if (workers != nullptr) workers->pause();
      ::raise(SIGSTOP);
      if (workers != nullptr) workers->resume();
    } else {
      handle_stop(workers, number);
    }
  }
}

// One request may come several times: a batch system sends it twice, and to each node, which may have heard
// of it from another node before.
void Agent::handle_stop(WorkerGroup* workers, int number) {
  const bool is_same = number == signal_ && (!was_signalled_ || !same_until_.expired());
  if (signal_ == 0) {
    if (store_client_ != nullptr) store_client_->post("signal", std::to_string(number));
    stop_by_signal(workers, number);
  } else if (!is_same) {
    force_kill_ = true;
  }
  // The time counts from here, as the ranks are told meanwhile, which may take long.
  if (!std::exchange(was_signalled_, true)) same_until_ = base::Deadline(base::kSameSignalTime);
}

// All threads of the ranks are looked at, and there may be thousands.
void Agent::notify(WorkerGroup& workers, int number) {
  if (store_client_ != nullptr) store_client_->busy_until(base::Deadline(kStartTime));
  const std::string what = workers.notify(number);
  if (store_client_ != nullptr) store_client_->acknowledge();
  if (!what.empty()) log_line(base::LogLevel::kWarning, what);
}

void Agent::stop_by_signal(WorkerGroup* workers, int number) {
  signal_ = number;
  if (workers == nullptr || ending_) return;
  ending_ = true;
  grace_ = base::Deadline(options_.shutdown_timeout);
  const std::size_t num_ranks = workers->running_ranks().size();
  workers->signal(number);
  log_line(base::LogLevel::kInfo,
           concat(named(number), " is passed on to ", num_ranks, " ranks; they have ",
                  options_.shutdown_timeout.count() / 1000, " s, and a second signal kills them"));
}

void Agent::stop_by_failure(WorkerGroup& workers) {
  if (ending_) return;
  ending_ = true;
  grace_ = base::Deadline(options_.shutdown_timeout);
  if (store_client_ != nullptr) store_client_->post(key("fail"), std::to_string(options_.node_rank));
  workers.stop();
}

// Another node's failure or signal is as our own; one that is lost ends everything.
void Agent::handle_other_nodes(WorkerGroup& workers) {
  if (store_client_ == nullptr) return;
  store_client_->acknowledge();
  if (const int number =
          signal_in(store_client_->received("signal").value_or(""), options_.signals_to_handle);
      number != 0 && signal_ == 0) {
    stop_by_signal(&workers, number);
  }
  const bool failed = store_client_->received(key("fail")) || store_client_->received("abort") ||
                      !store_client_->lost().empty();
  if (failed && !ending_) {
    ending_ = true;
    grace_ = base::Deadline(options_.shutdown_timeout);
    workers.stop();
  }
}

AttemptReport Agent::outcome_of(const WorkerGroup& workers) const {
  AttemptReport report;
  report.signal = signal_;
  report.status = workers.status();
  for (const RankFailure& failure : workers.failures()) {
    // A rank that ended by the job's signal did what it was told.
    if (signal_ == 0 || failure.status != 128 + signal_) report.failures.push_back(failure);
  }
  return report;
}

AttemptReport Agent::exit_result_of(const std::vector<AttemptReport>& reports) const {
  AttemptReport exit_result;
  for (const AttemptReport& report : reports) {
    if (exit_result.signal == 0) exit_result.signal = report.signal;
    if (exit_result.status == 0) exit_result.status = report.status;
    exit_result.failures.insert(exit_result.failures.end(), report.failures.begin(), report.failures.end());
  }
  // A signal ends the job; only a failure is a reason to start again.
  if (exit_result.signal == 0 && !exit_result.failures.empty()) {
    exit_result.status = first_of(exit_result.failures).status;
    exit_result.restart = place_.attempt < options_.max_restarts;
  }
  return exit_result;
}

AttemptReport Agent::agree_on_result(AttemptReport own_report) {
  if (force_kill_) own_report.status = 128 + signal_;
  if (store_client_ == nullptr) return exit_result_of({own_report});
  store_client_->post(key("end", options_.node_rank), own_report.to_json());
  if (options_.node_rank != 0) {
    store_client_->watch(key("result"));
    AttemptReport exit_result = AttemptReport::from_json(wait_for(key("result")));
    store_client_->post(key("result_seen", options_.node_rank), "1");
    return exit_result;
  }
  for (int node = 1; node < options_.nnodes; ++node) {
    store_client_->watch(key("end", node));
    store_client_->watch(key("result_seen", node));
  }
  // All nodes are watched by now, so their words come while one of them is waited for.
  std::vector<AttemptReport> reports{own_report};
  for (int node = 1; node < options_.nnodes; ++node) {
    reports.push_back(AttemptReport::from_json(wait_for(key("end", node))));
  }
  const AttemptReport exit_result = exit_result_of(reports);
  store_client_->post(key("result"), exit_result.to_json());
  if (!exit_result.restart) wait_until_acknowledged();
  return exit_result;
}

// As long as the others live they may take their time: a node's ranks may have more to do than ours.
std::string Agent::wait_for(const std::string& key) {
  for (;;) {
    if (auto value = store_client_->received(key)) return *value;
    if (const auto reason = store_client_->received("abort")) {
      throw PeerError("launch.run", concat("another agent gave up: ", *reason));
    }
    if (const std::string lost = store_client_->lost(); !lost.empty()) {
      throw PeerError("launch.run", lost, "look at that node's output");
    }
    std::vector<pollfd> waits;
    for (const int fd : wake_fds()) waits.push_back({fd, POLLIN, 0});
    console_.add_waits(waits);
    base::wait_for_files(waits, base::Deadline(poll_interval()));
    console_.pump();
    store_client_->acknowledge();
    handle_signals(nullptr);
    if (signal_ == 0)
      signal_ = signal_in(store_client_->received("signal").value_or(""), options_.signals_to_handle);
    if (force_kill_) {
      throw PeerError("launch.run", concat("two signals came while node ", options_.node_rank,
                                           " waited for the others, whose ranks may run still"));
    }
  }
}

// Node 0 keeps the store; who cannot read the result any more is gone, and that is said nowhere else.
void Agent::wait_until_acknowledged() {
  const base::Deadline deadline{kSeenTime};
  const auto all_seen = [&] {
    for (int node = 1; node < options_.nnodes; ++node) {
      if (!store_client_->received(key("result_seen", node))) return false;
    }
    return true;
  };
  while (!all_seen() && !deadline.expired() && store_client_->lost().empty() && !force_kill_) {
    pollfd file{store_client_->fd(), POLLIN, 0};
    base::wait_for_files({&file, 1}, base::Deadline(milliseconds(20)).sooner(deadline));
    store_client_->acknowledge();
    handle_signals(nullptr);
  }
}

void Agent::report_exit(const AttemptReport& exit_result) {
  console_.flush(base::Deadline(seconds(1)));  // the report comes after what ranks have printed
  if (!exit_result.failures.empty()) {
    std::string text = describe(exit_result.failures, place_.world_size);
    if (exit_result.restart) {
      text += concat("\n  all ranks are started again: restart ", place_.attempt + 1, " of ",
                     options_.max_restarts);
    }
    log_line(exit_result.restart ? base::LogLevel::kWarning : base::LogLevel::kError, text);
  }
  if (exit_result.signal != 0) {
    log_line(base::LogLevel::kInfo,
             concat("ended by ", named(exit_result.signal), ", with status ", exit_result.status));
  }
}

// A line of the log waits for who reads stderr (a pager, a terminal that is stopped); ending ranks does not.
// A pipe that is ready takes so much and no more.
void Agent::log_line(base::LogLevel level, const std::string& text) {
  constexpr std::size_t kHead = 64;  // what the log puts before it
  const bool fits = text.size() + kHead <= PIPE_BUF || is_file(STDERR_FILENO);
  if (fits && base::ready_events(STDERR_FILENO, POLLOUT) != 0) {
    base::log(level, text);
  } else {
    console_.write(Stream::kErr, text + "\n");
  }
}

std::string Agent::key(const char* what) const {
  return concat(what, "/", place_.attempt);
}

std::string Agent::key(const char* what, int node) const {
  return concat(what, "/", place_.attempt, "/", node);
}

}  // namespace cohort::launch
