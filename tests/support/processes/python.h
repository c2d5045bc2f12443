#pragma once

#include <gtest/gtest.h>
#include <spawn.h>
#include <sys/wait.h>

#include <cstdlib>
#include <string>
#include <vector>

extern char** environ;

namespace cohort::test {

/// The Python of the oracles, from COHORT_PYTHON; empty if it is not set.
inline std::string oracle_python() {
  const char* python = std::getenv("COHORT_PYTHON");
  return python == nullptr ? "" : python;
}

/// Runs Python with `arguments` and returns its exit status.
inline int run_python(std::vector<std::string> arguments) {
  arguments.insert(arguments.begin(), oracle_python());
  std::vector<char*> argv;
  for (std::string& argument : arguments) argv.push_back(argument.data());
  argv.push_back(nullptr);
  pid_t child = 0;
  if (::posix_spawn(&child, argv[0], nullptr, nullptr, argv.data(), environ) != 0) return -1;
  int status = 0;
  ::waitpid(child, &status, 0);
  return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
}

}  // namespace cohort::test

/// Fails the test, and leaves it, when there is no oracle.
#define COHORT_NEED_PYTHON()                                                                     \
  if (::cohort::test::oracle_python().empty()) {                                                 \
    FAIL() << "COHORT_PYTHON is not set: ./test sets it to a Python with torch and safetensors"; \
  }                                                                                              \
  static_assert(true)
