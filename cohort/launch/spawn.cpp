// A rank is a fresh process of the same program: main runs again and comes to the same call. A call is named
// by its place in the source, and by how often that place was passed. In a rank, spawn() runs fn where the
// name is that of its own call, and returns at once at calls before it. Always: the variables that name the
// call hold for a child of the process that wrote them, and for no process below it. A rank writes a mark
// first, so an early exit with status 0 is not taken for success.
#include "cohort/launch/spawn.h"

#include <poll.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <optional>
#include <string_view>

#include "cohort/base/env.h"
#include "cohort/base/error.h"
#include "cohort/base/secret.h"
#include "cohort/base/text/format_list.h"
#include "cohort/base/threads/deadline.h"
#include "cohort/base/threads/wait.h"
#include "cohort/comm/internal/tcp_store.h"
#include "cohort/comm/job.h"
#include "cohort/launch/limits.h"
#include "cohort/launch/worker.h"

namespace cohort::launch {
namespace {

using base::concat;
using std::chrono::milliseconds;

// They are set in a rank: which call of spawn() it is for, and where its error goes.
constexpr const char* kCall = "COHORT_SPAWN_CALL";
constexpr const char* kErrorFd = "COHORT_SPAWN_ERROR_FD";
constexpr std::size_t kMaxText = 64 * 1024;
constexpr char kReached = '\x06';  // what a rank writes first: it came to its call

// What a spawned rank was told; nothing in other processes.
struct Told {
  std::string call;
  int error_fd = STDERR_FILENO;
};

// A process that a rank starts inherits the variables: they are for the one whose parent wrote them, and this
// takes them away once they are read.
const std::optional<Told>& told() {
  static const std::optional<Told> of_process = []() -> std::optional<Told> {
    const auto call = base::env_string(kCall);
    if (!call) return std::nullopt;
    const int fd = static_cast<int>(base::env_int(kErrorFd, 0).value_or(STDERR_FILENO));
    ::unsetenv(kCall);
    ::unsetenv(kErrorFd);
    const std::string parent = concat(::getppid(), " ");
    if (!call->starts_with(parent)) return std::nullopt;
    return Told{call->substr(parent.size()), fd};
  }();
  return of_process;
}

// In a rank: runs fn and never returns.
[[noreturn]] void run_rank(const std::function<void(int)>& fn) {
  const int rank = static_cast<int>(base::env_int("RANK", 0).value_or(0));
  const int fd = told()->error_fd;
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
  write_all(fd, std::string_view(failure).substr(0, kMaxText));
  std::_Exit(1);  // not exit(): threads of a broken group may hold what destructors wait for
}

struct Rank {
  int rank = 0;
  Worker worker;
  Fd error;
  std::string message = {};

  // What it ended with, as words; empty if well.
  std::string outcome() const {
    const bool reached = message.starts_with(kReached);
    const std::string text = reached ? message.substr(1) : message;
    const int status = worker.wait_status();
    if (WIFSIGNALED(status)) return concat(describe_exit(status), text.empty() ? "" : ": ", text);
    if (WEXITSTATUS(status) == 0 && reached) return "";
    if (WEXITSTATUS(status) == 0) return "ended well, but main did not come to the call of spawn() in it";
    return text.empty() ? describe_exit(status) : "failed: " + text;
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
    for (const Rank& rank : list) rank.worker.kill();  // all at once
    const base::Deadline deadline(kEndTime);
    for (Rank& rank : list) rank.worker.end(deadline);
  }
  void signal(int number) {
    for (const Rank& rank : list) rank.worker.signal(number);
  }
  // Takes note of those that have ended; returns one that ended badly, if there is.
  Rank* reap() {
    Rank* failed = nullptr;
    for (Rank& rank : list) {
      rank.drain();
      if (!rank.worker.running() || !rank.worker.reap()) continue;
      // Again: it may have written between the look above and its end.
      rank.drain();
      if (failed == nullptr && !rank.outcome().empty()) failed = &rank;
    }
    return failed;
  }
  bool any_running() const {
    return std::any_of(list.begin(), list.end(), [](const Rank& rank) { return rank.worker.running(); });
  }

