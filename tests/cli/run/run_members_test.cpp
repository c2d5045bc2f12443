// `cohort run` with members that come, go and die: agents are processes of this host, and ranks are shell
// scripts.
#include <gtest/gtest.h>
#include <poll.h>
#include <signal.h>

#include <cstdlib>
#include <filesystem>
#include <memory>
#include <optional>

#include "cohort/base/error.h"
#include "cohort/base/threads/wait.h"
#include "tests/cli/job.h"
#include "tests/support/environment.h"
#include "tests/support/messages.h"

namespace cohort::test {
namespace {

using base::concat;

class RunMembersTest : public ::testing::Test {
 protected:
  // An agent whose ranks note that they run, "up_WORLD_RANK_NAME", and do what `script` says.
  Job agent(const std::string& name, const std::string& nnodes, const std::string& script,
            std::vector<std::string> more = {}) {
    std::vector<std::string> flags{"--nnodes=" + nnodes, "--rdzv-backend=c10d",
                                   "--rdzv-endpoint=127.0.0.1:" + port, "--bind-to=none",
                                   "--shutdown-timeout=20"};
    flags.insert(flags.end(), more.begin(), more.end());
    for (const char* word : {"--", "/bin/sh", "-c"}) flags.emplace_back(word);
    flags.push_back("cd \"$FOLDER\"; touch up_${WORLD_SIZE}_${RANK}_" + name + "; " + script);
    return Job(dir.path(), std::move(flags));
  }
  bool is_up(int world, int rank, const std::string& name) {
    return comes(dir / concat("up_", world, "_", rank, "_", name));
  }
  static bool logs(const Job& job, const std::string& text) {
    return base::poll_until([&] { return job.err().find(text) != std::string::npos; },
                            base::Deadline(std::chrono::seconds(60)));
  }
  void let_end() { write_file(dir / "go", ""); }

