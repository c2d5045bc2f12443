#include "cohort/comm/internal/pipe_signal.h"

#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <thread>

namespace cohort::comm {
namespace {

// How a process ends in which `body` runs with the signal as the system has it.
int status_of(void (*body)(int broken)) {
  const pid_t child = ::fork();
  if (child == 0) {
    ::signal(SIGPIPE, SIG_DFL);
    std::array<int, 2> ends{};
    if (::pipe(ends.data()) != 0) ::_exit(99);
    ::close(ends[0]);
    body(ends[1]);
    ::_exit(0);
  }
  int status = -1;
  ::waitpid(child, &status, 0);
  return status;
}

void write_or_exit(int fd) {
  if (::write(fd, "x", 1) != -1 || errno != EPIPE) ::_exit(1);
}

TEST(PipeSignalTest, ABrokenPipeIsAnErrorWhileItIsBlockedAndOnThreadsMadeMeanwhile) {
  EXPECT_EQ(status_of([](int broken) {
              std::thread other;
              {
                const BlockedPipeSignal outer;
                {
                  const BlockedPipeSignal inner;
                  write_or_exit(broken);
                }
                write_or_exit(broken);
                other = std::thread([broken] {
                  ::usleep(20'000);
                  write_or_exit(broken);
                });
              }
              other.join();
            }),
            0);
}

TEST(PipeSignalTest, AfterwardsItIsASignalAgain) {
  const int status = status_of([](int broken) {
    { const BlockedPipeSignal blocked; }
    write_or_exit(broken);
  });
  EXPECT_TRUE(WIFSIGNALED(status) && WTERMSIG(status) == SIGPIPE) << status;
}

}  // namespace
}  // namespace cohort::comm
