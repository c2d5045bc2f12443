#include "cohort/launch/internal/members/start_priority.h"

#include <gtest/gtest.h>
#include <linux/capability.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <filesystem>
#include <iterator>
#include <set>
#include <string>
#include <thread>

#include "cohort/base/error.h"
#include "tests/support/comes_true.h"

namespace cohort::launch {
namespace {

int own_priority() {
  return ::getpriority(PRIO_PROCESS, 0);
}

// Of all threads of a process.
std::set<int> priorities_of(pid_t process) {
  std::set<int> all;
  for (const auto& entry : std::filesystem::directory_iterator(base::concat("/proc/", process, "/task"))) {
    all.insert(::getpriority(PRIO_PROCESS, static_cast<id_t>(std::stoi(entry.path().filename().string()))));
  }
  return all;
}

// A process with a thread beside its first one, in a group of its own.
class TwoThreads {
 public:
  TwoThreads() : pid_(::fork()) {
    if (pid_ != 0) return;
    ::prctl(PR_SET_PDEATHSIG, SIGKILL);
    ::setpgid(0, 0);
    std::thread([] { ::pause(); }).detach();
    ::pause();
    ::_exit(0);
  }
  ~TwoThreads() {
    ::kill(pid_, SIGKILL);
    test::wait_until([&] { return ::waitpid(pid_, nullptr, WNOHANG) == pid_; });
  }
  pid_t pid() const { return pid_; }
  bool is_there() const {
    const std::filesystem::path tasks = base::concat("/proc/", pid_, "/task");
    return ::getpgid(pid_) == pid_ && std::distance(std::filesystem::directory_iterator(tasks),
                                                    std::filesystem::directory_iterator()) == 2;
  }

 private:
  const pid_t pid_;
};

TEST(StartPriorityTest, AllThreadsOfAProcessHaveALowerPriorityWhileItStarts) {
  const TwoThreads process;
  test::wait_until([&] { return process.is_there(); });
  const int own = own_priority(), lower = may_restore_priority() ? std::min(own + 10, 19) : own;
  lower_priority(process.pid());
  EXPECT_EQ(priorities_of(process.pid()), std::set{lower});
  restore_priority(process.pid());
  EXPECT_EQ(priorities_of(process.pid()), std::set{own});
}

// What a process without the capability lowers stays low.
TEST(StartPriorityTest, AProcessThatMayNotRestoreAPriorityLowersNone) {
  const auto without_capability = [] {
    const rlimit none{0, 0};
    __user_cap_header_struct header{_LINUX_CAPABILITY_VERSION_3, 0};
    __user_cap_data_struct data[2]{};
    const bool is_dropped = ::setrlimit(RLIMIT_NICE, &none) == 0 && ::syscall(SYS_capset, &header, data) == 0;
    if (!is_dropped || may_restore_priority()) ::_exit(1);
    const int own = own_priority();
    ::setpgid(0, 0);
    lower_priority(::getpid());
    ::_exit(own_priority() == own ? 0 : 2);
  };
  EXPECT_EXIT(without_capability(), ::testing::ExitedWithCode(0), "");
}

}  // namespace
}  // namespace cohort::launch
