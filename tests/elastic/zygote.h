#pragma once

#include <sys/types.h>

#include <functional>
#include <map>
#include <string>
#include <vector>

#include "cohort/base/files/fd.h"

namespace cohort::test {

/// A process that was forked before there were threads, and forks others on demand: each has LibTorch loaded
/// already, which takes a program longer than the rest of a test. Its children become this process's: to be
/// waited for here. All die with it.
class Zygote {
 public:
  /// `body` runs in each child; its result is the child's status.
  explicit Zygote(std::function<int()> body);
  ~Zygote();
  Zygote(const Zygote&) = delete;
  Zygote& operator=(const Zygote&) = delete;

  /// Starts a child. It finds the numbers of its copies of `fds` in the variables that they are named by. Its
  /// output goes to a file.
  pid_t start(const std::map<std::string, std::string>& variables, const std::map<std::string, int>& fds,
              const std::string& output);

 private:
  void serve(int fd, const std::function<int()>& body);

  pid_t parent_, pid_ = -1;
  base::Fd socket_;
};

/// In a child: asks for leave at the point that the variable TEST_POINT names, "NAME:N" for the N-th time
/// that it is reached, over the socket TEST_CONTROL_FD. Whoever is asked kills the process, or answers.
/// Without the variable it does nothing.
void stop_at_test_point();

}  // namespace cohort::test