  std::vector<Rank> list;
};

std::vector<std::string> environment_of(int rank, int num_ranks, std::uint16_t port, const std::string& call,
                                        int error_fd, int secret_fd, const SpawnOptions& options) {
  Variables added = variables_of({.rank = rank,
                                  .local_rank = rank,
                                  .world_size = num_ranks,
                                  .local_world_size = num_ranks,
                                  .master_addr = "127.0.0.1",
                                  .master_port = port});
  added.insert(added.end(), {{kCall, concat(::getpid(), " ", call)},
                             {kErrorFd, std::to_string(error_fd)},
                             {"COHORT_SECRET_FD", std::to_string(secret_fd)}});
  added.insert(added.end(), options.environment.begin(), options.environment.end());
  return environment_with(added);
}

}  // namespace

void spawn_unless_launched(const std::function<void(int rank)>& fn, int num_ranks,
                           const SpawnOptions& options, std::source_location call) {
  const comm::Job job = comm::job_from_environment();
  const bool is_spawned = told().has_value();
  if (job.launcher == comm::Launcher::kNone || is_spawned) return spawn(fn, num_ranks, options, call);
  fn(job.rank);
}

void spawn(const std::function<void(int rank)>& fn, int num_ranks, const SpawnOptions& options,
           std::source_location place) {
  static std::map<std::string, int> passed;
  std::string call = concat(place.file_name(), ":", place.line(), ":", place.column());
  call += concat("#", passed[call]++);
  if (told()) {
    if (told()->call == call) run_rank(fn);
    return;  // it ran before this process was made
  }
  if (num_ranks < 1) {
    throw UsageError("launch.spawn", concat("num_ranks is ", num_ranks, ", expected at least 1"));
  }
  if (base::env_string("RANK")) {
    throw UsageError("launch.spawn", "RANK is set: a launcher has started this process as one rank of a job",
                     "start the program by itself, or call fn without spawn");
  }
  std::vector<std::string> arguments = own_arguments();
  if (options.arguments) {
    // The program's own name stays.
    arguments.resize(1);
    arguments.insert(arguments.end(), options.arguments->begin(), options.arguments->end());
  }
  const base::Deadline deadline =
      options.timeout ? base::Deadline(*options.timeout) : base::Deadline::never();

  const auto store = comm::open_tcp_store({.host = "127.0.0.1", .serves = true, .is_local = true});

  const base::Fd secret_fd = base::Secret::make().to_fd();  // a job of its own, whatever this process is of
  const base::Deadline start_by = deadline.sooner(base::Deadline(kStartTime));
  Ranks ranks;
  for (int rank = 0; rank < num_ranks; ++rank) {
    Pipe pipe = make_pipe();
    const int error_fd = pipe.write.get();
    ranks.list.push_back(
        {.rank = rank,
         .worker = Worker({.program = "/proc/self/exe",
                           .arguments = arguments,
                           .environment = environment_of(rank, num_ranks, store->getPort(), call, error_fd,
                                                         secret_fd.get(), options),
                           .keep = {error_fd, secret_fd.get()},
                           .start_by = start_by}),
         .error = std::move(pipe.read)});
  }

  const auto pause = [&] {
    std::vector<pollfd> waits;
    for (const Rank& rank : ranks.list) {
      if (rank.worker.running()) waits.push_back({rank.error.get(), POLLIN, 0});
    }
    base::wait_for_files(waits, base::Deadline(milliseconds(20)).sooner(deadline));
    // A pipe that has closed reads as ready at once; its process ends in a moment.
    if (std::any_of(waits.begin(), waits.end(), [](const pollfd& wait) { return wait.revents != 0; })) {
      base::sleep(milliseconds(1), deadline);
    }
  };
  Rank* failed = nullptr;
  while ((failed = ranks.reap()) == nullptr && ranks.any_running()) {
    if (deadline.expired()) {
      base::TextList still;
      for (const Rank& rank : ranks.list) {
        if (rank.worker.running()) still.add(rank.rank);
      }
      throw TimeoutError("launch.spawn", concat("rank ", still.text(), " of ", num_ranks, " still ran after ",
                                                options.timeout->count(), " ms, and was killed"));
    }
    pause();
  }
  if (failed == nullptr) return;
  const std::string what = concat("rank ", failed->rank, " of ", num_ranks, " ", failed->outcome());
  ranks.signal(SIGTERM);
  base::poll_until(
      [&] {
        ranks.reap();
        return !ranks.any_running();
      },
      base::Deadline(options.grace));
  throw PeerError("launch.spawn", what);
}

}  // namespace cohort::launch
