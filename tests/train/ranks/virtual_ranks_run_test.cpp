// `cohort train` with virtual ranks, each process a process: dropout draws from its global generator.
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>

#include "cohort/base/error.h"
#include "cohort/checkpoint/manifest.h"
#include "cohort/train/run.h"
#include "tests/support/contains.h"
#include "tests/support/environment.h"
#include "tests/support/processes.h"
#include "tests/support/throws.h"
#include "tests/train/small_run.h"

namespace cohort::train {
namespace {

// A VGG with dropout; the last step of each epoch has 6 samples in place of 8.
const std::vector<std::string> kVirtualRun = {"model.name=vgg11",         "model.options={}",
                                              "model.width=0.03",         "model.pools=2",
                                              "model.head=default",       "data.image_size=8",
                                              "data.synthetic_train=22",  "train.batch_size=2",
                                              "optim.clip_norm=1",        "optim.lr_scaling=linear",
                                              "train.threads=1",          "distributed.virtual_ranks=4",
                                              "distributed.backend=gloo", "comm.timeout=20"};

config::Config virtual_config(const std::filesystem::path& folder, std::vector<std::string> more) {
  const test::SmallRun small;
  more.insert(more.begin(), kVirtualRun.begin(), kVirtualRun.end());
  more.push_back("run.dir=" + folder.string());
  return small.config(more);
}

TEST(VirtualRanksRunChild, DISABLED_Train) {
  const std::string epochs = ::getenv("VIRTUAL_RUN_EPOCHS");
  const RunResult result = run_training(
      virtual_config(::getenv("VIRTUAL_RUN_FOLDER"), {"run.resume=auto", "train.epochs=" + epochs}), "test");
  EXPECT_TRUE(result.fit.finished);
}

/// Runs or continues `folder` on `processes` processes. Returns what the first one wrote.
std::string train_in_processes(int processes, const std::filesystem::path& folder,
                               const std::string& epochs) {
  test::RankProcesses ranks("VirtualRanksRunChild", processes,
                            {{"VIRTUAL_RUN_FOLDER", folder.string()}, {"VIRTUAL_RUN_EPOCHS", epochs}});
  EXPECT_EQ(ranks.wait(), std::vector<int>(static_cast<std::size_t>(processes), 0)) << ranks.output(0);
  return ranks.output(0);
}

/// What the last checkpoint of a run holds, without what tells of times and of the processes.
struct CheckpointBytes {
  explicit CheckpointBytes(const std::filesystem::path& folder) {
    const auto last = folder / "checkpoints" / "last";
    model = test::read_file(last / "model.safetensors");
    optimizer = test::read_file(last / "optimizer.safetensors");
    run = checkpoint::read_manifest(last).state.at("run");
    for (const char* name : {"epoch_seconds", "wait_seconds", "world_size", "description"}) run.erase(name);
  }
  std::string model, optimizer;
  nlohmann::json run;
};

TEST(VirtualRanksRunTest, ARunWithDropoutHasTheSameBytesOnOtherAndOnChangingProcesses) {
  const test::TempDir dir;
  const auto train_alone = [&](const char* name) {
    return run_training(virtual_config(dir / name, {"run.resume=auto", "train.epochs=3"}), "test");
  };
  train_alone("alone");
  const std::string log = train_in_processes(3, dir / "three", "3");
  EXPECT_TRUE(test::contains(log, "4 virtual ranks on 3 processes: a process is idle for 33.3 % of a step"))
      << log;
  EXPECT_TRUE(test::contains(log, "for steps of 8 samples")) << "batch_size is of a virtual rank: " << log;
  train_in_processes(2, dir / "changing", "1");
  train_in_processes(4, dir / "changing", "2");
  train_alone("changing");
  const CheckpointBytes alone(dir / "alone");
  for (const char* name : {"three", "changing"}) {
    const CheckpointBytes other(dir / name);
    EXPECT_TRUE(alone.model == other.model) << name;
    EXPECT_TRUE(alone.optimizer == other.optimizer) << name;
    EXPECT_EQ(alone.run, other.run) << name;
  }
  EXPECT_EQ(alone.run.at("virtual_ranks"), 4);
  EXPECT_GT(alone.run.at("best_epoch"), 0);
}

TEST(VirtualRanksRunTest, AResumeTakesTheThreadsThatTheRunBeganWith) {
  const test::TempDir dir;
  run_training(virtual_config(dir / "run", {"train.epochs=1"}), "test");
  // The number that 0 stands for does not matter then.
  run_training(virtual_config(dir / "run", {"run.resume=auto", "train.epochs=2", "train.threads=0"}), "test");
  EXPECT_EQ(CheckpointBytes(dir / "run").run.at("threads"), 1);
  COHORT_EXPECT_THROW_WITH(
      run_training(virtual_config(dir / "run", {"run.resume=auto", "distributed.virtual_ranks=2"}), "test"),
      ConfigError, "distributed.virtual_ranks 4 -> 2");
}

TEST(VirtualRanksRunTest, CombinationsThatDoNotWorkNameBothKeys) {
  const test::TempDir dir;
  const auto start = [&](const std::string& override_text) {
    run_training(virtual_config(dir / "run", {override_text}), "test");
  };
  const std::pair<const char*, const char*> cases[] = {
      {"distributed.gradients=none", "distributed.gradients is none"},
      {"distributed.model=pipeline", "distributed.model is pipeline"},
      {"distributed.model=data_parallel", "distributed.model is data_parallel"},
      {"distributed.comm_hook=fp16", "distributed.comm_hook is fp16"}};
  for (const auto& [override_text, named] : cases) {
    COHORT_EXPECT_THROW_WITH(start(override_text), ConfigError,
                             base::concat("distributed.virtual_ranks is 4 and ", named));
  }
  const test::ScopedEnv world("WORLD_SIZE", "5"), rank("RANK", "0"), local("LOCAL_RANK", "0"),
      local_world("LOCAL_WORLD_SIZE", "5"), host("MASTER_ADDR", "127.0.0.1"), port("MASTER_PORT", "1");
  COHORT_EXPECT_THROW_WITH(
      start("train.epochs=1"), ConfigError,
      "distributed.virtual_ranks is 4, and there are 5 processes: some would have nothing to "
      "compute. Try: at most 4 processes");
}

}  // namespace
}  // namespace cohort::train