  const std::string until_go = "while [ ! -e go ]; do sleep 0.02; done; ";
  TempDir dir;
  const std::string port = std::to_string(free_port());
  ScopedEnv threads{"OMP_NUM_THREADS", "1"};
};

TEST_F(RunMembersTest, ALateNodeJoinsAndAllRanksStartAgain) {
  const std::string script =
      "echo has $RANK $LOCAL_RANK $GROUP_RANK $GROUP_WORLD_SIZE $WORLD_SIZE $TORCHELASTIC_RESTART_COUNT "
      "$TORCHELASTIC_MAX_RESTARTS $TORCHELASTIC_RUN_ID $MASTER_ADDR; echo port $MASTER_PORT; " +
      until_go;
  Job first = agent("a", "1:2", script, {"--nproc-per-node=2", "--rdzv-id=job7"});
  ASSERT_TRUE(is_up(2, 0, "a") && is_up(2, 1, "a"));
  Job second = agent("b", "1:2", script, {"--rdzv-id=job7"});
  ASSERT_TRUE(is_up(3, 0, "a") && is_up(3, 1, "a") && is_up(3, 2, "b"));
  let_end();
  EXPECT_EQ(first.wait(), 0) << first.err();
  EXPECT_EQ(second.wait(), 0) << second.err();
  expect_in(first.out(),
            {"[rank 1] has 1 1 0 1 2 0 0 job7 127.0.0.1\n", "[rank 1] has 1 1 0 2 3 0 0 job7 127.0.0.1\n"});
  expect_in(second.out(), {"[rank 2] has 2 0 1 2 3 0 0 job7 127.0.0.1\n"});
  expect_in(first.err(), {"has the only record of run job7: the run ends if this host dies",
                          "generation 1: node 0 of 1 starts rank 0 to 1 of 2; the run begins",
                          "generation 2: node 0 of 2 starts rank 0 to 1 of 3; agent 2 at 127.0.0.1:"});
  expect_in(
      second.err(),
      {("127.0.0.1:" + port + " has the only record of run job7: the run ends if that host dies").c_str()});
  // Each generation has a store of its own.
  const std::string out = first.out();
  const auto port_after = [&](std::size_t at) { return out.substr(out.find("port ", at), 10); };
  EXPECT_NE(port_after(0), port_after(out.rfind("has 0")));
}

TEST_F(RunMembersTest, ANodeThatDiesIsLeftOutAndMayBeReplaced) {
  Job first = agent("a", "2:2", until_go);
  ASSERT_TRUE(logs(first, "this node waits for nodes: 1 of at least 2 are there"));
  Job second = agent("b", "2:2", until_go);
  ASSERT_TRUE(is_up(2, 0, "a") && is_up(2, 1, "b"));
  std::filesystem::remove(dir / "up_2_0_a");
  second.worker().signal(SIGKILL);
  EXPECT_EQ(second.wait(), 137);
  EXPECT_TRUE(logs(first, "this node waits for nodes: 1 of at least 2 are there; agent 2 at "))
      << first.err();
  Job third = agent("c", "2:2", until_go);
  ASSERT_TRUE(is_up(2, 0, "a") && is_up(2, 1, "c"));
  let_end();
  EXPECT_EQ(first.wait(), 0) << first.err();
  EXPECT_EQ(third.wait(), 0) << third.err();
  expect_in(first.err(), {"enough agents are there again"});
}

TEST_F(RunMembersTest, ASpareTakesThePlaceOfANodeThatDies) {
  const std::vector<std::string> spare{"--spares=1"};
  Job first = agent("a", "2:2", until_go, spare);
  ASSERT_TRUE(logs(first, "this node waits for nodes: 1 of at least 2 are there"));
  Job second = agent("b", "2:2", until_go, spare);
  ASSERT_TRUE(is_up(2, 0, "a") && is_up(2, 1, "b"));
  Job third = agent("c", "2:2", until_go, spare);
  ASSERT_TRUE(logs(third, "this node is a spare of 2 nodes"));
  second.worker().signal(SIGKILL);
  ASSERT_TRUE(is_up(2, 1, "c"));
  let_end();
  EXPECT_EQ(first.wait(), 0) << first.err();
  EXPECT_EQ(third.wait(), 0) << third.err();
  expect_in(first.err(), {" died; agent 3 at 127.0.0.1:"});
}

TEST_F(RunMembersTest, TooFewNodesEndInAMessage) {
  Job first = agent("a", "2:3", "true", {"--rdzv-conf=join_timeout=0.6"});
  EXPECT_EQ(first.wait(), 1);
  expect_in(first.err(), {"the run has failed: only 1 of at least 2 agents were there for 600 ms"});
  Job second = agent("b", "2:3", "true", {"--rdzv-conf=join_timeout=1.6,is_host=false"});
  EXPECT_EQ(second.wait(), 1);
  expect_in(second.err(), {"no agent of the run answered within 1600 ms", "Connection refused"});
}

TEST_F(RunMembersTest, RanksThatFailAreStartedAgainUntilNoRestartIsLeft) {
  const std::string script =
      "echo attempt $TORCHELASTIC_RESTART_COUNT of $TORCHELASTIC_MAX_RESTARTS; "
      "if [ $RANK = 1 ]; then while [ ! -e up_0_$TORCHELASTIC_RESTART_COUNT ]; do sleep 0.02; done; "
      "echo no luck; exit 3; fi; touch up_0_$TORCHELASTIC_RESTART_COUNT; " +
      until_go;
  const std::vector<std::string> restarts{"--max-restarts=1"};
  Job first = agent("a", "2:2", script, restarts);
  ASSERT_TRUE(logs(first, "this node waits for nodes"));
  Job second = agent("b", "2:2", script, restarts);
  EXPECT_EQ(first.wait(), 3);
  EXPECT_EQ(second.wait(), 3);
  expect_in(first.out(), {"[rank 0] attempt 0 of 1\n", "[rank 0] attempt 1 of 1\n"});
  expect_in(second.out(), {"[rank 1] attempt 0 of 1\n", "[rank 1] attempt 1 of 1\n"});
  expect_in(second.err(), {"rank 1 of 2 failed first: it ended with status 3", "no luck",
                           "all ranks are started again: restart 1 of 1"});
  expect_in(first.err(), {": rank 1 ended with status 3 (host ", "(1 restarts used of 1)"});
}

TEST_F(RunMembersTest, ASignalIsANoticeAndTheOthersContinue) {
  const std::string script = "trap 'echo saved; exit 143' TERM; touch ready_${WORLD_SIZE}_$RANK; " + until_go;
  Job first = agent("a", "1:2", script);
  ASSERT_TRUE(is_up(1, 0, "a"));
  Job second = agent("b", "1:2", script);
  ASSERT_TRUE(comes(dir / "ready_2_1") && comes(dir / "ready_2_0"));
  std::filesystem::remove(dir / "ready_1_0");
  second.worker().signal(SIGTERM);
  EXPECT_EQ(second.wait(), 143);
  expect_in(second.out(), {"[rank 1] saved\n"});
  expect_in(second.err(), {"signal 15 (Terminated): this node leaves the run",
                           "ended by signal 15 (Terminated), with status 143"});
  ASSERT_TRUE(comes(dir / "ready_1_0"));
  let_end();
  EXPECT_EQ(first.wait(), 0) << first.err();
  expect_in(first.err(), {" leaves"});
}

TEST_F(RunMembersTest, TheEndpointsAgentTakesTheRunWithIt) {
  const std::string script = "trap 'exit 143' TERM; touch ready_$RANK; " + until_go;
  Job first = agent("a", "1:2", script);
  ASSERT_TRUE(is_up(1, 0, "a"));
  Job second = agent("b", "1:2", script);
  ASSERT_TRUE(is_up(2, 1, "b") && comes(dir / "ready_1"));
  first.worker().signal(SIGTERM);
  EXPECT_EQ(first.wait(), 143);
  EXPECT_EQ(second.wait(), 1);
  expect_in(second.err(), {"leaves, and it has the run's only record"});
}

TEST_F(RunMembersTest, WhenTheEndpointsAgentDiesTheOthersSaySo) {
  Job first = agent("a", "1:2", until_go);
  ASSERT_TRUE(is_up(1, 0, "a"));
  Job second = agent("b", "1:2", until_go);
  ASSERT_TRUE(is_up(2, 1, "b"));
  first.worker().signal(SIGKILL);
  EXPECT_EQ(second.wait(), 1);
  expect_in(second.err(),
            {"died, and it had the run's only record. Try: look at the agent at --rdzv-endpoint"});
}

// It has the record: an agent that is late hears how the run has ended, and not that the endpoint is gone.
TEST_F(RunMembersTest, TheEndpointOfARunThatFailsWaitsUntilAllKnow) {
  const std::vector<std::string> flags{"--rdzv-conf=join_timeout=2", "--silence=2000"};
  Job first = agent("a", "3:3", until_go, flags);
  ASSERT_TRUE(logs(first, "this node waits for nodes: 1 of at least 3 are there")) << first.err();
  Job second = agent("b", "3:3", until_go, flags);
  ASSERT_TRUE(logs(second, "this node waits for nodes: 2 of at least 3 are there")) << second.err();
  second.worker().signal(SIGSTOP);
  base::poll_until([&] { return first.worker().reap(); }, base::Deadline(std::chrono::milliseconds(3'000)));
  EXPECT_TRUE(first.worker().running()) << first.err();
  second.worker().signal(SIGCONT);
  EXPECT_EQ(second.wait(), 1);
  expect_in(second.err(), {" of at least 3 agents were there for 2000 ms"});
  EXPECT_EQ(first.wait(), 1);
}

TEST_F(RunMembersTest, ANoticeFileIsANotice) {
  const std::string notice = (dir / "notice").string();
  const std::string script = "trap 'exit 0' TERM; touch ready_$RANK; " + until_go;
  Job first = agent("a", "1:1", script, {"--notice-file=" + notice, "--monitor-interval=0.02"});
  ASSERT_TRUE(comes(dir / "ready_0"));
  write_file(notice, "");
  EXPECT_EQ(first.wait(), 0);
  expect_in(first.err(), {("the notice file " + notice + ": this node leaves the run").c_str()});
  // Before it takes part: the endpoint's name is not even waited for.
  const std::string secret = (dir / "secret").string();
  write_file(secret, "0123456789abcdef0123456789abcdef");
  std::filesystem::permissions(secret, std::filesystem::perms::owner_read);
  Job again(dir.path(),
            {"--nnodes=1:2", "--rdzv-endpoint=no-such-host.invalid:29400", "--secret-file=" + secret,
             "--rdzv-conf=join_timeout=60", "--notice-file=" + notice, "--", "true"});
  EXPECT_EQ(again.wait(), 2);
  expect_in(again.err(), {"is there already"});
}

TEST_F(RunMembersTest, ASecondSignalKillsRanks) {
  Job job = agent("a", "1:2", "trap 'touch heard' TERM; touch ready; while :; do sleep 0.02; done");
  ASSERT_TRUE(comes(dir / "ready"));
  job.worker().signal(SIGTERM);
  ASSERT_TRUE(comes(dir / "heard"));
  job.worker().signal(SIGINT);
  EXPECT_EQ(job.wait(), 143);
}

// Longer than an endpoint may be silent for.
TEST_F(RunMembersTest, AnEndpointIsKnownByTheNameThatItWasGiven) {
  const std::vector<std::string> flags{"--rdzv-endpoint=localhost:" + port, "--silence=60"};
  Job first = agent("a", "2:2", "sleep 1.5", flags);
  ASSERT_TRUE(logs(first, "this node waits for nodes"));
  Job second = agent("b", "2:2", "echo at $MASTER_ADDR; sleep 1.5", flags);
  EXPECT_EQ(first.wait(), 0) << first.err();
  EXPECT_EQ(second.wait(), 0) << second.err();
  expect_in(second.out(), {"at localhost\n"});
}

TEST_F(RunMembersTest, RanksMeetAtTheStoreOfTheirGeneration) {
  const auto start = [&] {
    return Job(dir.path(), {"--nnodes=2", "--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:" + port,
                            "--bind-to=none", "--", COHORT_RANK_PROGRAM});
  };
  Job first = start(), second = start();
  EXPECT_EQ(first.wait(), 0) << first.err();
  EXPECT_EQ(second.wait(), 0) << second.err();
  expect_in(first.out() + second.out(), {"[rank 0] rank 0 of 2: sum 3\n", "[rank 1] rank 1 of 2: sum 3\n"});
}

TEST_F(RunMembersTest, AnAgentOfTorchrunIsRejectedByName) {
  Job first = agent("a", "1:2", until_go);
  ASSERT_TRUE(is_up(1, 0, "a"));
  const char* const python = std::getenv("COHORT_PYTHON");
  ASSERT_NE(python, nullptr) << "COHORT_PYTHON is not set: Python with torch";
  const launch::Fd err = open_for_writing(dir / "torchrun_err");
  launch::Worker torchrun({.program = python,
                           .arguments = {python, "-m", "torch.distributed.run", "--nnodes=2",
                                         "--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:" + port,
                                         "--rdzv-conf=is_host=0,read_timeout=5", "--no-python", "true"},
                           .environment = launch::environment_with({}),
                           .output = err.get(),
                           .error = err.get(),
                           .own_group = true});
  EXPECT_TRUE(logs(first, "who connected is a client of LibTorch's TCPStore, as agents of torchrun are"))
      << first.err();
  expect_in(first.err(), {"`cohort run` on all nodes, or torchrun on all"});
  torchrun.kill();
  let_end();
  EXPECT_EQ(first.wait(), 0) << first.err();
}

TEST_F(RunMembersTest, WhatDoesNotFitTheRunIsNamed) {
  Job first = agent("a", "1:2", until_go);
  ASSERT_TRUE(is_up(1, 0, "a"));
  Job other = agent("b", "1:3", until_go);
  EXPECT_EQ(other.wait(), 1);
  expect_in(other.err(), {"the run has other settings: max_nodes is 3 here, and 2 in the run"});
  Job host = agent("c", "1:2", until_go, {"--rdzv-conf=is_host=true"});
  EXPECT_EQ(host.wait(), 1);
  expect_in(host.err(), {("cannot listen at 127.0.0.1:" + port).c_str(), "Address already in use"});
  let_end();
  EXPECT_EQ(first.wait(), 0) << first.err();
}

}  // namespace
}  // namespace cohort::test
