// `cohort run --elastic` on hosts of its own: each fault of a network, a host, an agent or a rank, while the
// run trains. It has the bits of one process alone, or it ends with a message, and the same command resumes
// it.
#include <fcntl.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <unistd.h>

#include <cstdint>
#include <ctime>
#include <filesystem>
#include <memory>
#include <string>

#include "cohort/base/error.h"
#include "cohort/base/threads/wait.h"
#include "tests/cli/netns/netns.h"
#include "tests/cli/netns/virtual_run.h"
#include "tests/support/messages.h"
#include "tests/support/net/certificates.h"

namespace cohort::test {
namespace {

using base::concat;
using std::chrono::milliseconds;
using std::chrono::seconds;

class NetnsFaultsTest : public NetnsTest {
 protected:
  // Three hosts that train.
  std::unique_ptr<VirtualRun> three_hosts(VirtualRun::Options options = {}) {
    auto run = std::make_unique<VirtualRun>(options);
    for (int host = 0; host < 3; ++host) run->start(host);
    EXPECT_TRUE(run->come_to_train({0, 1, 2})) << run->story();
    return run;
  }
  static bool logs(VirtualRun& run, int host, const std::string& text) {
    return base::poll_until([&] { return run.agent(host).err().find(text) != std::string::npos; },
                            base::Deadline(seconds(60)));
  }
};

TEST_F(NetnsFaultsTest, AHostThatIsCutOffIsLeftOutAndComesBack) {
  const auto run = three_hosts();
  run->hosts().isolate(2);
  ASSERT_TRUE(run->come_to_train({0, 1})) << run->story();
  run->hosts().heal();
  ASSERT_TRUE(run->come_to_train({0, 1, 2})) << run->story();
  expect_in(run->agent(0).err(), {" is silent; "});
  EXPECT_EQ(run->finish({0, 1, 2}), "") << run->story();
}

// One that is heard and hears nothing does not get generations; one that hears and is not heard gets them.
TEST_F(NetnsFaultsTest, AHostThatIsCutOffInOneDirectionIsLeftOutAndComesBack) {
  const auto run = three_hosts();
  run->hosts().cut_one_way(0, 1);
  run->hosts().cut_one_way(2, 0);
  ASSERT_TRUE(run->come_to_train({0})) << run->story();
  run->hosts().heal();
  ASSERT_TRUE(run->come_to_train({0, 1, 2})) << run->story();
  EXPECT_EQ(run->finish({0, 1, 2}), "") << run->story();
}

// The others have no record, and it has one. There is never a second one that trains.
TEST_F(NetnsFaultsTest, TheHostWithTheOnlyRecordContinuesAloneWhereItIsCutOff) {
  const auto run = three_hosts({.silence_ms = 150});
  const VirtualRun::Generation before = run->newest();
  run->hosts().isolate(0);
  const std::uint64_t steps[] = {run->step_begun_by(1), run->step_begun_by(2)};
  for (const int host : {1, 2}) {
    EXPECT_EQ(run->agent(host).wait(), 1) << run->story();
    expect_in(run->agent(host).err(), {"was silent for 3000 ms, and it has the run's only record"});
    EXPECT_TRUE(ends_within(before.ranks.at(host), seconds(10)));
    EXPECT_LE(run->step_begun_by(host), steps[host - 1] + 1) << "no more than what was under way";
  }
  ASSERT_TRUE(run->come_to_train({0})) << run->story();
  EXPECT_EQ(run->newest().ranks.at(0), before.ranks.at(0)) << "it lived on";
  run->hosts().heal();
  EXPECT_EQ(run->finish({0}), "") << run->story();
  EXPECT_EQ(run->newest().ranks.size(), 1U);
}

// The agent that decides hears both. Their ranks do not reach each other.
TEST_F(NetnsFaultsTest, OfTwoHostsThatDoNotReachEachOtherOneIsLeftOut) {
  const auto run = three_hosts();
  run->hosts().cut(1, 2);
  ASSERT_TRUE(logs(*run, 0, "lost their link")) << run->story();
  ASSERT_TRUE(logs(*run, 0, "is dropped")) << run->story();
  ASSERT_TRUE(run->make_steps(3)) << run->story();
  run->hosts().heal();
  ASSERT_TRUE(run->come_to_train({0, 1, 2})) << run->story();
  EXPECT_EQ(run->finish({0, 1, 2}), "") << run->story();
}

TEST_F(NetnsFaultsTest, PacketsThatAreLostRepeatedAndLateCostTimeAlone) {
  const auto run = three_hosts();
  for (int host = 0; host < 3; ++host)
    run->hosts().set_links_of(host, {.lost = 0.03, .repeated = 0.1, .delay = milliseconds(3)});
  ASSERT_TRUE(run->make_steps(20)) << run->story();
  const VirtualHosts::Counts counts = run->hosts().counts();
  EXPECT_GT(counts.lost, 0U);
  EXPECT_GT(counts.repeated, 0U);
  run->hosts().heal();
  EXPECT_EQ(run->finish({0, 1, 2}), "") << run->story();
}

TEST_F(NetnsFaultsTest, TwoHostsThatFailAtOnceAreLeftOutAndMayComeAgain) {
  const auto run = three_hosts();
  run->hosts().isolate(2);
  run->fail_host(1);
  run->fail_host(2);
  ASSERT_TRUE(run->come_to_train({0})) << run->story();
  run->hosts().heal();
  run->start(1);
  run->start(2);
  ASSERT_TRUE(run->come_to_train({0, 1, 2})) << run->story();
  EXPECT_EQ(run->finish({0, 1, 2}), "") << run->story();
}

// At the points of a copy and of an entrance: a host that joins dies there, and so does one that gives it the
// state.
TEST_F(NetnsFaultsTest, AHostMayDieWhileItJoinsAndWhileAnotherOneJoins) {
  VirtualRun run({});
  run.start(0);
  run.start(1);
  ASSERT_TRUE(run.come_to_train({0, 1})) << run.story();
  for (const char* const point : {"entered", "state copy", "copied"}) {
    run.act_at(2, point, "kill agent");
    run.start(2);
    ASSERT_TRUE(run.has_acted(2, point)) << point << run.story();
    ASSERT_TRUE(run.come_to_train({0, 1})) << point << run.story();
  }
  run.act_at(1, "hello", "kill agent");
  run.start(2);
  ASSERT_TRUE(run.has_acted(1, "hello")) << run.story();
  ASSERT_TRUE(run.come_to_train({0, 2})) << run.story();
  EXPECT_EQ(run.finish({0, 2}), "") << run.story();
}

TEST_F(NetnsFaultsTest, AHostMayDieWhileTheOthersRecover) {
  VirtualRun run({.num_hosts = 4});
  for (int host = 0; host < 4; ++host) run.start(host);
  ASSERT_TRUE(run.come_to_train({0, 1, 2, 3})) << run.story();
  run.act_at(2, "hello", "kill agent");
  run.act_at(1, "entered", "kill rank");  // its successor enters the next generation
  run.fail_host(3);
  ASSERT_TRUE(run.has_acted(1, "entered")) << run.story();
  ASSERT_TRUE(run.come_to_train({0, 1})) << run.story();
  EXPECT_EQ(run.finish({0, 1}), "") << run.story();
}

TEST_F(NetnsFaultsTest, AHostThatComesAndGoesAllTheTimeHoldsTheOthersUpOnlyThen) {
  const auto run = three_hosts();
  for (int i = 0; i < 3; ++i) {
    run->agent(2).worker().kill();
    ASSERT_TRUE(run->come_to_train({0, 1})) << run->story();
    run->start(2);
    ASSERT_TRUE(run->come_to_train({0, 1, 2})) << run->story();
  }
  // Its network does the same.
  for (int i = 0; i < 4; ++i) {
    run->hosts().isolate(2);
    ASSERT_TRUE(run->make_steps(3)) << run->story();
    run->hosts().heal();
    ASSERT_TRUE(run->make_steps(3)) << run->story();
  }
  EXPECT_EQ(run->finish({0, 1, 2}), "") << run->story();
}

TEST_F(NetnsFaultsTest, AnAgentThatIsStoppedIsLeftOutAndComesBack) {
  const auto run = three_hosts();
  const pid_t rank = run->newest().ranks.at(2);
  run->agent(2).worker().signal(SIGSTOP);
  ASSERT_TRUE(run->come_to_train({0, 1})) << run->story();
  run->agent(2).worker().signal(SIGCONT);
  ASSERT_TRUE(run->come_to_train({0, 1, 2})) << run->story();
  EXPECT_EQ(run->newest().ranks.at(2), rank) << "it lived on";
  EXPECT_EQ(run->finish({0, 1, 2}), "") << run->story();
}

// The others wait for it in the next generation, so its agent ends it.
TEST_F(NetnsFaultsTest, ARankThatIsStoppedHasASuccessor) {
  const auto run = three_hosts();
  const pid_t rank = run->newest().ranks.at(1);
  ::kill(rank, SIGSTOP);
  const auto has_successor = [&] {
    const auto ranks = run->newest().ranks;
    return ranks.contains(1) && ranks.at(1) != rank;
  };
  ASSERT_TRUE(base::poll_until(has_successor, base::Deadline(std::chrono::seconds(60)))) << run->story();
  ASSERT_TRUE(run->come_to_train({0, 1, 2})) << run->story();
  EXPECT_EQ(run->finish({0, 1, 2}), "") << run->story();
}

TEST_F(NetnsFaultsTest, WithCertificatesAgentsStoresAndRanksReachEachOther) {
  const Authority authority;
  const net::TlsOptions files = authority.make_node("all");
  const ScopedEnv certificate("COHORT_TLS_CERTIFICATE", files.certificate.string()),
      key("COHORT_TLS_KEY", files.key.string()),
      authorities("COHORT_TLS_AUTHORITIES", files.authorities.string());
  VirtualRun run({.num_hosts = 2, .num_steps = 50});
  for (int host = 0; host < 2; ++host) run.start(host);
  ASSERT_TRUE(run.come_to_train({0, 1})) << run.story();
  EXPECT_EQ(run.finish({0, 1}), "") << run.story();
}

// Of agents and ranks: deadlines are of the clock that nobody sets.
TEST_F(NetnsFaultsTest, AClockThatJumpsChangesNothing) {
  VirtualRun run({.silence_ms = 3'000});  // nobody is silent for so long, however busy this machine is
  const auto file = [&](int host) { return (run.folder() / concat("clock ", host)).string(); };
  const auto set_clock = [&](int host, std::int64_t seconds) {
    // Not cut to length first: it is mapped.
    const base::Fd fd(::open(file(host).c_str(), O_WRONLY | O_CREAT | O_CLOEXEC, 0600));
    ASSERT_EQ(::pwrite(fd.get(), &seconds, sizeof seconds, 0), static_cast<ssize_t>(sizeof seconds));
  };
  for (int host = 0; host < 3; ++host) {
    set_clock(host, 0);
    // By its name: a path with a space would be two.
    const std::filesystem::path path = COHORT_CLOCK_LIBRARY;
    const ScopedEnv library("LD_PRELOAD", path.filename().string()),
        folder("LD_LIBRARY_PATH", path.parent_path().string()), clock("CLOCK_FILE", file(host));
    run.start(host);
  }
  ASSERT_TRUE(run.come_to_train({0, 1, 2})) << run.story();
  const std::uint64_t generation = run.newest().number;
  const auto jump = [&](std::int64_t first, std::int64_t second, std::int64_t third) {
    set_clock(0, first);
    set_clock(1, second);
    set_clock(2, third);
    return run.make_steps(10);
  };
  constexpr std::int64_t kDay = 86'400;
  ASSERT_TRUE(jump(400 * kDay, -30 * kDay, 3'600)) << run.story();
  EXPECT_EQ(run.newest().number, generation) << run.story();
  // A change of the run while clocks differ.
  ::kill(run.newest().ranks.at(1), SIGKILL);
  ASSERT_TRUE(run.come_to_train({0, 1, 2})) << run.story();
  const std::time_t now = std::time(nullptr);
  for (const auto& [host, difference] : {std::pair(0, 400 * kDay), std::pair(1, -30 * kDay)}) {
    EXPECT_NEAR(static_cast<double>(run.time_of_entry(host) - now), static_cast<double>(difference), 120);
  }
  ASSERT_TRUE(jump(0, 7 * kDay, -7 * kDay)) << run.story();
  EXPECT_EQ(run.finish({0, 1, 2}), "") << run.story();
}

}  // namespace
}  // namespace cohort::test
