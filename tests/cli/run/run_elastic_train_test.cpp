// `cohort run --elastic -- cohort train`: real agents, real ranks and their links, which tests stop and end.
#include <gtest/gtest.h>
#include <poll.h>
#include <signal.h>

#include <filesystem>
#include <fstream>
#include <sstream>
#include <string>

#include "cohort/base/error.h"
#include "cohort/base/threads/wait.h"
#include "tests/cli/job.h"
#include "tests/support/environment.h"
#include "tests/support/messages.h"
#include "tests/support/net/certificates.h"

namespace cohort::test {
namespace {

using base::concat;

class RunElasticTrainTest : public ::testing::Test {
 protected:
  // Trains until it is stopped.
  Job train(std::vector<std::string> flags, std::vector<std::string> settings = {}) {
    flags.insert(flags.end(), {"--elastic", "--bind-to=none", "--", COHORT_PROGRAM, "train",
                               "data.type=synthetic", "data.image_size=8", "data.synthetic_train=1000000",
                               "data.workers=0", "model.name=mlp", "optim.lr=0.001", "train.batch_size=2",
                               "train.epochs=1", "run.dir=" + (dir / "run").string()});
    if (settings.empty()) settings = {"distributed.elastic=true"};
    flags.insert(flags.end(), settings.begin(), settings.end());
    return Job(dir.path(), std::move(flags));
  }
  std::uintmax_t ledger_size() const {
    const auto ledger = dir / "run" / "ledger.csv";
    return std::filesystem::exists(ledger) ? std::filesystem::file_size(ledger) : 0;
  }
  // Steps are made from now on.
  bool makes_steps() const {
    const auto before = ledger_size();
    return base::poll_until([&] { return ledger_size() > before + 100; },
                            base::Deadline(std::chrono::seconds(60)));
  }
  static bool logs(const Job& job, const std::string& text) {
    return base::poll_until([&] { return job.err().find(text) != std::string::npos; },
                            base::Deadline(std::chrono::seconds(60)));
  }
  // The process in this place of a node.
  static pid_t rank_of(Job& job, int local_rank) {
    const auto agent = std::to_string(job.worker().pid());
    std::ifstream children(concat("/proc/", agent, "/task/", agent, "/children"));
    for (pid_t child = 0; children >> child;) {
      const std::string variables = read_file(concat("/proc/", child, "/environ"));
      if (variables.find(concat('\0', "LOCAL_RANK=", local_rank, '\0')) != std::string::npos) return child;
    }
    ADD_FAILURE() << "no rank is in place " << local_rank << ": " << job.err();
    return 0;
  }

