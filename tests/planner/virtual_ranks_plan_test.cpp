// What a plan says of virtual ranks, against what a step takes.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <string>
#include <vector>

#include "cohort/planner/memory_plan.h"

namespace cohort::planner {
namespace {

MemoryPlan plan_virtual(const std::vector<std::string>& overrides, const MemoryOptions& options = {}) {
  return plan_memory(config::load_config_text(R"(
model: {name: resnet18, num_classes: 10, width: 0.5}
data: {type: synthetic, image_size: 64}
train: {batch_size: 24, device: cpu}
)",
                                              "test.yaml", overrides),
                     options);
}

TEST(VirtualRanksPlanTest, SumsOfVirtualRanksAreExactAndThePeakNear) {
  for (const int count : {1, 2, 5, 8}) {
    SCOPED_TRACE(count);
    const MemoryPlan plan = plan_virtual({"train.batch_size=12", "distributed.gradients=auto",
                                          "distributed.virtual_ranks=" + std::to_string(count)},
                                         {.measure = true});
    const PlaceMemory& place = plan.places.back();
    EXPECT_EQ(plan.gradients, "virtual_ranks");
    EXPECT_EQ(plan.batch_size, 12);
    EXPECT_EQ(place.predicted.virtual_ranks, place.measured.virtual_ranks);
    EXPECT_EQ(place.predicted.gradients, place.measured.gradients);
    EXPECT_NEAR(double(*place.predicted.optimizer) / double(*place.measured.optimizer), 1, 1e-3);
    EXPECT_EQ(place.predicted.activations, place.measured.activations);
    EXPECT_NEAR(double(*place.predicted.peak) / double(*place.measured.peak), 1, 0.02);
    // log2(V) + 1 sums, and two copies of the buffers.
    const double sums = std::floor(std::log2(count)) + 1;
    EXPECT_NEAR(double(*place.predicted.virtual_ranks),
                sums* double(plan.parameters) + 2 * double(plan.buffers), 16'384);
  }
}

TEST(VirtualRanksPlanTest, ProcessesOfVirtualRanksKeepCoversToo) {
  const auto plan = [](int processes, const char* more = "run.seed=1") {
    return plan_virtual({"train.batch_size=12", "distributed.gradients=auto", "distributed.virtual_ranks=4",
                         "distributed.nproc_per_node=" + std::to_string(processes), more});
  };
  const MemoryPlan alone = plan(1), two = plan(2), four = plan(4),
                   elastic = plan(1, "distributed.elastic=true");
  EXPECT_EQ(four.places[0].name, "each of 4 ranks");
  EXPECT_FALSE(four.places[0].predicted.averages);
  // A sum, and slices of all others.
  EXPECT_NEAR(double(*four.places[0].predicted.virtual_ranks),
              2 * double(four.parameters) + 2 * double(four.buffers), 16'384);
  EXPECT_EQ(elastic.places[0].name, "each process");
  EXPECT_EQ(*elastic.places[0].predicted.virtual_ranks,
            std::max({*alone.places[0].predicted.virtual_ranks, *two.places[0].predicted.virtual_ranks,
                      *plan(3).places[0].predicted.virtual_ranks, *four.places[0].predicted.virtual_ranks}));
  EXPECT_NE(to_text(two).find("  virtual_ranks "), std::string::npos) << to_text(two);
  const MemoryPlan unknown = plan_virtual({"distributed.gradients=auto", "distributed.elastic=true"});
  EXPECT_NE(to_text(unknown).find("planned without sums of virtual ranks"), std::string::npos);
}

}  // namespace
}  // namespace cohort::planner
