// What happens to a job when one rank fails: the table in docs/guide/launch.md, row by row, three ranks over
// Gloo and over shm, between collectives and in the middle of DDP's backward.
#include <gtest/gtest.h>

#include <cstdlib>
#include <random>

#include "tests/cli/program.h"
#include "tests/support/processes.h"
#include "tests/support/throws.h"

namespace cohort::test {
namespace {

namespace fs = std::filesystem;
using namespace std::chrono_literals;

struct Fault {
  const char* name;
  int status;                            ///< of the job
  std::vector<std::string> parts;        ///< of the report; RANK is the one that failed
  std::chrono::milliseconds most = 15s;  ///< from the fault to the end of the job
};

void PrintTo(const Fault& fault, std::ostream* out) {
  *out << fault.name;
}

constexpr auto kDeadline = 4s;  // of the program's collectives, where the fault ends at it
constexpr auto kShutdown = 2s;

std::vector<Fault> faults() {
  return {
      {.name = "sigkill", .status = 137, .parts = {"rank RANK of 3 failed first: it was killed by signal 9"}},
      {.name = "exit", .status = 3, .parts = {"rank RANK of 3 failed first: it ended with status 3"}},
      {.name = "exception", .status = 1, .parts = {"rank RANK of 3 failed first", "a mistake on purpose"}},
      {.name = "sigstop",
       .status = 1,
       .parts = {"all_reduce", "RANK IS SILENT"},
       .most = kDeadline + kShutdown + 20s},
      {.name = "shape", .status = 1, .parts = {"rank RANK", "float[999]", "float[1000]"}},
      {.name = "collective", .status = 1, .parts = {"rank RANK", "broadcast", "all_reduce"}},
  };
}

Fault missing() {
  return {.name = "missing",
          .status = 1,
          .parts = {"rank RANK of 3 did not come"},
          .most = kDeadline + kShutdown + 20s};
}

class FaultsTest : public ::testing::TestWithParam<std::tuple<const char*, const char*, Fault>> {
 protected:
  static void SetUpTestSuite() { adopt_orphans(); }
};

TEST_P(FaultsTest, TheJobEndsInTimeNamingRankAndCause) {
  const auto& [backend, moment, fault] = GetParam();
  const char* text = std::getenv("COHORT_FAULTS");  // the slow script asks for ten
  const int repeats = text == nullptr ? 1 : std::atoi(text);
  const unsigned seed = std::random_device{}();
  SCOPED_TRACE("seed " + std::to_string(seed));
  std::mt19937 random(seed);
  for (int i = 0; i < repeats; ++i) {
    TempDir dir;
    const std::string rank = std::to_string(random() % 3), step = std::to_string(random() % 300);
    Program program(dir.path(),
                    {"run", "--nproc-per-node", "3", "--shutdown-timeout", "2", "--bind-to", "none", "--",
                     COHORT_FAULT_PROGRAM, fault.name, rank, step, backend, moment},
                    {{"OMP_NUM_THREADS", "1"}});
    const Outcome outcome = program.outcome();
    const auto end = fs::file_time_type::clock::now();
    ASSERT_TRUE(fs::exists(dir / "injected")) << outcome.err;
    EXPECT_LT(end - fs::last_write_time(dir / "injected"), fault.most)
        << "rank " << rank << ", step " << step;
    EXPECT_EQ(outcome.status, fault.status) << outcome.err;
    for (std::string part : fault.parts) {
      if (part == "RANK IS SILENT") {  // shm knows itself whom it waits for
        part = std::string(backend) == "shm" ? "rank RANK has not come"
                                             : "rank RANK of 3 did not notice: dead, or stuck";
      }
      if (const auto at = part.find("RANK"); at != std::string::npos) part.replace(at, 4, rank);
      EXPECT_TRUE(message_contains(outcome.err, part)) << "rank " << rank << ", step " << step;
    }
    EXPECT_TRUE(nothing_is_left()) << "a process is left";
  }
}

constexpr auto kName = [](const auto& info) {
  return std::string(std::get<0>(info.param)) + "_" + std::get<1>(info.param) + "_" +
         std::get<2>(info.param).name;
};
INSTANTIATE_TEST_SUITE_P(Backends, FaultsTest,
                         ::testing::Combine(::testing::Values("gloo", "shm"),
                                            ::testing::Values("collective", "backward"),
                                            ::testing::ValuesIn(faults())),
                         kName);
INSTANTIATE_TEST_SUITE_P(Rendezvous, FaultsTest,
                         ::testing::Combine(::testing::Values("gloo", "shm"), ::testing::Values("rendezvous"),
                                            ::testing::Values(missing())),
                         kName);

TEST_F(FaultsTest, APortThatIsTakenIsNamedAtOnce) {
  const Port taken(Port::Use::kListens);
  const std::string port = taken.text();
  TempDir dir;
  const auto begin = std::chrono::steady_clock::now();
  const Outcome outcome =
      run_program(dir.path(), {"run", "--nproc-per-node", "2", "--master-port", port, "--", "true"});
  EXPECT_LT(std::chrono::steady_clock::now() - begin, 30s);
  EXPECT_EQ(outcome.status, 1);
  EXPECT_TRUE(message_contains(outcome.err, "cannot listen on port " + port));
}

TEST_F(FaultsTest, ManyStartsAndStopsLeaveNothing) {
  const char* text = std::getenv("COHORT_STARTS");  // the slow script asks for two hundred
  const int starts = text == nullptr ? 5 : std::atoi(text);
  TempDir dir;
  fs::create_directory(dir / "tmp");
  for (int i = 0; i < starts; ++i) {
    Program program(dir.path(),
                    {"run", "--nproc-per-node", "2", "--bind-to", "none", "--", COHORT_RANK_PROGRAM},
                    {{"TMPDIR", (dir / "tmp").string()}});
    const Outcome outcome = program.outcome();
    ASSERT_EQ(outcome.status, 0) << outcome.err;
    ASSERT_TRUE(nothing_is_left());
    ASSERT_TRUE(fs::is_empty(dir / "tmp"));
  }
}

}  // namespace
}  // namespace cohort::test
