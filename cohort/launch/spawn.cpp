#include "cohort/launch/spawn.h"

#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <iterator>
#include <map>
#include <string_view>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>

#include "cohort/core/cpu.h"
#include "cohort/core/deadline.h"
#include "cohort/core/env.h"
#include "cohort/core/error.h"

extern char** environ;

namespace cohort::launch {
namespace {

using core::concat;
using std::chrono::milliseconds;

// Set in a rank: which call of spawn() it is for, and where its error goes.
constexpr const char* kCall = "COHORT_SPAWN_CALL";
constexpr const char* kErrorFd = "COHORT_SPAWN_ERROR_FD";
constexpr std::size_t kMostText = 64 * 1024;
constexpr char kReached = '\x06';  // what a rank writes first: it came to its call

[[noreturn]] void system_error(const char* what) {
  throw SystemError("launch.spawn", concat("cannot ", what, ": ", std::strerror(errno)));
}

class Fd {
 public:
  explicit Fd(int fd = -1) : fd_(fd) {}
  Fd(Fd&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
  Fd& operator=(Fd&& other) noexcept {
    std::swap(fd_, other.fd_);
    return *this;
  }
  ~Fd() { close(); }
  int get() const { return fd_; }
  void close() {
    if (fd_ >= 0) ::close(fd_);
    fd_ = -1;
  }

 private:
  int fd_;
};

std::vector<std::string> own_arguments() {
  std::ifstream file("/proc/self/cmdline", std::ios::binary);
  const std::string text{std::istreambuf_iterator<char>(file), {}};
  std::vector<std::string> arguments;
  for (std::size_t begin = 0; begin < text.size();) {
    const std::size_t end = std::min(text.find('\0', begin), text.size());
    arguments.push_back(text.substr(begin, end - begin));
    begin = end + 1;
  }
  if (arguments.empty()) throw SystemError("launch.spawn", "cannot read /proc/self/cmdline", "mount /proc");
  return arguments;
}

// A pipe that nobody reads any more: the launcher is gone, and with it who would read the text.
void write_all(int fd, std::string_view text) {
  while (!text.empty()) {
    const ssize_t count = ::write(fd, text.data(), text.size());
    if (count < 0 && errno == EINTR) continue;
    if (count <= 0) return;
    text.remove_prefix(static_cast<std::size_t>(count));
  }
}

// In a rank: runs fn and never returns.
[[noreturn]] void run_rank(const std::function<void(int)>& fn) {
  const int rank = static_cast<int>(core::env_int("RANK", 0).value_or(0));
  const int fd = static_cast<int>(core::env_int(kErrorFd, 0).value_or(STDERR_FILENO));
  write_all(fd, std::string_view(&kReached, 1));
  std::string failure;
  try {
    fn(rank);
  } catch (const std::exception& error) {
    failure = error.what();
    if (failure.empty()) failure = "an exception without a message";
  } catch (...) {
    failure = "an exception that is no std::exception";
  }
  std::fflush(nullptr);
  if (failure.empty()) std::exit(0);
  write_all(fd, std::string_view(failure).substr(0, kMostText));
  std::_Exit(1);  // not exit(): threads of a broken group may hold what destructors wait for
}

struct Rank {
  int rank = 0;
  pid_t pid = -1;
  Fd error;
  std::string message;
  bool running = true;
  int status = 0;

