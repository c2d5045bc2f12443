// The agent writes process groups into a pipe, and their negative when they have ended; the watchdog keeps
// the list. Where the pipe ends without the word that all is well, the agent is dead, however it died. Then
// the watchdog kills what is on the list. Always: only the agent and its children before exec have the
// writing end, and a word is small enough to be written at once. The child allocates nothing, as its parent
// may have threads.
#include "cohort/launch/internal/orphan_watchdog.h"

#include <fcntl.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>

#include "cohort/base/error.h"
#include "cohort/base/threads/wait.h"
#include "cohort/launch/limits.h"

namespace cohort::launch {
namespace {

constexpr pid_t kAllIsWell = 0;                     // instead of a group
constexpr std::chrono::milliseconds kGoodbye(300);  // for it to end once all is well

// In the child of a process that may have threads: only async-signal-safe calls, no allocation.
[[noreturn]] void watch_over(int fd, const char* folder) {
  ::setsid();                               // neither Ctrl-C nor a closed terminal reaches it
  ::prctl(PR_SET_NAME, "cohort-watchdog");  // 15 letters, the most that a name may have
  for (int number = 1; number < SIGRTMIN; ++number) ::signal(number, SIG_IGN);
  ::dup2(fd, 0);
#ifdef SYS_close_range
  if (::syscall(SYS_close_range, 1U, ~0U, 0U) != 0)
#endif
    for (int other = 1; other < 65536; ++other) ::close(other);
  static std::array<pid_t, kMaxLocalRanks> groups;
  std::size_t num_groups = 0;
  pid_t word = 0;
  for (;;) {
    const ssize_t count = ::read(0, &word, sizeof word);  // a word is written at once, so read at once
    if (count < 0 && (errno == EINTR || errno == EAGAIN)) continue;
    if (count != sizeof word) break;
    if (word == kAllIsWell) ::_exit(0);
    if (word > 0 && num_groups < groups.size()) groups[num_groups++] = word;
    if (word < 0)
      num_groups = static_cast<std::size_t>(std::remove(groups.begin(), groups.begin() + num_groups, -word) -
                                            groups.begin());
  }
  for (std::size_t i = 0; i < num_groups; ++i) ::kill(-groups[i], SIGKILL);
  if (*folder != '\0') ::execl("/bin/rm", "rm", "-rf", "--", folder, static_cast<char*>(nullptr));
  ::_exit(0);
}

}  // namespace

OrphanWatchdog::OrphanWatchdog(const std::string& folder) : pipe_(make_pipe()) {
  const int flags = ::fcntl(pipe_.read.get(), F_GETFL);
  ::fcntl(pipe_.read.get(), F_SETFL, flags & ~O_NONBLOCK);
  pid_ = ::fork();
  if (pid_ < 0)
    throw SystemError("launch.orphan_watchdog",
                      base::concat("cannot make a process: ", std::strerror(errno)));
  if (pid_ == 0) watch_over(pipe_.read.get(), folder.c_str());
  pipe_.read.close();
  ::fcntl(pipe_.write.get(), F_SETFL, O_NONBLOCK);  // one that is stopped reads nothing
}

OrphanWatchdog::~OrphanWatchdog() {
  send(kAllIsWell);
  pipe_.write.close();
  int status = 0;
  if (pid_ <= 0 || base::wait_for_process(pid_, status, base::Deadline(kGoodbye))) return;
  // It is stopped, or there is no such child any more, whose number may be another process's.
  if (::waitpid(pid_, &status, WNOHANG) != 0) return;
  ::kill(pid_, SIGKILL);
  base::wait_for_process(pid_, status, base::Deadline(kEndTime));
}

void OrphanWatchdog::reap() {
  if (pid_ > 0 && ::waitpid(pid_, nullptr, WNOHANG) == pid_) pid_ = -1;
}

void OrphanWatchdog::send(pid_t group) {
  while (::write(pipe_.write.get(), &group, sizeof group) < 0 && errno == EINTR) {
  }
}

}  // namespace cohort::launch
