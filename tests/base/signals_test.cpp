#include "cohort/base/signals.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <chrono>
#include <csignal>
#include <cstdlib>
#include <thread>

#include "cohort/base/error.h"
#include "cohort/base/files/fd.h"
#include "tests/support/throws.h"

namespace cohort::base {
namespace {

volatile std::sig_atomic_t seen_by_old_handler = 0;
void old_handler(int signal) {
  seen_by_old_handler = signal;
}

TEST(SignalsTest, FirstInterruptAsksToStop) {
  const TrainingSignals signals;
  EXPECT_EQ(signals.stop_signal(), 0);
  std::raise(SIGINT);
  EXPECT_EQ(signals.stop_signal(), SIGINT);
}

TEST(SignalsTest, TerminationAsksToStopToo) {
  const TrainingSignals signals;
  std::raise(SIGTERM);
  EXPECT_EQ(signals.stop_signal(), SIGTERM);
}

TEST(SignalsTest, ATerminalThatGoesAwayAsksToStopToo) {
  const TrainingSignals signals;
  std::raise(SIGHUP);
  EXPECT_EQ(signals.stop_signal(), SIGHUP);
}

TEST(SignalsTest, UnderNohupATerminalThatGoesAwayIsNothing) {
  auto* const before = std::signal(SIGHUP, SIG_IGN);
  {
    const TrainingSignals signals;
    std::raise(SIGHUP);
    EXPECT_EQ(signals.stop_signal(), 0);
  }
  EXPECT_EQ(std::signal(SIGHUP, before), SIG_IGN);
}

TEST(SignalsTest, WritingToAPipeThatNobodyReadsIsAnError) {
  std::array<int, 2> pipe{};
  ASSERT_EQ(::pipe2(pipe.data(), O_CLOEXEC), 0);
  const Fd writer(pipe[1]);
  ::close(pipe[0]);
  auto* const before = std::signal(SIGPIPE, SIG_DFL);
  {
    const TrainingSignals signals;
    EXPECT_EQ(::write(writer.get(), "x", 1), -1);
    EXPECT_EQ(errno, EPIPE);
    EXPECT_EQ(signals.stop_signal(), 0);
  }
  EXPECT_EQ(std::signal(SIGPIPE, old_handler), SIG_DFL);
  {
    const TrainingSignals signals;  // a handler of the program's own stays
    std::raise(SIGPIPE);
    EXPECT_EQ(seen_by_old_handler, SIGPIPE);
    seen_by_old_handler = 0;
  }
  EXPECT_EQ(std::signal(SIGPIPE, before), old_handler);
}

// What is ignored stays so in programs that are started, and they would no longer end at a closed pipe.
TEST(SignalsTest, ProgramsThatAreStartedEndAtAClosedPipeAsEver) {
  auto* const before = std::signal(SIGPIPE, SIG_DFL);
  {
    const TrainingSignals signals;
    const int status = std::system("kill -s PIPE $$");
    EXPECT_TRUE(WIFSIGNALED(status) && WTERMSIG(status) == SIGPIPE) << status;
    std::signal(SIGPIPE, old_handler);
  }
  EXPECT_EQ(std::signal(SIGPIPE, before), SIG_DFL);
}

TEST(SignalsTest, SaveIsAskedForOnceForEachSignalAndDoesNotStop) {
  TrainingSignals signals;
  EXPECT_FALSE(signals.take_save_request());
  std::raise(SIGUSR1);
  EXPECT_TRUE(signals.take_save_request());
  EXPECT_FALSE(signals.take_save_request());
  std::raise(SIGUSR1);
  std::raise(SIGUSR1);
  EXPECT_TRUE(signals.take_save_request());
  EXPECT_EQ(signals.stop_signal(), 0);
}

TEST(SignalsTest, RequestsOfAnEarlierTrainingAreForgotten) {
  {
    const TrainingSignals signals;
    std::raise(SIGINT);
    std::raise(SIGUSR1);
  }
  TrainingSignals signals;
  EXPECT_EQ(signals.stop_signal(), 0);
  EXPECT_FALSE(signals.take_save_request());
}

TEST(SignalsTest, HandlersThatWereThereAreRestored) {
  auto* const before = std::signal(SIGUSR1, old_handler);
  {
    const TrainingSignals signals;
    std::raise(SIGUSR1);
    EXPECT_EQ(seen_by_old_handler, 0);
  }
  std::raise(SIGUSR1);
  EXPECT_EQ(seen_by_old_handler, SIGUSR1);
  std::signal(SIGUSR1, before);
}

TEST(SignalsTest, OneAtATime) {
  const TrainingSignals signals;
  COHORT_EXPECT_THROW_WITH(TrainingSignals(), UsageError, "another instance handles the signals");
}

void interrupt_twice(int first, int second) {
  const TrainingSignals signals;
  std::raise(first);
  if (first == second) std::this_thread::sleep_for(std::chrono::milliseconds(200));
  std::raise(second);
  std::_Exit(0);
}

TEST(SignalsDeathTest, SecondSignalEndsTheProcessWithItsStatus) {
  EXPECT_EXIT(interrupt_twice(SIGINT, SIGINT), ::testing::ExitedWithCode(130), "");
  EXPECT_EXIT(interrupt_twice(SIGINT, SIGTERM), ::testing::ExitedWithCode(143), "");
}

// In a process of its own: one that a busy machine stops for 0.1 s in between has two requests, and ends.
TEST(SignalsTest, TheSameSignalDeliveredTwiceAtOnceIsOneRequest) {
  bool is_one = false;
  for (int tries = 0; !is_one && tries < 10; ++tries) {
    const pid_t child = ::fork();
    ASSERT_GE(child, 0);
    if (child == 0) {
      const TrainingSignals signals;
      std::raise(SIGTERM);
      std::raise(SIGTERM);
      ::_exit(signals.stop_signal() == SIGTERM ? 0 : 1);
    }
    int status = 0;
    ASSERT_EQ(::waitpid(child, &status, 0), child);
    ASSERT_TRUE(WIFEXITED(status));
    is_one = WEXITSTATUS(status) == 0;
    ASSERT_TRUE(is_one || WEXITSTATUS(status) == 128 + SIGTERM) << WEXITSTATUS(status);
  }
  EXPECT_TRUE(is_one);
}

}  // namespace
}  // namespace cohort::base
