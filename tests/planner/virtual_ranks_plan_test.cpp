// What a plan says of virtual ranks, against what a step takes.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <string>
#include <vector>

#include "cohort/base/error.h"
#include "cohort/parallel/gradient_sync.h"
#include "cohort/parallel/model_runner.h"
#include "cohort/parallel/virtual_ranks/virtual_rank_sync.h"
#include "cohort/planner/memory_plan.h"
#include "tests/support/throws.h"

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

// A runner and a gradient sync that nothing but their types says anything of.
TEST(VirtualRanksPlanTest, PartsOfALibraryArePlannedByWhatTheySay) {
  parallel::ModelRunnerType runner = parallel::model_runner_type("plain");
  parallel::register_model_runner("also_plain", runner);
  runner.supports_virtual_ranks = false;
  parallel::register_model_runner("no_virtual_ranks", runner);
  int num_made = 0;
  parallel::register_gradient_sync(
      "also_sums", {.make = [](const auto&, const auto&) { return nullptr; },
                    .make_virtual_ranks =
                        [&](const comm::Group& group, const parallel::VirtualRankOptions& options) {
                          ++num_made;
                          return std::make_shared<parallel::VirtualRankSync>(group, options);
                        }});
  parallel::register_gradient_sync(
      "for_one_process", {.make = [](const auto&, const auto&) { return nullptr; }, .needs_group = false});
  const std::vector<std::string> virtual_ranks = {"distributed.virtual_ranks=2",
                                                  "distributed.gradients=also_sums"};
  const auto with = [&](std::vector<std::string> overrides, const char* more) {
    overrides.emplace_back(more);
    return overrides;
  };
  const MemoryPlan plan =
      plan_virtual(with(virtual_ranks, "distributed.model=also_plain"), {.measure = true});
  const PlaceMemory& place = plan.places.back();
  EXPECT_EQ(place.predicted.virtual_ranks, place.measured.virtual_ranks);
  EXPECT_EQ(num_made, 1);
  COHORT_EXPECT_THROW_WITH(plan_virtual(with(virtual_ranks, "distributed.model=no_virtual_ranks")),
                           ConfigError,
                           "distributed.virtual_ranks is 2 and distributed.model is no_virtual_ranks");
  const MemoryPlan one_process =
      plan_virtual({"distributed.nproc_per_node=2", "distributed.gradients=for_one_process"});
  EXPECT_EQ(one_process.num_ranks, 1);
  EXPECT_EQ(one_process.places[0].predicted.peak,
            plan_virtual({"distributed.gradients=none"}).places[0].predicted.peak);
}

}  // namespace
}  // namespace cohort::planner
