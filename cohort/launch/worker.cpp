// fork and exec, with a pipe that exec closes. An errno in the pipe says that the program could not be
// started; the end of the pipe says that it runs. All memory that the child needs is laid out before the
// fork, as another thread may hold malloc's lock in that moment. Always: a process is seen to have ended
// before it is reaped, and its group is killed in between. Until it is reaped its number belongs to no other
// process, so the signal meets no stranger.
#include "cohort/launch/worker.h"

#include <fcntl.h>
#include <poll.h>
#include <sched.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <fstream>
#include <iterator>

#include "cohort/base/env.h"
#include "cohort/base/error.h"
#include "cohort/base/log.h"
#include "cohort/base/process.h"
#include "cohort/base/threads/wait.h"
#include "cohort/launch/internal/orphan_watchdog.h"
#include "cohort/launch/limits.h"

namespace cohort::launch {
namespace {

using base::concat;

[[noreturn]] void system_error(const std::string& what, int error) {
  throw SystemError("launch.worker", concat("cannot ", what, ": ", std::strerror(error)));
}

// What the child needs between fork and exec. All that allocates comes before the fork: another thread may
// hold malloc's lock in that moment.
struct ExecPlan {
  explicit ExecPlan(const WorkerOptions& options) : options(options) {
    for (const std::string& text : options.arguments) argv.push_back(const_cast<char*>(text.c_str()));
    for (const std::string& text : options.environment) envp.push_back(const_cast<char*>(text.c_str()));
    argv.push_back(nullptr);
    envp.push_back(nullptr);
    if (!options.cpus.empty()) {
      const int count = options.cpus.ids().back() + 1;
      cpu_bytes = CPU_ALLOC_SIZE(count);
      cpu_bits.resize(cpu_bytes / sizeof(unsigned long));
      for (const int id : options.cpus.ids()) CPU_SET_S(id, cpu_bytes, mask());
    }
  }
  cpu_set_t* mask() { return reinterpret_cast<cpu_set_t*>(cpu_bits.data()); }

