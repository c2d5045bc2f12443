// Runs of `cohort train` on hosts of its own that cannot continue: they end with a message and a status, and
// the same command resumes them.
#include <gtest/gtest.h>

#include <map>
#include <memory>
#include <string>

#include "cohort/base/threads/wait.h"
#include "tests/cli/job.h"
#include "tests/cli/netns/netns.h"
#include "tests/support/environment.h"
#include "tests/support/messages.h"
#include "tests/train/elastic/run_files.h"

namespace cohort::test {
namespace {

constexpr int kSamples = 400, kEpochs = 3, kStepsAnEpoch = 50;  // of 4 virtual ranks with 2 samples

class NetnsResumeTest : public NetnsTest {
 protected:
  void SetUp() override {
    NetnsTest::SetUp();
    if (IsSkipped() || HasFatalFailure()) return;
    hosts = std::make_unique<VirtualHosts>(3);
    write_file(dir / "secret", "a secret of the tests");
    std::filesystem::permissions(dir / "secret", std::filesystem::perms::owner_read);
  }
  void TearDown() override { agents.clear(); }

  std::vector<std::string> train(const std::string& folder) const {
    return {"train",
            "data.type=synthetic",
            "data.image_size=8",
            "data.synthetic_train=" + std::to_string(kSamples),
            "data.synthetic_val=16",
            "data.workers=0",
            "model.name=mlp",
            "optim.lr=0.001",
            "optim.momentum=0.9",
            "train.batch_size=2",
            "train.threads=1",
            "train.epochs=" + std::to_string(kEpochs),
            "run.save_every_steps=10",
            "run.dir=" + (dir / folder).string()};
  }
  void start(int host) {
    std::vector<std::string> words{"--elastic",
                                   "--nnodes=2:3",
                                   "--virtual-ranks=4",
                                   "--rdzv-endpoint=" + VirtualHosts::address(0),
                                   "--rdzv-conf=join_timeout=2",
                                   "--secret-file=" + (dir / "secret").string(),
                                   "--silence=200",
                                   "--bind-to=none",
                                   "--",
                                   COHORT_PROGRAM};
    for (const std::string& word : train("run")) words.push_back(word);
    words.emplace_back("distributed.elastic=true");
    hosts->enter(host, [&] { agents[host] = std::make_unique<Job>(dir.path(), words); });
  }
  void start_all() {
    for (int host = 0; host < 3; ++host) start(host);
  }
  // Steps of which the ledger has a line.
  std::size_t num_steps() const {
    const auto ledger = dir / "run" / "ledger.csv";
    if (!std::filesystem::exists(ledger)) return 0;
    const std::string text = read_file(ledger);
    const auto lines = static_cast<std::size_t>(std::ranges::count(text, '\n'));
    return lines == 0 ? 0 : lines - 1;
  }
  bool comes_to_step(std::size_t step) const {
    return base::poll_until([&] { return num_steps() >= step; }, base::Deadline(std::chrono::seconds(60)));
  }
  void fail_host(int host) {
    hosts->isolate(host);
    agents.at(host)->worker().kill();
    agents.at(host)->wait();
  }
  std::string story() const {
    std::string story;
    for (const auto& [host, job] : agents) story += "---- host " + std::to_string(host) + "\n" + job->err();
    return story;
  }

  const TempDir dir;
  const ScopedEnv threads{"OMP_NUM_THREADS", "1"};
  std::unique_ptr<VirtualHosts> hosts;
  std::map<int, std::unique_ptr<Job>> agents;
};

TEST_F(NetnsResumeTest, ARunThatCannotContinueEndsWithAMessageAndTheSameCommandResumesIt) {
  start_all();
  ASSERT_TRUE(comes_to_step(20)) << story();
  for (const int host : {1, 2}) hosts->isolate(host);
  for (const int host : {1, 2}) fail_host(host);
  EXPECT_EQ(agents[0]->wait(), 1) << story();
  expect_in(agents[0]->err(), {"of at least 2 agents were there for 2000 ms"});

  hosts->heal();
  const std::size_t steps = num_steps();
  ASSERT_LT(steps, kStepsAnEpoch * 2) << "the run was too quick to be interrupted twice";
  start_all();
  ASSERT_TRUE(comes_to_step(steps + 20)) << story();
  fail_host(0);
  for (const int host : {1, 2}) {
    EXPECT_EQ(agents[host]->wait(), 1) << story();
    expect_in(agents[host]->err(), {"was silent for 4000 ms, and it has the run's only record"});
  }

  hosts->heal();
  start_all();
  for (const auto& [host, job] : agents) EXPECT_EQ(job->wait(), 0) << story();
  launch::Worker alone({.program = COHORT_PROGRAM,
                        .arguments =
                            [&] {
                              std::vector<std::string> words = train("alone");
                              words.insert(words.begin(), COHORT_PROGRAM);
                              words.emplace_back("distributed.virtual_ranks=4");
                              return words;
                            }(),
                        .environment = launch::environment_with({}),
                        .own_group = true});
  ASSERT_TRUE(base::poll_until([&] { return alone.reap(); }, base::Deadline(std::chrono::seconds(60))));
  ASSERT_EQ(launch::exit_status(alone.wait_status()), 0);
  for (const char* const file : {"model.safetensors", "optimizer.safetensors"}) {
    EXPECT_TRUE(read_file(dir / "run" / "checkpoints" / "last" / file) ==
                read_file(dir / "alone" / "checkpoints" / "last" / file))
        << file << story();
  }
  EXPECT_EQ(ledger_fault(read_file(dir / "run" / "ledger.csv"), kEpochs * kStepsAnEpoch, kSamples), "");
}

}  // namespace
}  // namespace cohort::test
