#include "cohort/launch/internal/members/start_priority.h"

#include <gtest/gtest.h>
#include <linux/capability.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <filesystem>
#include <iostream>
#include <set>
#include <string>
#include <thread>

#include "cohort/base/error.h"
#include "tests/support/processes.h"

namespace cohort::launch {
namespace {

int own_priority() {
  return ::getpriority(PRIO_PROCESS, 0);
}

// Of all threads of a process, which has two or more.
std::set<int> priorities_of(pid_t process) {
  std::set<int> all;
  int num_threads = 0;
  for (const auto& entry : std::filesystem::directory_iterator(base::concat("/proc/", process, "/task"))) {
    all.insert(::getpriority(PRIO_PROCESS, static_cast<id_t>(std::stoi(entry.path().filename().string()))));
    ++num_threads;
  }
  EXPECT_GE(num_threads, 2);
  return all;
}

// What the child process does: it has a process group of its own, and a thread beside its first one.
TEST(StartPriorityChild, DISABLED_Process) {
  ::setpgid(0, 0);
  std::thread([] {
    std::cout << "process " << ::getpid() << " has two threads" << std::endl;
    ::pause();
  }).join();
}

TEST(StartPriorityTest, AllThreadsOfAProcessHaveALowerPriorityWhileItStarts) {
  test::RankProcesses processes("StartPriorityChild", 1);
  processes.wait_for(0, " has two threads");
  const std::string output = processes.output(0), before = "process ";
  const pid_t process = std::stoi(output.substr(output.rfind(before) + before.size()));
  const int own = own_priority(), lower = may_restore_priority() ? std::min(own + 10, 19) : own;
  lower_priority(process);
  EXPECT_EQ(priorities_of(process), std::set{lower});
  restore_priority(process);
  EXPECT_EQ(priorities_of(process), std::set{own});
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
