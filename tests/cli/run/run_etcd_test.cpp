// `cohort run --rdzv-backend etcd`: the record of a run is in etcd, and any agent may die.
#include <gtest/gtest.h>
#include <signal.h>

#include <algorithm>
#include <filesystem>
#include <string>

#include "cohort/base/error.h"
#include "tests/cli/job.h"
#include "tests/support/environment.h"
#include "tests/support/messages.h"
#include "tests/support/net/etcd.h"
#include "tests/support/net/http.h"

namespace cohort::test {
namespace {

TEST(RunEtcdTest, TheFirstAgentDiesAndTheRunContinues) {
  const ScopedEnv threads("OMP_NUM_THREADS", "1");
  const TempDir dir;
  const EtcdCluster etcd;
  const auto agent = [&](const std::string& name) {
    return Job(dir.path(), {"--nnodes=1:2", "--rdzv-backend=etcd", "--rdzv-endpoint=" + etcd.endpoint(0),
                            "--rdzv-id=job7", "--no-secret", "--bind-to=none", "--", "/bin/sh", "-c",
                            "cd \"$FOLDER\"; touch up_${WORLD_SIZE}_${RANK}_" + name +
                                "; while [ ! -e go ]; do sleep 0.02; done"});
  };
  Job first = agent("a");
  ASSERT_TRUE(comes(dir / "up_1_0_a")) << first.err();
  Job second = agent("b");
  ASSERT_TRUE(comes(dir / "up_2_1_b")) << second.err();
  first.worker().signal(SIGKILL);
  ASSERT_TRUE(comes(dir / "up_1_0_b")) << second.err();
  write_file(dir / "go", "");
  EXPECT_EQ(second.wait(), 0) << second.err();
  EXPECT_EQ(second.err().find("the run ends if"), std::string::npos) << second.err();
}

class ElasticRunInEtcdTest : public ::testing::Test {
 protected:
  Job agent(std::vector<std::string> more = {}, const std::vector<std::string>& arguments = {}) {
    more.insert(more.end(),
                {"--elastic", "--rdzv-backend=etcd", "--rdzv-endpoint=" + etcd.endpoint(0), "--rdzv-id=job8",
                 "--no-secret", "--bind-to=none", "--silence=100", "--shutdown-timeout=20"});
    if (more.front().rfind("--nnodes=", 0) != 0) more.push_back("--nnodes=1:2");
    more.insert(more.end(), {"--", COHORT_ELASTIC_PROGRAM});
    more.insert(more.end(), arguments.begin(), arguments.end());
    return Job(dir.path(), std::move(more));
  }
  bool enters(const std::string& name) {
    const bool has_come = comes(dir / name);
    std::filesystem::remove(dir / name);
    return has_come;
  }
  const ScopedEnv threads{"OMP_NUM_THREADS", "1"};
  const TempDir dir;
  const EtcdCluster etcd{1, {"--quota-backend-bytes=2000000"}};
};

// The record stays for a minute, and must not be taken for that of the next run.
TEST_F(ElasticRunInEtcdTest, ARunThatAllNodesHaveLeftBeginsAnewWithTheSameCommand) {
  Job first = agent();
  ASSERT_TRUE(enters("in_1_0_of_1")) << first.err();
  Job second = agent();
  ASSERT_TRUE(enters("in_2_1_of_2")) << second.err();
  first.worker().signal(SIGTERM);
  second.worker().signal(SIGTERM);
  EXPECT_EQ(first.wait(), 143) << first.err();
  EXPECT_EQ(second.wait(), 143) << second.err();
  Job third = agent();
  ASSERT_TRUE(enters("in_1_0_of_1")) << third.err();
  write_file(dir / "go", "");
  EXPECT_EQ(third.wait(), 0) << third.err();
  Job fourth = agent();
  EXPECT_EQ(fourth.wait(), 1);
  expect_in(fourth.err(), {"run job8 has succeeded already"});
}

// Each could leave the run to the other one, and the record would say for ever that the run continues.
TEST_F(ElasticRunInEtcdTest, TwoNodesWhoseRanksFailAtTheSameTimeEndTheRun) {
  // One whose rank has failed once less waits for another node to come.
  const std::vector<std::string> flags{"--nnodes=2:2", "--rdzv-conf=join_timeout=10"};
  Job first = agent(flags, {"fail in a generation"});
  Job second = agent(flags, {"fail in a generation"});
  const int statuses[] = {first.wait(), second.wait()};
  EXPECT_EQ(std::ranges::count(statuses, 0), 0) << first.err() << second.err();
  EXPECT_GT(std::ranges::count(statuses, 5), 0) << first.err() << second.err();
  expect_in(first.err() + second.err(), {"failed again and again, and no step was made between"});
  Job third = agent();
  EXPECT_TRUE(enters("in_1_0_of_1")) << "another run: " << third.err();
  write_file(dir / "go", "");
  EXPECT_EQ(third.wait(), 0) << third.err();
}

TEST_F(ElasticRunInEtcdTest, ARunWhoseAgentsWereKilledIsEndedByTheNextOne) {
  Job first = agent();
  ASSERT_TRUE(enters("in_1_0_of_1")) << first.err();
  first.worker().signal(SIGKILL);
  first.wait();
  Job second = agent();
  EXPECT_EQ(second.wait(), 1);
  expect_in(second.err(), {"no agent is left that had the state of generation 1"});
  Job third = agent();
  EXPECT_TRUE(enters("in_1_0_of_1")) << third.err();
  write_file(dir / "go", "");
  EXPECT_EQ(third.wait(), 0) << third.err();
}

// What an administrator asks of etcd. Returns the answer.
std::string ask_etcd(const EtcdCluster& etcd, const std::string& path, const std::string& body) {
  return http_post(etcd.port(0), "/v3" + path, body);
}

// It cannot be written down that a member is gone. The run continues as long as none is.
TEST_F(ElasticRunInEtcdTest, AFullEtcdEndsARunThatNeedsAnotherGeneration) {
  const std::vector<std::string> flags{"--nnodes=1:2", "--rdzv-conf=join_timeout=2"};
  Job first = agent(flags);
  ASSERT_TRUE(enters("in_1_0_of_1")) << first.err();
  Job second = agent(flags);
  ASSERT_TRUE(enters("in_2_0_of_2") && enters("in_2_1_of_2")) << second.err();
  std::string put = R"({"key":"L3g=","value":")";  // the key "/x"
  for (int i = 0; i < 200'000; ++i) put += "eHh4";
  put += "\"}";
  std::string answer;
  for (int i = 0; i < 10 && answer.find("space exceeded") == std::string::npos; ++i)
    answer = ask_etcd(etcd, "/kv/put", put);
  expect_in(answer, {"space exceeded"});
  second.worker().signal(SIGKILL);
  EXPECT_EQ(first.wait(), 1) << first.err();
  expect_in(first.err(), {"database space exceeded. Try: etcd is full",
                          "the store of the record has taken no other generation for 2000 ms"});

  const std::string deleted = ask_etcd(etcd, "/kv/deleterange", R"({"key":"L3g="})");
  const auto value_of = [&](const std::string& name) {
    const std::string before = '"' + name + "\":\"";
    const std::size_t begin = deleted.find(before) + before.size();
    return deleted.substr(begin, deleted.find('"', begin) - begin);
  };
  ask_etcd(etcd, "/kv/compaction", R"({"physical":true,"revision":")" + value_of("revision") + "\"}");
  ask_etcd(etcd, "/maintenance/defragment", "{}");
  ask_etcd(etcd, "/maintenance/alarm",
           R"({"action":"DEACTIVATE","alarm":"NOSPACE","memberID":")" + value_of("member_id") + "\"}");
  // The record says that a run continues whose agents are gone: the same command ends it, and then begins.
  Job third = agent(flags);
  EXPECT_EQ(third.wait(), 1);
  expect_in(third.err(), {"no agent is left that had the state of generation 2"});
  Job fourth = agent(flags);
  EXPECT_TRUE(enters("in_1_0_of_1")) << fourth.err();
  write_file(dir / "go", "");
  EXPECT_EQ(fourth.wait(), 0) << fourth.err();
}

}  // namespace
}  // namespace cohort::test
