// main() of a program of tests that link LibTorch. With --each_case_alone=SUITE every case of the suite runs in a process
// of its own, forked from this one, which has loaded LibTorch (0.3 s) and started no thread. So no case sees what another
// left behind, and a crash ends one case.
#include <gtest/gtest.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <csignal>
#include <cstdio>
#include <cstring>
#include <string>
#include <string_view>
#include <vector>

namespace {

constexpr std::string_view kOption = "--each_case_alone=";

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
  GTEST_FLAG_SET(filter, name);
  return RUN_ALL_TESTS();
}

// Returns whether the case `name`, process `child`, passed.
bool wait_for(pid_t child, const std::string& name) {
  int status = 0;
  while (waitpid(child, &status, 0) < 0 && errno == EINTR) {
  }
  if (WIFSIGNALED(status)) {
    std::printf("[  FAILED  ] %s: ended by signal %d\n", name.c_str(), WTERMSIG(status));
  } else if (WEXITSTATUS(status) != 0) {
    std::printf("[  FAILED  ] %s: exit status %d\n", name.c_str(), WEXITSTATUS(status));
  }
  return WIFEXITED(status) && WEXITSTATUS(status) == 0;
}

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
  int failures = 0;
  for (const std::string& name : names) {
    std::fflush(nullptr);
    const auto begun = std::chrono::steady_clock::now();
    const pid_t child = fork();
    if (child < 0) {
      std::perror("fork");
      return 1;
    }
    if (child == 0) return run_case(name);
    failures += wait_for(child, name) ? 0 : 1;
    const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - begun;
    std::printf("case %s took %.2f s\n", name.c_str(), seconds.count());
  }
  std::printf("%zu cases, %d failed\n", names.size(), failures);
  return failures == 0 ? 0 : 1;
}
