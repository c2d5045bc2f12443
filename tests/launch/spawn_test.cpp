// Each test spawns this executable again, with a filter that names the test: in the ranks main runs up to the
// same call.
#include "cohort/launch/spawn.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <optional>
#include <sstream>
#include <thread>

#include "cohort/base/error.h"
#include "cohort/base/secret.h"
#include "cohort/comm/group.h"
#include "cohort/comm/init.h"
#include "tests/support/environment.h"
#include "tests/support/net/listeners.h"
#include "tests/support/processes/process_state.h"
#include "tests/support/temp_dir.h"
#include "tests/support/throws.h"

namespace cohort::launch {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;

class SpawnTest : public testing::Test {
 protected:
  SpawnOptions options() const {
    const auto* test = testing::UnitTest::GetInstance()->current_test_info();
    return {.timeout = seconds(60),
            .grace = milliseconds(500),
            .arguments = std::vector<std::string>{std::string("--gtest_filter=") + test->test_suite_name() +
                                                  "." + test->name()},
            .environment = {}};
  }
};

// Where ranks leave something for the test that spawned them: made by the first process, found by the others,
// in which nothing that stands before the call of spawn() is destroyed.
class SharedFolder {
 public:
  SharedFolder() {
    if (const char* given = std::getenv("SPAWN_TEST_FOLDER")) {
      path_ = given;
    } else {
      path_ = own_.emplace().path().string();
    }
  }
  const std::string& path() const { return path_; }

