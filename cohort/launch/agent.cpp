#include "cohort/launch/agent.h"

#include <limits.h>
#include <poll.h>
#include <signal.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <charconv>
#include <utility>

#include "cohort/core/error.h"
#include "cohort/core/log.h"
#include "cohort/core/signals.h"
#include "cohort/core/wait.h"

namespace cohort::launch {
namespace {

using core::concat;
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

std::string list(const std::vector<int>& numbers) {
  std::string text;
  for (const int number : numbers) text += concat(text.empty() ? "" : ", ", number);
  return text;
}

}  // namespace

Agent::Agent(const RunOptions& options, const TeamPlace& place, const AgentParts& parts)
    : options_(options),
      place_(place),
      folder_(parts.folder),
      guard_(parts.guard),
      signals_(parts.signals),
      peers_(parts.peers) {
  place_.secret_fd = parts.secret_fd;
}

int Agent::run() {
  if (folder_.stays()) {
    say(core::LogLevel::kInfo, concat("output of ranks is kept in ", folder_.path().string()));
  }
  AttemptReport verdict;
  try {
    if (peers_ != nullptr) {
      peers_->watch("signal");
      peers_->watch("abort");
    }
    for (int number = 0;; ++number) {
      verdict = attempt(number);
      tell(verdict);
      if (!verdict.restart) break;
    }
  } catch (const std::exception& error) {
    console_.flush(core::Deadline(seconds(1)));
    if (peers_ != nullptr) peers_->post("abort", concat("node ", options_.node_rank, ": ", error.what()));
    throw;
  }
  // Its reader may be slow, but a signal ends the wait.
  console_.flush(core::Deadline(kFlushTime), [&] {
    heed_signals(nullptr);
    return hurry_ || (signal_ != 0 && verdict.signal == 0);
  });
  return verdict.status;
}

AttemptReport Agent::attempt(int number) {
  place_.attempt = number;
  place_.log_folder = folder_.attempt(number);
  ending_ = false;
  grace_ = core::Deadline::never();
  if (peers_ != nullptr) peers_->watch(key("fail"));
  if (peers_ != nullptr) peers_->busy_until(core::Deadline(kStartTime));
  Team team(options_, place_, display_, guard_);
  if (peers_ != nullptr) peers_->news();
  if (signal_ != 0) {  // it came between two attempts
    const int before = std::exchange(signal_, 0);
    stop_by_signal(&team, before);
  }
  supervise(team);
  return agree(outcome_of(team));
}

// Peers are to be asked often enough who is lost, whatever the interval is.
milliseconds Agent::look_time() const {
  return peers_ == nullptr ? options_.monitor_interval
                           : std::min(options_.monitor_interval, peers_->round_time());
}

std::vector<int> Agent::wake_fds() const {
  std::vector<int> fds{signals_.fd()};
  if (peers_ != nullptr) fds.push_back(peers_->fd());
  return fds;
}

void Agent::supervise(Team& team) {
  bool killed = false;
  core::Deadline after_kill = core::Deadline::never();
  while (team.running()) {
    const auto wait = std::min<std::chrono::nanoseconds>(look_time(), grace_.remaining());
    team.step(std::chrono::ceil<milliseconds>(wait), wake_fds());
    heed_signals(&team);
    if (signal_ == 0 && !team.failures().empty()) stop_by_failure(team);
    heed_peers(team);
    if (!killed && (hurry_ || grace_.expired()) && team.running()) {
      const std::string late = list(team.running_ranks());
      team.kill();
      killed = true;
      grace_ = core::Deadline::never();
      after_kill = core::Deadline(seconds(30));
      if (!hurry_) {
        say(core::LogLevel::kWarning, concat("local rank ", late, " did not end within ",
                                             options_.shutdown_timeout.count(), " ms, and is killed"));
      }
    }
    after_kill.check("launch.run", concat("local rank ", list(team.running_ranks()), " to die of SIGKILL"),
                     "look what it waits for in the kernel: /proc/PID/wchan");
  }
}

void Agent::heed_signals(Team* team) {
  while (const int number = signals_.take()) {
    if (number == SIGUSR1 || number == SIGUSR2) {
      if (team != nullptr) notify(*team, number);
    } else if (number == SIGTSTP) {
      if (team != nullptr) team->pause();
      ::raise(SIGSTOP);
      if (team != nullptr) team->resume();
    } else {
      heed_stop(team, number);
    }
  }
}

// One request may come several times: a batch system sends it twice, and to each node, which may have heard
// of it from another node before.
void Agent::heed_stop(Team* team, int number) {
  const bool is_same = number == signal_ && (!was_signalled_ || !same_until_.expired());
  if (signal_ == 0) {
    if (peers_ != nullptr) peers_->post("signal", std::to_string(number));
    stop_by_signal(team, number);
  } else if (!is_same) {
    hurry_ = true;
  }
  // Counted from here, as the ranks are told meanwhile, which may take long.
  if (!std::exchange(was_signalled_, true)) same_until_ = core::Deadline(core::kSameSignalTime);
}

// All threads of the ranks are looked at, and there may be thousands.
void Agent::notify(Team& team, int number) {
  if (peers_ != nullptr) peers_->busy_until(core::Deadline(kStartTime));
  const std::string what = team.notify(number);
  if (peers_ != nullptr) peers_->news();
  if (!what.empty()) say(core::LogLevel::kWarning, what);
}

void Agent::stop_by_signal(Team* team, int number) {
  signal_ = number;
  if (team == nullptr || ending_) return;
  ending_ = true;
  grace_ = core::Deadline(options_.shutdown_timeout);
  const std::size_t num_ranks = team->running_ranks().size();
  team->signal(number);
  say(core::LogLevel::kInfo,
      concat(named(number), " is passed on to ", num_ranks, " ranks; they have ",
             options_.shutdown_timeout.count() / 1000, " s, and a second signal kills them"));
}

void Agent::stop_by_failure(Team& team) {
  if (ending_) return;
  ending_ = true;
  grace_ = core::Deadline(options_.shutdown_timeout);
  if (peers_ != nullptr) peers_->post(key("fail"), std::to_string(options_.node_rank));
  team.stop();
}

// Another node's failure or signal is as our own; one that is lost ends everything.
void Agent::heed_peers(Team& team) {
  if (peers_ == nullptr) return;
  peers_->news();
  if (const int number = signal_in(peers_->received("signal").value_or(""), options_.signals_to_handle);
      number != 0 && signal_ == 0) {
    stop_by_signal(&team, number);
  }
  const bool failed = peers_->received(key("fail")) || peers_->received("abort") || !peers_->lost().empty();
  if (failed && !ending_) {
    ending_ = true;
    grace_ = core::Deadline(options_.shutdown_timeout);
    team.stop();
  }
}

AttemptReport Agent::outcome_of(const Team& team) const {
  AttemptReport report;
  report.signal = signal_;
  report.status = team.status();
  for (const RankFailure& failure : team.failures()) {
    if (signal_ == 0 || failure.status != 128 + signal_) report.failures.push_back(failure);
  }
  return report;
}

AttemptReport Agent::verdict_on(const std::vector<AttemptReport>& reports) const {
  AttemptReport verdict;
  for (const AttemptReport& report : reports) {
    if (verdict.signal == 0) verdict.signal = report.signal;
    if (verdict.status == 0) verdict.status = report.status;
    verdict.failures.insert(verdict.failures.end(), report.failures.begin(), report.failures.end());
  }
  if (verdict.signal == 0 && !verdict.failures.empty()) {
    verdict.status = first_of(verdict.failures).status;
    verdict.restart = place_.attempt < options_.max_restarts;
  }
  return verdict;
}

AttemptReport Agent::agree(AttemptReport mine) {
  if (hurry_) mine.status = 128 + signal_;
  if (peers_ == nullptr) return verdict_on({mine});
  peers_->post(key("end", options_.node_rank), mine.to_json());
  if (options_.node_rank != 0) {
    peers_->watch(key("verdict"));
    AttemptReport verdict = AttemptReport::from_json(wait_for(key("verdict")));
    peers_->post(key("seen", options_.node_rank), "1");
    return verdict;
  }
  for (int node = 1; node < options_.nnodes; ++node) {
    peers_->watch(key("end", node));
    peers_->watch(key("seen", node));
  }
  std::vector<AttemptReport> reports{mine};
  for (int node = 1; node < options_.nnodes; ++node) {
    reports.push_back(AttemptReport::from_json(wait_for(key("end", node))));
  }
  const AttemptReport verdict = verdict_on(reports);
  peers_->post(key("verdict"), verdict.to_json());
  if (!verdict.restart) wait_until_seen();
  return verdict;
}

// As long as the others live they may take their time: a node's ranks may have more to do than ours.
std::string Agent::wait_for(const std::string& key) {
  for (;;) {
    if (auto value = peers_->received(key)) return *value;
    if (const auto reason = peers_->received("abort")) {
      throw PeerError("launch.run", concat("another agent gave up: ", *reason));
    }
    if (const std::string lost = peers_->lost(); !lost.empty()) {
      throw PeerError("launch.run", lost, "look at that node's output");
    }
    std::vector<pollfd> waits;
    for (const int fd : wake_fds()) waits.push_back({fd, POLLIN, 0});
    console_.add_waits(waits);
    core::wait_for_files(waits, core::Deadline(look_time()));
    console_.pump();
    peers_->news();
    heed_signals(nullptr);
    if (signal_ == 0)
      signal_ = signal_in(peers_->received("signal").value_or(""), options_.signals_to_handle);
    if (hurry_) {
      throw PeerError("launch.run", concat("two signals came while node ", options_.node_rank,
                                           " waited for the others, whose ranks may run still"));
    }
  }
}

// Node 0 keeps the store; who cannot read the verdict any more is gone, and that is said nowhere else.
void Agent::wait_until_seen() {
  const core::Deadline deadline{kSeenTime};
  const auto all_seen = [&] {
    for (int node = 1; node < options_.nnodes; ++node) {
      if (!peers_->received(key("seen", node))) return false;
    }
    return true;
  };
  while (!all_seen() && !deadline.expired() && peers_->lost().empty() && !hurry_) {
    pollfd file{peers_->fd(), POLLIN, 0};
    core::wait_for_files({&file, 1}, core::Deadline(milliseconds(20)).sooner(deadline));
    peers_->news();
    heed_signals(nullptr);
  }
}

void Agent::tell(const AttemptReport& verdict) {
  console_.flush(core::Deadline(seconds(1)));  // the report comes after what ranks have printed
  if (!verdict.failures.empty()) {
    std::string text = describe(verdict.failures, place_.world_size);
    if (verdict.restart) {
      text += concat("\n  all ranks are started again: restart ", place_.attempt + 1, " of ",
                     options_.max_restarts);
    }
    say(verdict.restart ? core::LogLevel::kWarning : core::LogLevel::kError, text);
  }
  if (verdict.signal != 0) {
    say(core::LogLevel::kInfo, concat("ended by ", named(verdict.signal), ", with status ", verdict.status));
  }
}

// Writing to the log waits for who reads stderr (a pager, a terminal that is stopped); ending ranks does not.
// A pipe that is ready takes so much and no more.
void Agent::say(core::LogLevel level, const std::string& text) {
  constexpr std::size_t kHead = 64;  // what the log puts before it
  const bool fits = text.size() + kHead <= PIPE_BUF || is_file(STDERR_FILENO);
  if (fits && core::ready_events(STDERR_FILENO, POLLOUT) != 0) {
    core::log(level, text);
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