  const WorkerOptions& options;
  std::vector<char*> argv, envp;
  std::vector<unsigned long> cpu_bits;
  std::size_t cpu_bytes = 0;
};

// Moves a descriptor to where the program expects it; dup2 onto itself would leave the mark that closes it.
bool place(int fd, int target) {
  if (fd < 0) return true;
  return fd == target ? ::fcntl(fd, F_SETFD, 0) == 0 : ::dup2(fd, target) == target;
}

// In the child: only async-signal-safe calls. Returns when something failed, with errno set.
void become(ExecPlan& plan, pid_t parent) {
  const WorkerOptions& options = plan.options;
  if (options.own_group && ::setpgid(0, 0) != 0) return;
  // The child does this: its parent may die before it could.
  if (options.watchdog != nullptr) options.watchdog->watch(::getpid());
  if (::prctl(PR_SET_PDEATHSIG, SIGKILL) != 0) return;
  if (::getppid() != parent) ::_exit(1);  // it died before the line above
  if (plan.cpu_bytes > 0 && ::sched_setaffinity(0, plan.cpu_bytes, plan.mask()) != 0) return;
  // The agent ignores SIGPIPE and may block signals. exec would keep both.
  ::signal(SIGPIPE, SIG_DFL);
  sigset_t none;
  ::sigemptyset(&none);
  ::sigprocmask(SIG_SETMASK, &none, nullptr);
  if (!place(options.input, 0) || !place(options.output, 1) || !place(options.error, 2)) return;
#ifdef SYS_close_range
  constexpr unsigned kCloseOnExec = 4;  // CLOSE_RANGE_CLOEXEC, Linux 5.11
  ::syscall(SYS_close_range, 3U, ~0U, kCloseOnExec);
#endif
  for (const int fd : options.keep) ::fcntl(fd, F_SETFD, 0);
  ::execve(options.program.c_str(), plan.argv.data(), plan.envp.data());
}

// What a child that could not become the program has written: its errno; 0 when it did become it.
int start_error(int fd, base::Deadline deadline) {
  pollfd file{fd, POLLIN, 0};
  while (base::wait_for_files({&file, 1}, deadline) == 0 && !deadline.expired()) {
  }
  int error = 0;
  const ssize_t count = ::read(fd, &error, sizeof error);
  if (count < 0) return ETIMEDOUT;
  return count == sizeof error ? error : 0;
}

}  // namespace

Worker::Worker(const WorkerOptions& options) : own_group_(options.own_group) {
  ExecPlan plan(options);
  Pipe failure = make_pipe();
  const pid_t parent = ::getpid();
  pid_ = ::fork();
  if (pid_ < 0) system_error("make a process", errno);
  if (pid_ == 0) {
    become(plan, parent);
    const int error = errno;
    [[maybe_unused]] const ssize_t count = ::write(failure.write.get(), &error, sizeof error);
    ::_exit(127);
  }
  running_ = true;
  if (own_group_) ::setpgid(pid_, pid_);  // here too: whoever comes first
  failure.write.close();
  if (const int error = start_error(failure.read.get(), options.start_by); error != 0) {
    end(base::Deadline(kEndTime));
    if (options.watchdog != nullptr) options.watchdog->forget(pid_);
    system_error("start " + options.program, error);
  }
  end_ = base::open_process(pid_);
}

Worker::Worker(Worker&& other) noexcept
    : pid_(other.pid_),
      own_group_(other.own_group_),
      running_(std::exchange(other.running_, false)),
      wait_status_(other.wait_status_),
      end_(std::move(other.end_)) {}

Worker::~Worker() {
  end(base::Deadline(kEndTime));
}

void Worker::end(base::Deadline deadline) {
  if (!running_) return;
  kill();
  // A process that the kernel cannot end (a file system that hangs) is left to init.
  while (!reap() && !deadline.expired()) {
    pollfd file{end_.get(), POLLIN, 0};
    base::wait_for_files({&file, 1}, base::Deadline(std::chrono::milliseconds(10)).sooner(deadline));
  }
  running_ = false;
}

bool Worker::reap() {
  if (!running_) return true;
  siginfo_t info{};
  // The end is seen but not reaped: as long as it is there, its number is no other process's.
  if (::waitid(P_PID, static_cast<id_t>(pid_), &info, WEXITED | WNOHANG | WNOWAIT) != 0) {
    if (errno != ECHILD) return false;
    base::log_warning(concat("process ", pid_,
                             " has ended, and its status went elsewhere: SIGCHLD is ignored, or "
                             "other code of this program waits for any child. It counts as failed"));
    wait_status_ = 1 << 8;
    running_ = false;
    end_.close();
    return true;
  }
  if (info.si_pid != pid_) return false;
  if (own_group_) ::kill(-pid_, SIGKILL);
  if (::waitpid(pid_, &wait_status_, WNOHANG) != pid_) return false;
  running_ = false;
  end_.close();
  return true;
}

void Worker::signal(int number) const {
  if (running_) ::kill(pid_, number);
}

void Worker::signal_group(int number) const {
  if (!running_) return;
  // To it as well: before its setpgid() there is no such group.
  if (!own_group_ || ::kill(-pid_, number) != 0) ::kill(pid_, number);
}

void Worker::kill() const {
  signal_group(SIGKILL);
}

int exit_status(int wait_status) {
  return WIFSIGNALED(wait_status) ? 128 + WTERMSIG(wait_status) : WEXITSTATUS(wait_status);
}

std::string describe_exit(int wait_status) {
  if (!WIFSIGNALED(wait_status)) return concat("ended with status ", WEXITSTATUS(wait_status));
  return concat("was killed by ", base::describe_signal(WTERMSIG(wait_status)));
}

std::vector<std::string> own_arguments() {
  std::ifstream file("/proc/self/cmdline", std::ios::binary);
  const std::string text{std::istreambuf_iterator<char>(file), {}};
  std::vector<std::string> arguments;
  for (std::size_t begin = 0; begin < text.size();) {
    const std::size_t end = std::min(text.find('\0', begin), text.size());
    arguments.push_back(text.substr(begin, end - begin));
    begin = end + 1;
  }
  if (arguments.empty()) throw SystemError("launch.worker", "cannot read /proc/self/cmdline", "mount /proc");
  return arguments;
}

std::vector<std::string> environment_with(const Variables& added) {
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

Variables variables_of(const RankPlace& place) {
  Variables variables = {
      {"RANK", std::to_string(place.rank)},
      {"LOCAL_RANK", std::to_string(place.local_rank)},
      {"WORLD_SIZE", std::to_string(place.world_size)},
      {"LOCAL_WORLD_SIZE", std::to_string(place.local_world_size)},
      {"GROUP_RANK", std::to_string(place.node_rank)},
      {"MASTER_ADDR", place.master_addr},
      {"MASTER_PORT", std::to_string(place.master_port)},
      {"TORCHELASTIC_RESTART_COUNT", std::to_string(place.restart_count)},
      {"TORCHELASTIC_USE_AGENT_STORE", "True"},
  };
  if (!base::env_string("OMP_NUM_THREADS")) {
    // torchrun sets 1. Here the ranks of a node use all of its cores together.
    const int threads = std::max(1, base::usable_cores() / place.local_world_size);
    variables.emplace_back("OMP_NUM_THREADS", std::to_string(threads));
  }
  return variables;
}

std::string find_program(const std::string& name) {
  const auto can_run = [](const std::string& path) {
    struct stat info {};
    return ::stat(path.c_str(), &info) == 0 && S_ISREG(info.st_mode) && ::access(path.c_str(), X_OK) == 0;
  };
  if (name.find('/') != std::string::npos) {
    if (can_run(name)) return name;
    throw UsageError("launch.program", concat("'", name, "' is no program that can be executed"),
                     "its path; for a script, its interpreter first: python train.py");
  }
  const std::string path = base::env_string("PATH").value_or("/usr/local/bin:/usr/bin:/bin");
  for (std::size_t begin = 0; begin <= path.size();) {
    const std::size_t end = std::min(path.find(':', begin), path.size());
    const std::string folder = path.substr(begin, end - begin);
    const std::string candidate = (folder.empty() ? "." : folder) + "/" + name;
    if (can_run(candidate)) return candidate;
    begin = end + 1;
  }
  throw UsageError(
      "launch.program", concat("no program '", name, "' is in PATH"),
      concat("its path, such as ./", name, "; for a script, its interpreter first: python ", name));
}

}  // namespace cohort::launch