  // What it ended with, as words; empty if well.
  std::string outcome() const {
    const bool reached = message.starts_with(kReached);
    const std::string text = reached ? message.substr(1) : message;
    if (WIFSIGNALED(status)) {
      const int signal = WTERMSIG(status);
      return concat("was killed by signal ", signal, " (", ::strsignal(signal), ")", text.empty() ? "" : ": ",
                    text);
    }
    if (WEXITSTATUS(status) == 0 && reached) return "";
    if (WEXITSTATUS(status) == 0) return "ended well, but main did not come to the call of spawn() in it";
    return text.empty() ? concat("ended with status ", WEXITSTATUS(status)) : "failed: " + text;
  }
  // Reads what has come through the pipe, without waiting.
  void drain() {
    std::array<char, 4096> buffer{};
    for (;;) {
      const ssize_t count = ::read(error.get(), buffer.data(), buffer.size());
      if (count < 0 && errno == EINTR) continue;
      if (count <= 0) return;
      message.append(buffer.data(), static_cast<std::size_t>(count));
    }
  }
};

// The ranks, killed and reaped when it goes.
class Ranks {
 public:
  ~Ranks() {
    kill_running(SIGKILL);
    for (Rank& rank : list) {
      while (rank.running && ::waitpid(rank.pid, &rank.status, 0) < 0 && errno == EINTR) {
      }
      rank.running = false;
    }
  }
  void kill_running(int signal) {
    for (const Rank& rank : list) {
      if (rank.running) ::kill(rank.pid, signal);
    }
  }
  // Takes note of those that have ended; returns one that ended badly, if there is.
  Rank* reap() {
    Rank* failed = nullptr;
    for (Rank& rank : list) {
      rank.drain();
      if (!rank.running || ::waitpid(rank.pid, &rank.status, WNOHANG) != rank.pid) continue;
      rank.running = false;
      rank.drain();
      if (failed == nullptr && !rank.outcome().empty()) failed = &rank;
    }
    return failed;
  }
  bool any_running() const {
    return std::any_of(list.begin(), list.end(), [](const Rank& rank) { return rank.running; });
  }

