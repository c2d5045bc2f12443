// Numbers that are not finite, in checkpoints.
#include <ATen/ATen.h>
#include <gtest/gtest.h>
#include <torch/nn.h>

#include <cmath>
#include <limits>
#include <nlohmann/json.hpp>

#include "cohort/optim/sgd.h"
#include "cohort/train/run_state.h"

namespace cohort::train {
namespace {

constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();
constexpr double kInfinity = std::numeric_limits<double>::infinity();

/// A regression whose evaluation says what the test wants it to say, an entry per evaluation.
struct Scripted : Task {
  explicit Scripted(std::string name, std::vector<double> values = {1})
      : name(std::move(name)), values(std::move(values)) {
    add_module("", net.ptr());
    add_optimizer("", sgd);
  }
  StepMetrics train_step(data::Batch& batch) override {
    ++steps;
    sgd->zero_grad();
    const at::Tensor loss = net->forward(batch.input()).square().mean();
    loss.backward();
    sgd->step();
    return {{"loss", loss.detach(), static_cast<double>(batch.size)}};
  }
  StepMetrics eval_step(data::Batch&) override {
    ++evaluations;
    // The first one comes before training.
    const std::size_t at = evaluations < 2 ? 0 : (evaluations - 2) % values.size();
    return {{name, values.at(at), 1}};
  }
  torch::nn::Linear net{2, 1};
  std::shared_ptr<optim::Optimizer> sgd =
      std::make_shared<optim::SGD>(net->parameters(), optim::SGDOptions(0.01));
  std::string name;
  std::vector<double> values;
  std::size_t evaluations = 0;
  int steps = 0;
};

TEST(EvaluationTest, MetersAndOptionsThatAreNotFiniteAreReadBackAndNullIsNaN) {
  Scripted task("loss"), same("loss");
  RunState state;
  state.meters = {{"a", {kNaN, 1}}, {"b", {kInfinity, 2}}, {"c", {-kInfinity, 3}}, {"d", {0.1, 4}}};
  state.best = kNaN;
  task.sgd->param_groups()[0].lr = kInfinity;
  checkpoint::CheckpointContent content = capture(task, state);
  content.state = nlohmann::json::parse(content.state.dump());
  RunState read = restore(same, content);
  EXPECT_TRUE(std::isnan(read.meters.at("a").weighted));
  EXPECT_EQ(read.meters.at("b").weighted, kInfinity);
  EXPECT_EQ(read.meters.at("c").weighted, -kInfinity);
  EXPECT_EQ(read.meters.at("d").weighted, 0.1);
  EXPECT_TRUE(std::isnan(read.best));
  EXPECT_EQ(same.sgd->param_groups()[0].lr, kInfinity);

  content.state["run"]["best"] = nullptr;  // as older versions wrote it
  content.state["run"]["meters"]["a"] = {nullptr, 1};
  read = restore(same, content);
  EXPECT_TRUE(std::isnan(read.best) && std::isnan(read.meters.at("a").weighted));
}

}  // namespace
}  // namespace cohort::train