 private:
  std::optional<test::TempDir> own_;
  std::string path_;
};

// Processes whose parent is this one.
int children() {
  int count = 0;
  for (const auto& entry : std::filesystem::directory_iterator("/proc")) {
    std::ifstream file(entry.path() / "stat");
    std::string text;
    if (!std::getline(file, text)) continue;
    int parent = 0;
    char state = 0;
    std::istringstream rest(text.substr(text.rfind(')') + 1));
    if (rest >> state >> parent && parent == ::getpid()) ++count;
  }
  return count;
}

TEST_F(SpawnTest, RanksMeetAndReduce) {
  const SharedFolder shared;
  const std::string& folder = shared.path();
  SpawnOptions with = options();
  with.environment = {{"SPAWN_TEST_FOLDER", folder}};
  spawn(
      [&](int rank) {
        auto group = comm::init_process_group({.timeout = seconds(20)});
        at::Tensor t = at::full({4}, rank + 1, at::kFloat);
        group.all_reduce(t).wait();
        std::ofstream(folder + "/" + std::to_string(rank))
            << group.size() << " " << t[0].item<float>() << " " << std::getenv("LOCAL_RANK");
        group.barrier();
      },
      3, with);
  for (int rank = 0; rank < 3; ++rank) {
    EXPECT_EQ(test::read_file(folder + "/" + std::to_string(rank)), "3 6 " + std::to_string(rank));
  }
}

TEST_F(SpawnTest, ASecondCallRunsItsOwnFunction) {
  const SharedFolder shared;
  const std::string& folder = shared.path();
  SpawnOptions with = options();
  with.environment = {{"SPAWN_TEST_FOLDER", folder}};
  spawn([&](int rank) { std::ofstream(folder + "/first" + std::to_string(rank)) << 1; }, 1, with);
  spawn([&](int rank) { std::ofstream(folder + "/second" + std::to_string(rank)) << 1; }, 2, with);
  EXPECT_TRUE(std::filesystem::exists(folder + "/first0"));
  EXPECT_FALSE(std::filesystem::exists(folder + "/first1"));
  EXPECT_TRUE(std::filesystem::exists(folder + "/second1"));
}

// At the store of one agent, under one prefix of torchrun's.
TEST_F(SpawnTest, RanksMayMeetAgain) {
  spawn(
      [](int rank) {
        comm::Group first = comm::init_process_group({.backend = "gloo", .timeout = seconds(20)});
        for (int i = 0; i < 2; ++i) {
          comm::Group again =
              comm::init_process_group({.backend = i == 0 ? "gloo" : "auto", .timeout = seconds(20)});
          at::Tensor sum = at::full({1}, rank + 1.0);
          again.all_reduce(sum).wait();
          if (sum.item<double>() != 3) throw std::runtime_error("the second group sums otherwise");
          if (i == 1 && again.backend() != "shm") throw std::runtime_error("auto is " + again.backend());
          again.barrier();
        }
        at::Tensor sum = at::full({1}, rank + 1.0);
        first.all_reduce(sum).wait();
        if (sum.item<double>() != 3) throw std::runtime_error("the first group sums otherwise");
      },
      2, options());
}

// Its agent's descriptor was closed on the way, as subprocess does in Python.
TEST_F(SpawnTest, ASecretThatIsNotThereAnyMoreIsNotMissed) {
  std::optional<test::ScopedEnv> closed;
  if (std::getenv("RANK") == nullptr) closed.emplace("COHORT_SECRET_FD", "999");
  spawn(
      [](int) {
        if (!base::Secret::of_process()) throw std::runtime_error("no secret");
      },
      1, options());
}

// What a rank starts inherits its environment, and is no rank.
TEST_F(SpawnTest, AProgramThatARankStartsIsNotTakenForOne) {
  const auto shared = SharedFolder();
  const std::string& folder = shared.path();
  if (std::getenv("SPAWN_TEST_STARTED") != nullptr) {
    std::string message = "nothing";
    try {
      spawn([](int) {}, 1, options());
    } catch (const UsageError& error) {
      message = error.what();
    }
    std::ofstream(folder + "/said") << message;
    return;
  }
  SpawnOptions with = options();
  with.environment = {{"SPAWN_TEST_FOLDER", folder}};
  const std::string self = std::filesystem::read_symlink("/proc/self/exe");
  const std::string started =
      "SPAWN_TEST_STARTED=1 '" + self + "' '" + with.arguments->front() + "' > /dev/null";
  std::system(("[ -z \"$COHORT_SPAWN_CALL\" ] || " + started).c_str());  // before a rank has come to its call
  spawn(
      [&](int) {
        if (std::getenv("COHORT_SPAWN_CALL") != nullptr) throw std::runtime_error("it would be inherited");
      },
      1, with);
  std::ifstream file(folder + "/said");
  std::string message;
  std::getline(file, message);
  EXPECT_NE(message.find("RANK is set"), std::string::npos) << message;
}

TEST_F(SpawnTest, TheStoreOfASpawnedJobListensOnLoopbackOnly) {
  const auto shared = SharedFolder();
  const std::string& folder = shared.path();
  SpawnOptions with = options();
  with.environment = {{"SPAWN_TEST_FOLDER", folder}};
  spawn(
      [&](int) {
        std::ofstream words(folder + "/listeners");
        for (const auto& address : test::listeners(std::atoi(std::getenv("MASTER_PORT")))) {
          words << address << "\n";
        }
      },
      1, with);
  EXPECT_EQ(test::read_file(folder + "/listeners"), std::string(test::kLoopback) + "\n");
}

TEST_F(SpawnTest, TheFirstFailureComesBackWithRankAndMessage) {
  const auto call = [&] {
    spawn(
        [](int rank) {
          if (rank == 1) throw std::runtime_error("no such luck\nin two lines");
          std::this_thread::sleep_for(seconds(50));
        },
        2, options());
  };
  const auto begin = std::chrono::steady_clock::now();
  COHORT_EXPECT_THROW_WITH(call(), PeerError, "rank 1 of 2 failed: no such luck\nin two lines");
  EXPECT_LT(std::chrono::steady_clock::now() - begin, seconds(20)) << "the other rank was waited for";
}

TEST_F(SpawnTest, ARankThatDoesNotComeToTheCallIsAnError) {
  if (std::getenv("COHORT_SPAWN_CALL") != nullptr) return;  // main takes another way in the ranks
  COHORT_EXPECT_THROW_WITH(spawn([](int) {}, 1, options()), PeerError,
                           "main did not come to the call of spawn()");
}

TEST_F(SpawnTest, ARankThatIsKilledOrExitsIsNamed) {
  COHORT_EXPECT_THROW_WITH(spawn([](int rank) { rank == 0 ? ::raise(SIGKILL) : ::pause(); }, 2, options()),
                           PeerError, "rank 0 of 2 was killed by signal 9");
}

TEST_F(SpawnTest, ARankThatExitsIsNamed) {
  COHORT_EXPECT_THROW_WITH(spawn([](int) { ::_exit(3); }, 1, options()), PeerError,
                           "rank 0 of 1 ended with status 3");
}

TEST_F(SpawnTest, RanksThatDoNotEndAreKilledAtTheDeadlineAndNamed) {
  // A short deadline may find rank 1, which has to begin and to end first, on its way still.
  std::string message, expected;
  for (const int timeout : {1500, 6000, 24'000}) {
    SpawnOptions with = options();
    with.timeout = milliseconds(timeout);
    expected = "rank 0 of 2 still ran after " + std::to_string(timeout) + " ms";
    try {
      spawn(
          [](int rank) {
            if (rank == 1) return;
            ::signal(SIGTERM, SIG_IGN);
            for (;;) ::pause();
          },
          2, with);
    } catch (const TimeoutError& error) {
      message = error.what();
    }
    EXPECT_EQ(children(), 0) << "a rank was left behind";
    if (message.find(expected) != std::string::npos) break;
  }
  EXPECT_TRUE(test::message_contains(message, expected));
}

TEST_F(SpawnTest, RanksDieWithTheProcessThatSpawnedThem) {
  const SharedFolder shared;
  const std::string& folder = shared.path();
  const std::string file = folder + "/pid";
  if (std::getenv("SPAWN_TEST_INNER") != nullptr || std::getenv("RANK") != nullptr) {
    spawn(
        [&](int) {
          std::ofstream(file + ".part") << ::getpid();
          std::filesystem::rename(file + ".part", file);
          for (;;) ::pause();
        },
        1, options());
    return;
  }
  const pid_t child = ::fork();
  ASSERT_GE(child, 0);
  if (child == 0) {
    ::setenv("SPAWN_TEST_INNER", "1", 1);
    ::setenv("SPAWN_TEST_FOLDER", folder.c_str(), 1);
    ::execl("/proc/self/exe", "launch_test", "--gtest_filter=SpawnTest.RanksDieWithTheProcessThatSpawnedThem",
            static_cast<char*>(nullptr));
    ::_exit(127);
  }
  for (int i = 0; i < 2000 && !std::filesystem::exists(file); ++i)
    std::this_thread::sleep_for(milliseconds(10));
  ASSERT_TRUE(std::filesystem::exists(file));
  const pid_t rank = std::stoi(test::read_file(file));
  ASSERT_EQ(::kill(rank, 0), 0);
  ::kill(child, SIGKILL);
  ::waitpid(child, nullptr, 0);
  EXPECT_TRUE(test::ends_within(rank, std::chrono::seconds(5)));
}

TEST_F(SpawnTest, AProgramThatALauncherMayStartTooSpawnsOnlyWithoutOne) {
  const auto folder = SharedFolder();
  const auto leave_word = [&](int rank) {
    std::ofstream(folder.path() + "/" + std::to_string(rank)) << "here";
  };
  SpawnOptions with = options();
  with.environment = {{"SPAWN_TEST_FOLDER", folder.path()}};
  spawn_unless_launched(leave_word, 2, with);
  EXPECT_TRUE(std::filesystem::exists(folder.path() + "/0"));
  EXPECT_TRUE(std::filesystem::exists(folder.path() + "/1"));

  const test::ScopedEnv rank("RANK", "5"), size("WORLD_SIZE", "8"), local("LOCAL_RANK", "1"),
      local_size("LOCAL_WORLD_SIZE", "2"), host("MASTER_ADDR", "127.0.0.1"), port("MASTER_PORT", "29500");
  int received = -1;
  spawn_unless_launched([&](int given) { received = given; }, 2, with);
  EXPECT_EQ(received, 5) << "in this process";
}

TEST_F(SpawnTest, IsRejectedInsideALaunchedJobAndForNoRanks) {
  COHORT_EXPECT_THROW_WITH(spawn([](int) {}, 0, options()), UsageError, "num_ranks is 0");
  const test::ScopedEnv rank("RANK", "0");
  COHORT_EXPECT_THROW_WITH(spawn([](int) {}, 2, options()), UsageError, "RANK is set");
}

}  // namespace
}  // namespace cohort::launch