  std::vector<Rank> list;
};

pid_t start(const std::vector<std::string>& arguments, const std::vector<std::string>& environment,
            int error_fd) {
  // All that allocates comes before fork: another thread may hold malloc's lock in that moment.
  std::vector<char*> argv, envp;
  for (const std::string& text : arguments) argv.push_back(const_cast<char*>(text.c_str()));
  for (const std::string& text : environment) envp.push_back(const_cast<char*>(text.c_str()));
  argv.push_back(nullptr);
  envp.push_back(nullptr);
  const pid_t parent = ::getpid();
  const pid_t pid = ::fork();
  if (pid != 0) return pid;
  ::prctl(PR_SET_PDEATHSIG, SIGKILL);
  if (::getppid() != parent) ::_exit(1);
  sigset_t none;
  ::sigemptyset(&none);
  ::sigprocmask(SIG_SETMASK, &none, nullptr);
  ::fcntl(error_fd, F_SETFD, 0);
  ::execve("/proc/self/exe", argv.data(), envp.data());
  ::_exit(127);
}

std::vector<std::string> environment_of(int rank, int num_ranks, int port, const std::string& call,
                                        int error_fd, const SpawnOptions& options) {
  std::vector<std::pair<std::string, std::string>> added = {
      {"RANK", std::to_string(rank)},
      {"LOCAL_RANK", std::to_string(rank)},
      {"GROUP_RANK", "0"},
      {"WORLD_SIZE", std::to_string(num_ranks)},
      {"LOCAL_WORLD_SIZE", std::to_string(num_ranks)},
      {"MASTER_ADDR", "127.0.0.1"},
      {"MASTER_PORT", std::to_string(port)},
      {"TORCHELASTIC_USE_AGENT_STORE", "True"},
      {"TORCHELASTIC_RESTART_COUNT", "0"},
      {kCall, call},
      {kErrorFd, std::to_string(error_fd)},
  };
  if (!core::env_string("OMP_NUM_THREADS")) {
    added.emplace_back("OMP_NUM_THREADS", std::to_string(std::max(1, core::usable_cores() / num_ranks)));
  }
  added.insert(added.end(), options.environment.begin(), options.environment.end());
  std::vector<std::string> result;
  for (char** at = environ; *at != nullptr; ++at) {
    const std::string text = *at;
    const std::string name = text.substr(0, text.find('='));
    if (std::none_of(added.begin(), added.end(), [&](const auto& entry) { return entry.first == name; })) {
      result.push_back(text);
    }
  }
  for (const auto& [name, value] : added) result.push_back(name + "=" + value);
  return result;
}

}  // namespace

void spawn(const std::function<void(int rank)>& fn, int num_ranks, const SpawnOptions& options,
           std::source_location place) {
  static std::map<std::string, int> passed;
  std::string call = concat(place.file_name(), ":", place.line(), ":", place.column());
  call += concat("#", passed[call]++);
  if (const auto mine = core::env_string(kCall)) {
    if (*mine == call) run_rank(fn);
    return;  // it ran before this process was made
  }
  if (num_ranks < 1) {
    throw UsageError("launch.spawn", concat("num_ranks is ", num_ranks, ", expected at least 1"));
  }
  if (core::env_string("RANK")) {
    throw UsageError("launch.spawn", "RANK is set: a launcher has started this process as one rank of a job",
                     "start the program by itself, or call fn without spawn");
  }
  std::vector<std::string> arguments = own_arguments();
  if (options.arguments) {
    arguments.resize(1);
    arguments.insert(arguments.end(), options.arguments->begin(), options.arguments->end());
  }
  const core::Deadline deadline =
      options.timeout ? core::Deadline(*options.timeout) : core::Deadline::never();

  c10d::TCPStoreOptions store_options;
  store_options.port = 0;
  store_options.isServer = true;
  store_options.waitWorkers = false;
  const auto store = c10::make_intrusive<c10d::TCPStore>("127.0.0.1", store_options);

  Ranks ranks;
  for (int rank = 0; rank < num_ranks; ++rank) {
    std::array<int, 2> ends{};
    if (::pipe2(ends.data(), O_CLOEXEC) != 0) system_error("make a pipe");
    Fd read_end(ends[0]), write_end(ends[1]);
    ::fcntl(read_end.get(), F_SETFL, O_NONBLOCK);
    const auto environment =
        environment_of(rank, num_ranks, store->getPort(), call, write_end.get(), options);
    const pid_t pid = start(arguments, environment, write_end.get());
    if (pid < 0) system_error("make a process");
    ranks.list.push_back(
        {.rank = rank, .pid = pid, .error = std::move(read_end), .message = {}, .status = 0});
  }

  const auto pause = [&] {
    std::vector<pollfd> waits;
    for (const Rank& rank : ranks.list) {
      if (rank.running) waits.push_back({rank.error.get(), POLLIN, 0});
    }
    ::poll(waits.data(), waits.size(), std::min(20, deadline.remaining_ms()));
    // A pipe that has closed reads as ready at once; its process ends in a moment.
    if (std::any_of(waits.begin(), waits.end(), [](const pollfd& wait) { return wait.revents != 0; })) {
      ::usleep(1000);
    }
  };
  Rank* failed = nullptr;
  while ((failed = ranks.reap()) == nullptr && ranks.any_running()) {
    if (deadline.expired()) {
      std::string still;
      for (const Rank& rank : ranks.list) {
        if (rank.running) still += concat(still.empty() ? "" : ", ", rank.rank);
      }
      throw TimeoutError("launch.spawn", concat("rank ", still, " of ", num_ranks, " still ran after ",
                                                options.timeout->count(), " ms, and was killed"));
    }
    pause();
  }
  if (failed == nullptr) return;
  const std::string what = concat("rank ", failed->rank, " of ", num_ranks, " ", failed->outcome());
  ranks.kill_running(SIGTERM);
  const core::Deadline grace(options.grace);
  while (ranks.any_running() && !grace.expired()) {
    ::usleep(2000);
    ranks.reap();
  }
  throw PeerError("launch.spawn", what);
}

}  // namespace cohort::launch
