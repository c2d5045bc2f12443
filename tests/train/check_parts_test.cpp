// What registered parts say of themselves decides which keys go together, and not their names.
#include "cohort/train/check_parts.h"

#include <gtest/gtest.h>

#include <functional>
#include <string>
#include <utility>

#include "cohort/base/error.h"
#include "cohort/parallel/comm_hook.h"
#include "cohort/parallel/gradient_sync.h"
#include "cohort/parallel/model_runner.h"
#include "cohort/parallel/virtual_ranks/virtual_rank_sync.h"
#include "cohort/train/internal/distributed_setup.h"
#include "tests/support/throws.h"

namespace cohort::train {
namespace {

parallel::ModelRunner make_no_runner(const torch::nn::AnyModule& /*model*/,
                                     const parallel::ModelRunnerOptions& /*options*/) {
  return {};
}

COHORT_REGISTER_MODEL_RUNNER("one_by_one", {.make = make_no_runner, .supports_virtual_ranks = true});
COHORT_REGISTER_MODEL_RUNNER("threaded", {.make = make_no_runner, .has_own_threads = true});

class NamedVirtualRanks : public parallel::VirtualRankSync {
 public:
  using VirtualRankSync::VirtualRankSync;
  std::string name() const override { return "summing"; }
};

class NoGroupSync : public parallel::GradientSync {
 public:
  std::string name() const override { return "groupless"; }
};

std::shared_ptr<parallel::GradientSync> make_no_group(const comm::Group& /*group*/,
                                                      const parallel::ReducerOptions& /*options*/) {
  return std::make_shared<NoGroupSync>();
}

COHORT_REGISTER_GRADIENT_SYNC("groupless", {.make = make_no_group, .needs_group = false});
COHORT_REGISTER_GRADIENT_SYNC("summing",
                              {.make = make_no_group,
                               .make_virtual_ranks = [](const comm::Group& group,
                                                        const parallel::VirtualRankOptions& options) {
                                 return std::make_shared<NamedVirtualRanks>(group, options);
                               }});
COHORT_REGISTER_COMM_HOOK("sum", [] { return parallel::all_reduce_hook(); });
COHORT_REGISTER_COMM_HOOK("empty", [] { return parallel::CommHook(); });

// With virtual ranks, or elastic, before `change`.
config::Config with_virtual_ranks(bool is_elastic, std::int64_t count = 2) {
  config::Config config;
  config.distributed.virtual_ranks = count;
  config.distributed.elastic = is_elastic;
  return config;
}

using Change = std::function<void(config::DistributedConfig& distributed)>;

TEST(CheckPartsTest, VirtualRanksGoWithPartsThatSupportThem) {
  const Change changes[] = {[](auto& d) { d.gradients = "average"; }, [](auto& d) { d.gradients = "ddp"; },
                            [](auto& d) { d.gradients = "summing"; }, [](auto& d) { d.model = "one_by_one"; },
                            [](auto& d) { d.comm_hook = "empty"; }};
  for (const bool is_elastic : {false, true}) {
    check_parts(with_virtual_ranks(is_elastic));
    for (const Change& change : changes) {
      config::Config config = with_virtual_ranks(is_elastic);
      change(config.distributed);
      check_parts(config);
      EXPECT_NE(join_ranks(config.distributed, {}, "")->virtual_ranks(), nullptr);
    }
  }
  config::Config processes = with_virtual_ranks(false, 4);
  processes.distributed.nproc_per_node = 4;
  processes.train.script = true;
  check_parts(processes);
}

TEST(CheckPartsTest, APartThatDoesNotSupportVirtualRanksIsRejectedWithBothKeys) {
  const std::pair<Change, const char*> cases[] = {
      {[](auto& d) { d.gradients = "none"; },
       "distributed.gradients is none, which does not add gradients over virtual ranks. Try: "
       "distributed.gradients=auto, or distributed."},
      {[](auto& d) { d.gradients = "groupless"; }, "distributed.gradients is groupless"},
      {[](auto& d) { d.model = "pipeline"; },
       "distributed.model is pipeline, which does not support virtual ranks. Try: distributed.model=plain"},
      {[](auto& d) { d.model = "threaded"; }, "distributed.model is threaded"},
      {[](auto& d) { d.comm_hook = "fp16"; }, "distributed.comm_hook is fp16"},
      {[](auto& d) { d.comm_hook = "sum"; }, "distributed.comm_hook is sum"},
      {[](auto& d) { d.nproc_per_node = 3; }, "distributed.nproc_per_node is 3"}};
  for (const auto& [change, message] : cases) {
    for (const bool is_elastic : {false, true}) {
      config::Config config = with_virtual_ranks(is_elastic);
      change(config.distributed);
      const char* const own =
          is_elastic ? "distributed.elastic is true and " : "distributed.virtual_ranks is 2 and ";
      COHORT_EXPECT_THROW_WITH(check_parts(config), ConfigError, base::concat(own, message));
    }
    config::Config without;
    change(without.distributed);
    check_parts(without);
  }
  config::Config unknown = with_virtual_ranks(false);
  unknown.distributed.gradients = "sumning";
  COHORT_EXPECT_THROW_WITH(check_parts(unknown), UsageError, "Try: summing");
}

TEST(CheckPartsTest, ScriptModeIsRejectedForARunnerThatHasThreadsOfItsOwn) {
  config::Config config;
  config.train.script = true;
  for (const char* runner : {"plain", "one_by_one"}) {
    config.distributed.model = runner;
    check_parts(config);
  }
  for (const char* runner : {"data_parallel", "model_parallel", "pipeline", "threaded"}) {
    config.distributed.model = runner;
    COHORT_EXPECT_THROW_WITH(check_parts(config), ConfigError,
                             base::concat("train.script is true and distributed.model is ", runner));
  }
}

TEST(CheckPartsTest, TheSyncOfARunIsTheOneThatIsRegistered) {
  EXPECT_EQ(join_ranks({.gradients = "summing", .virtual_ranks = 3}, {}, "")->name(), "summing");
  EXPECT_EQ(join_ranks({.gradients = "summing", .virtual_ranks = 3, .elastic = true}, {}, "")->name(),
            "summing");
  const auto alone = join_ranks({.gradients = "groupless"}, {}, "");
  EXPECT_EQ(alone->name(), "groupless");
  EXPECT_EQ(alone->group(), nullptr);
}

}  // namespace
}  // namespace cohort::train
