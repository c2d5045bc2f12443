#include "cohort/base/process.h"

#include <gtest/gtest.h>
#include <poll.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>

#include "cohort/base/error.h"
#include "cohort/base/threads/wait.h"

namespace cohort::base {
namespace {

// A process that waits to be killed.
pid_t start_child() {
  const pid_t child = ::fork();
  if (child == 0) {
    ::pause();
    ::_exit(0);
  }
  return child;
}

TEST(ProcessTest, TheEndOfAProcessMakesItsDescriptorReadable) {
  const pid_t child = start_child();
  const Fd fd = open_process(child);
  ASSERT_TRUE(fd.is_open());
  EXPECT_EQ(ready_events(fd.get(), POLLIN), 0);
  ::kill(child, SIGKILL);
  EXPECT_TRUE(poll_until([&] { return ready_events(fd.get(), POLLIN) == POLLIN; },
                         Deadline(std::chrono::seconds(20))));
  ::waitpid(child, nullptr, 0);
  EXPECT_FALSE(open_process(child).is_open()) << "there is no such process any more";
}

TEST(ProcessTest, AStartIsKnownAsLongAsTheProcessIs) {
  const std::string own = process_start(std::to_string(::getpid()));
  EXPECT_FALSE(own.empty());
  EXPECT_EQ(own.find_first_not_of("0123456789"), std::string::npos) << own;
  EXPECT_EQ(process_start("self"), own);
  const pid_t child = start_child();
  EXPECT_GE(std::stoull(process_start(std::to_string(child))), std::stoull(own));
  ::kill(child, SIGKILL);
  ::waitpid(child, nullptr, 0);
  EXPECT_EQ(process_start(std::to_string(child)), "");
  EXPECT_EQ(process_start("999999999999999999999"), "");
}

TEST(ProcessTest, ASignalIsDescribedByItsNumberAndItsName) {
  EXPECT_EQ(describe_signal(SIGTERM), "signal 15 (Terminated)");
  EXPECT_EQ(describe_signal(SIGRTMIN + 3), concat("signal ", SIGRTMIN + 3, " (Real-time signal 3)"));
}

}  // namespace
}  // namespace cohort::base
