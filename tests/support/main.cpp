// main() of a program of tests that link LibTorch. With --each_case_alone=SUITE every case of the suite runs
// in a process of its own, forked from this one, which has loaded LibTorch (0.3 s) and started no thread. So
// no case sees what another left behind, and a crash or a case without an end ends one case. Status 77: all
// cases were skipped.
//
// Such a process ends without the destructors of LibTorch's global objects, which take 0.17 s, more than most
// cases. The destructors of what a case made run as always: exit() runs them first.
#include <gtest/gtest.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <string_view>
#include <vector>

namespace {

constexpr std::string_view kOption = "--each_case_alone=";
constexpr int kSkipped = 77;
#ifdef COHORT_IS_SANITIZED
constexpr unsigned kMaxSeconds = 1100;  // of a case: SIGALRM ends it
#else
constexpr unsigned kMaxSeconds = 280;
#endif

std::vector<std::string> cases_of(std::string_view suite_name) {
  std::vector<std::string> names;
  const testing::UnitTest& tests = *testing::UnitTest::GetInstance();
  for (int i = 0; i < tests.total_test_suite_count(); ++i) {
    const testing::TestSuite& suite = *tests.GetTestSuite(i);
    if (suite.name() != suite_name) continue;
    for (int j = 0; j < suite.total_test_count(); ++j) {
      const char* const name = suite.GetTestInfo(j)->name();
      if (std::strncmp(name, "DISABLED_", 9) != 0) names.push_back(std::string(suite_name) + "." + name);
    }
  }
  return names;
}

// In the child: the case by itself. Returns what main() is to return.
int run_case(const std::string& name) {
  prctl(PR_SET_PDEATHSIG, SIGKILL);  // ctest ends a suite that takes too long by ending its parent
  alarm(kMaxSeconds);
  GTEST_FLAG_SET(filter, name);
  const int status = RUN_ALL_TESTS();
  const testing::UnitTest& tests = *testing::UnitTest::GetInstance();
  if (tests.test_to_run_count() != 1) {
    std::printf("%d cases ran in place of one\n", tests.test_to_run_count());
    return 1;
  }
  return status == 0 && tests.skipped_test_count() == 1 ? kSkipped : status;
}

// Returns the exit status of the case `name`, process `child`; 1 where it has none.
int wait_for(pid_t child, const std::string& name) {
  int status = 0;
  while (waitpid(child, &status, 0) < 0) {
    if (errno == EINTR) continue;
    std::perror("waitpid");
    return 1;
  }
  if (WIFEXITED(status) && (WEXITSTATUS(status) == 0 || WEXITSTATUS(status) == kSkipped))
    return WEXITSTATUS(status);
  if (WIFSIGNALED(status)) {
    std::printf("[  FAILED  ] %s: ended by signal %d%s\n", name.c_str(), WTERMSIG(status),
                WTERMSIG(status) == SIGALRM ? ", for it took too long" : "");
  } else {
    std::printf("[  FAILED  ] %s: exit status %d\n", name.c_str(), WEXITSTATUS(status));
  }
  return 1;
}

#ifndef COHORT_IS_SANITIZED  // what looks for leaks comes last
// exit() calls it after the destructors of all objects with static storage that were made after this call,
// and before those of objects that were made as the program was loaded.
void end_before_the_destructors_of_globals() {
  on_exit(
      [](int status, void*) {
        std::fflush(nullptr);
        _exit(status);
      },
      nullptr);
}
#endif

}  // namespace

int main(int argc, char** argv) {
  std::string suite;
  if (argc == 2 && std::string_view(argv[1]).starts_with(kOption)) {
    suite = argv[1] + kOption.size();
    argc = 1;  // what a death test starts again
    argv[1] = nullptr;
  }
  testing::InitGoogleTest(&argc, argv);
  if (suite.empty()) return RUN_ALL_TESTS();

  const std::vector<std::string> names = cases_of(suite);
  if (names.empty()) {
    std::printf("there is no case of %s\n", suite.c_str());
    return 1;
  }
#ifndef COHORT_IS_SANITIZED
  end_before_the_destructors_of_globals();
#endif
  std::signal(SIGCHLD, SIG_DFL);  // ignored, it would hide how a child ended
  std::size_t failed = 0, skipped = 0;
  for (const std::string& name : names) {
    std::fflush(nullptr);
    const auto begun = std::chrono::steady_clock::now();
    const pid_t child = fork();
    if (child < 0) {
      std::perror("fork");
      return 1;
    }
    if (child == 0) return run_case(name);
    const int status = wait_for(child, name);
    if (status == kSkipped) ++skipped;
    if (status == 1) ++failed;
    const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - begun;
    std::printf("case %s took %.2f s\n", name.c_str(), seconds.count());
  }
  std::printf("%zu cases, %zu failed, %zu skipped\n", names.size(), failed, skipped);
  if (failed > 0) return 1;
  return skipped == names.size() ? kSkipped : 0;
}