  TempDir dir;
  const std::string port = std::to_string(free_port());
  ScopedEnv threads{"OMP_NUM_THREADS", "1"};
};

// The other one has lost its link after net's 2 s. Nobody else can say so.
TEST_F(RunElasticTrainTest, ARankThatWasStoppedAndItsNeighbourContinueWithNewLinks) {
  Job job = train({"--standalone", "--nproc-per-node=2"});
  ASSERT_TRUE(makes_steps()) << job.err();
  const pid_t rank = rank_of(job, 1);
  ASSERT_NE(rank, 0);
  ASSERT_EQ(::kill(rank, SIGSTOP), 0);
  EXPECT_TRUE(logs(job, "generation 2: 1 agents, 2 processes; ranks of agent 1 at ")) << job.err();
  ASSERT_EQ(::kill(rank, SIGCONT), 0);
  EXPECT_TRUE(makes_steps()) << job.err();
  EXPECT_EQ(rank_of(job, 1), rank) << "it lives on";
  job.worker().signal(SIGTERM);
  EXPECT_EQ(job.wait(), 143) << job.err();
}

TEST_F(RunElasticTrainTest, ARankThatStaysStoppedHasASuccessor) {
  Job job = train(
      {"--standalone", "--nproc-per-node=2", "--max-restarts=1", "--silence=200", "--monitor-interval=2"});
  ASSERT_TRUE(makes_steps()) << job.err();
  const pid_t rank = rank_of(job, 1);
  ASSERT_NE(rank, 0);
  ASSERT_EQ(::kill(rank, SIGSTOP), 0);
  EXPECT_TRUE(
      logs(job, "local rank 1 is killed, and has a successor: it has not answered its agent for 2000 ms"))
      << job.err();
  EXPECT_TRUE(makes_steps()) << job.err();
  EXPECT_NE(rank_of(job, 1), rank);
  job.worker().signal(SIGTERM);
  EXPECT_EQ(job.wait(), 143) << job.err();
}

// Two agents live: neither node is dropped.
TEST_F(RunElasticTrainTest, AStoppedRankOfALivingAgentIsReplacedAndItsNodeStays) {
  const std::vector<std::string> flags{"--nnodes=2:2", "--rdzv-endpoint=127.0.0.1:" + port,
                                       "--max-restarts=1", "--silence=200"};
  Job first = train(flags);
  Job second = train(flags);
  ASSERT_TRUE(makes_steps()) << first.err() << second.err();
  const pid_t rank = rank_of(second, 0);
  ASSERT_NE(rank, 0);
  ASSERT_EQ(::kill(rank, SIGSTOP), 0);
  EXPECT_TRUE(logs(second, "local rank 0 is killed, and has a successor")) << second.err();
  EXPECT_TRUE(makes_steps()) << first.err() << second.err();
  EXPECT_EQ(first.err().find("is dropped"), std::string::npos) << first.err();
  first.worker().signal(SIGTERM);
  second.worker().signal(SIGTERM);
  EXPECT_EQ(first.wait(), 143) << first.err();
  EXPECT_NE(second.wait(), 0);
}

// It must not wait for the end of its time to be killed.
TEST_F(RunElasticTrainTest, RanksOfANodeThatLeavesEndByThemselves) {
  const std::vector<std::string> flags{"--nnodes=1:2", "--rdzv-endpoint=127.0.0.1:" + port, "--warm-ranks=1"};
  Job first = train(flags);
  ASSERT_TRUE(makes_steps()) << first.err();
  Job second = train(flags);
  ASSERT_TRUE(logs(first, "generation 2: 2 agents")) << first.err();
  ASSERT_TRUE(makes_steps()) << first.err() << second.err();
  second.worker().signal(SIGTERM);
  EXPECT_EQ(second.wait(), 143) << second.err();
  EXPECT_EQ(second.err().find("is killed"), std::string::npos) << second.err();
  EXPECT_TRUE(makes_steps()) << first.err();
  first.worker().signal(SIGTERM);
  EXPECT_EQ(first.wait(), 143) << first.err();
}

TEST_F(RunElasticTrainTest, AConfigurationThatIsNotElasticIsRejected) {
  Job job = train({"--standalone", "--nproc-per-node=2", "--max-restarts=0"}, {"distributed.elastic=false"});
  EXPECT_EQ(job.wait(), 2) << job.err();
  expect_in(job.err(), {"distributed.elastic is false, and cohort run --elastic has started this process"});
  EXPECT_FALSE(std::filesystem::exists(dir / "run" / "checkpoints"));
}

// Agents, stores and ranks of one run have the same certificates, or nobody reaches anybody.
TEST_F(RunElasticTrainTest, AnEncryptedRunTrainsOnTwoNodes) {
  const Authority authority;
  const net::TlsOptions files = authority.make_node("node");
  const ScopedEnv certificate("COHORT_TLS_CERTIFICATE", files.certificate.string());
  const ScopedEnv key("COHORT_TLS_KEY", files.key.string());
  const ScopedEnv authorities("COHORT_TLS_AUTHORITIES", files.authorities.string());
  const std::vector<std::string> flags{"--nnodes=2:2", "--rdzv-endpoint=127.0.0.1:" + port};
  Job first = train(flags);
  // Else the second one may have the record, and wait for another node when the first one leaves.
  ASSERT_TRUE(logs(first, "has the only record")) << first.err();
  Job second = train(flags);
  EXPECT_TRUE(makes_steps()) << first.err() << second.err();
  first.worker().signal(SIGTERM);
  EXPECT_EQ(first.wait(), 143) << first.err();
  EXPECT_NE(second.wait(), 0);
}

}  // namespace
}  // namespace cohort::test
