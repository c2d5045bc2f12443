// `cohort train` on a GPU: the device is a word in the configuration.
#include <nlohmann/json.hpp>
#include <sstream>

#include "gpu_test.h"
#include "tests/cli/program.h"

namespace cohort::test {
namespace {

namespace fs = std::filesystem;

// Gentle steps: kernels of GPUs sum in other orders than the CPU's, some in another one each time.
class GpuTrainTest : public TrainProgramTest {
 protected:
  void SetUp() override {
    skip_without_gpu();
    if (IsSkipped()) return;
    TrainProgramTest::SetUp();
  }
  using Words = std::vector<std::string>;
  void train_in(const std::string& folder, const Words& more) {
    SCOPED_TRACE(folder);
    Words words = {"optim.lr=0.001", "optim.momentum=0", "data.drop_last=true"};
    words.insert(words.end(), more.begin(), more.end());
    const Outcome outcome = run(train(folder, words));
    ASSERT_EQ(outcome.status, 0) << outcome.out << outcome.err;
    ASSERT_FALSE(model(folder).empty());
  }
  double last(const std::string& folder, const std::string& metric) const {
    std::istringstream lines(read_file(dir / folder / "metrics.jsonl"));
    double value = -1;
    for (std::string line; std::getline(lines, line);) {
      const auto row = nlohmann::json::parse(line);
      if (row.contains(metric)) value = row.at(metric).get<double>();
    }
    return value;
  }
};

TEST_F(GpuTrainTest, TrainsEvaluatesAndItsCheckpointRunsOnTheCpu) {
  train_in("gpu", {"train.device=cuda"});
  train_in("cpu", {"train.device=cpu"});
  EXPECT_GE(last("gpu", "val_loss"), 0) << read_file(dir / "gpu" / "metrics.jsonl");
  EXPECT_NEAR(last("gpu", "val_loss"), last("cpu", "val_loss"), 0.05);
  for (const char* device : {"cpu", "cuda"}) {
    const Outcome outcome = run({"eval", "--run", "gpu", "--checkpoint", "last", "--device", device});
    EXPECT_EQ(outcome.status, 0) << outcome.err;
    EXPECT_NE(outcome.out.find("accuracy "), std::string::npos) << outcome.out;
  }
  train_in("gpu", {"train.device=cpu", "train.epochs=6", "--resume", "auto"});
}

TEST_F(GpuTrainTest, ScriptAccumulationBf16ClippingAndMemoryFormat) {
  train_in("script", {"train.device=cuda", "train.script=true"});
  train_in("all", {"train.device=cuda", "train.precision=bf16", "optim.clip_norm=1", "train.accumulate=2",
                   "train.memory_format=channels_last", "data.pin_memory=true"});
}

TEST_F(GpuTrainTest, AResumedRunEndsAsOneThatWasNotStopped) {
  train_in("straight", {"train.device=cuda", "train.epochs=4"});
  train_in("parts", {"train.device=cuda", "train.epochs=4", "train.max_steps=13"});
  train_in("parts", {"train.device=cuda", "train.epochs=4", "--resume", "auto"});
  EXPECT_NEAR(last("straight", "val_loss"), last("parts", "val_loss"), 1e-2);
}

TEST_F(GpuTrainTest, EveryModelRunnerOverAGpuAndACore) {
  train_in("alone", {"train.device=cuda"});
  for (const std::string model : {"data_parallel", "model_parallel", "pipeline"}) {
    train_in(
        model,
        {"train.device=cuda", "distributed.model=" + model, "distributed.devices=\"cuda:0, cpu:0\"",
         model == "data_parallel" ? "run.log_every=2"
                                  : "distributed.device_map={features: \"cuda:0\", classifier: \"cpu:0\"}"});
    EXPECT_NEAR(last(model, "val_loss"), last("alone", "val_loss"), 0.05);
  }
}

TEST_F(GpuTrainTest, RanksOverNccl) {
  train_in("nccl", {"train.device=cuda", "distributed.gradients=ddp", "distributed.backend=nccl"});
}

}  // namespace
}  // namespace cohort::test
