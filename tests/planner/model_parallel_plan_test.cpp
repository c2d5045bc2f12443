#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "cohort/base/error.h"
#include "cohort/planner/memory_plan.h"
#include "tests/support/throws.h"

namespace cohort::planner {
namespace {

constexpr const char* kTwoParts = R"(
model: {name: resnet18, num_classes: 10, width: 0.5}
data: {type: synthetic, image_size: 64}
train: {batch_size: 24, device: cpu}
distributed: {model: model_parallel, gradients: none}
)";

MemoryPlan plan_of_parts(const std::vector<std::string>& device_map, const MemoryOptions& options = {}) {
  std::vector<std::string> overrides;
  for (const std::string& entry : device_map) overrides.push_back("distributed.device_map." + entry);
  return plan_memory(config::load_config_text(kTwoParts, "test.yaml", overrides), options);
}

TEST(ModelParallelPlanTest, ModelParallelIsPlannedByItsConfiguration) {
  const MemoryPlan plan = plan_of_parts({"conv1=cpu:0/b", "bn1=cpu:0/b", "layer1=cpu:0/b", "layer2=cpu:0/b",
                                         "layer3=cpu:0/a", "layer4=cpu:0/a", "fc=cpu:0/a"},
                                        {.measure = true});
  EXPECT_EQ(plan.runner, "model_parallel");
  ASSERT_EQ(plan.places.size(), 4U);
  const MemoryUse &rest = plan.places[0].predicted, &all = plan.places[3].predicted;
  // relu, maxpool and avgpool have no entry, and are with the layer before. The loss stays.
  EXPECT_EQ(rest.model, 0);
  EXPECT_EQ(rest.gradients, 0);
  EXPECT_LT(*rest.activations, *all.activations / 100);
  EXPECT_EQ(plan.places[1].name, "cpu:0/b") << "in the order of the layers";
  EXPECT_EQ(plan.places[2].name, "cpu:0/a");
  for (std::size_t i = 1; i < 3; ++i) {
    const PlaceMemory& place = plan.places[i];
    SCOPED_TRACE(place.name);
    EXPECT_EQ(place.predicted.gradients, place.measured.gradients);
    EXPECT_GT(place.measured.activations.value_or(0), 0);
    EXPECT_NEAR(double(*place.predicted.activations) / double(*place.measured.activations), 1, 0.02);
  }
  EXPECT_EQ(*plan.places[1].predicted.model + *plan.places[2].predicted.model,
            plan.parameters + plan.buffers);
}

TEST(ModelParallelPlanTest, RejectsTheMapsThatTheRunRejects) {
  COHORT_EXPECT_THROW_WITH(plan_of_parts({"layer1=cpu:0/a", "layer4=cpu:0/b"}), ConfigError,
                           "distributed.device_map says nothing of the layer conv1");
  const std::vector<std::string> misspelt = {"conv1=cpu:0/a",  "bn1=cpu:0/a",    "layer1=cpu:0/a",
                                             "layer2=cpu:0/a", "layer3=cpu:0/b", "layer_4=cpu:0/b",
                                             "fc=cpu:0/b"};
  COHORT_EXPECT_THROW_WITH(plan_of_parts(misspelt), ConfigError, "the model has no layer \"layer_4\"");
}

TEST(ModelParallelPlanTest, PlacesThatAreAskedForCompleteTheMap) {
  MemoryOptions options;
  options.device_map["fc"] = base::Placement::parse("cpu:0/b");
  const MemoryPlan plan = plan_of_parts({"conv1=cpu:0/a", "bn1=cpu:0/a", "layer1=cpu:0/a", "layer2=cpu:0/a",
                                         "layer3=cpu:0/a", "layer4=cpu:0/a"},
                                        options);
  ASSERT_EQ(plan.places.size(), 4U);
  EXPECT_EQ(plan.places[2].name, "cpu:0/b");
  EXPECT_GT(*plan.places[2].predicted.model, 0);
}

}  // namespace
}  // namespace cohort::planner
