// A plug-in with one of each part that has a registry. Each does what Cohort's own does and logs its name, so
// a run with all of them must end with the same bits. The backend is that of plugin_store_backend.cpp. Public
// headers only are included, as in a user's plug-in.
#include <mutex>
#include <utility>

#include "cohort/base/log.h"
#include "cohort/checkpoint/tensor_format.h"
#include "cohort/data/sampler_factory.h"
#include "cohort/optim/factory.h"
#include "cohort/optim/schedule_factory.h"
#include "cohort/parallel/average.h"
#include "cohort/parallel/comm_hook.h"
#include "cohort/parallel/gradient_sync.h"
#include "cohort/parallel/model_runner.h"
#include "cohort/parallel/virtual_ranks/virtual_rank_sync.h"
#include "cohort/pipeline/schedule.h"

namespace {

using namespace cohort;

void log_name(const std::string& part) {
  base::log_info("plug-in: " + part);
}

COHORT_REGISTER_MODEL_RUNNER(
    "plugin_runner",
    {.make =
         [](torch::nn::AnyModule model, const parallel::ModelRunnerOptions&) {
           log_name("runner");
           return parallel::ModelRunner{
               [model](const at::Tensor& input) mutable { return model.forward<at::Tensor>(input); }};
         },
     .supports_virtual_ranks = true,
     .plan_memory =
         [](const parallel::PlainMemory& plain, const parallel::ModelRunnerOptions&) {
           return std::vector<parallel::PlannedPlace>{{"the plug-in's place", plain.samples, plain.use}};
         }});

void log_update() {
  static std::once_flag once;
  std::call_once(once, [] { log_name("update"); });
}

class Averaging : public parallel::ReplicatedSync {
 public:
  explicit Averaging(const comm::Group& group) : ReplicatedSync(group), averager_(group) {}
  std::string name() const override { return "plugin_sync"; }
  parallel::AverageReport average(const optim::Optimizer& optimizer, double samples, bool finite) override {
    return averager_.average(optimizer.parameters(), samples, finite);
  }
  void step(optim::Optimizer& optimizer, const optim::NonFinite& found) override {
    log_update();
    optimizer.step_unless(found);
  }

 private:
  parallel::GradientAverager averager_;
};

class AveragingVirtualRanks : public parallel::VirtualRankSync {
 public:
  using VirtualRankSync::VirtualRankSync;
  std::string name() const override { return "plugin_sync"; }
  void step(optim::Optimizer& optimizer, const optim::NonFinite& found) override {
    log_update();
    optimizer.step_unless(found);
  }
};

COHORT_REGISTER_GRADIENT_SYNC("plugin_sync",
                              {.make =
                                   [](const comm::Group& group, const parallel::ReducerOptions&) {
                                     log_name("sync");
                                     return std::make_shared<Averaging>(group);
                                   },
                               .make_virtual_ranks =
                                   [](const comm::Group& group, const parallel::VirtualRankOptions& options) {
                                     log_name("sync of virtual ranks");
                                     return std::make_shared<AveragingVirtualRanks>(group, options);
                                   }});

// For one process, so it has no virtual ranks either.
COHORT_REGISTER_GRADIENT_SYNC("plugin_alone", {.make =
                                                   [](const comm::Group&, const parallel::ReducerOptions&) {
                                                     return std::make_shared<parallel::GradientSync>();
                                                   },
                                               .needs_group = false});

// Sums as a run without a hook does.
COHORT_REGISTER_COMM_HOOK("plugin_hook", [] {
  return [sum = parallel::all_reduce_hook()](const parallel::HookBucket& bucket) {
    static std::once_flag once;
    std::call_once(once, [] { log_name("hook"); });
    return sum(bucket);
  };
});

// One more forward before the first backward than in 1f1b.
COHORT_REGISTER_PIPELINE_SCHEDULE("plugin_1f1b",
                                  {.order =
                                       [](const pipeline::PlaceInPipeline& place) {
                                         static std::once_flag once;
                                         std::call_once(once, [] { log_name("order of a pipeline"); });
                                         return pipeline::ActionOrder{
                                             .group = place.num_micro_batches,
                                             .warm_up = place.num_placements - place.placement};
                                       },
                                   .max_stages = 1});

COHORT_REGISTER_OPTIMIZER("plugin_sgd",
                          [](const optim::OptimizerOptions& options, std::vector<optim::ParamGroup> groups) {
                            log_name("optimizer");
                            return optim::make_optimizer({.name = "sgd",
                                                          .lr = options.lr,
                                                          .weight_decay = options.weight_decay,
                                                          .momentum = options.extra.number("momentum", 0)},
                                                         std::move(groups));
                          });

COHORT_REGISTER_SCHEDULE("plugin_schedule", [](const optim::ScheduleOptions& options) {
  log_name("schedule");
  optim::ScheduleOptions own = options;
  own.name = options.extra.text("as", "constant");
  own.extra.clear();
  own.total_steps -= std::exchange(own.warmup_steps, 0);  // what follows the warm-up is asked for
  return optim::make_schedule(own);
});

COHORT_REGISTER_SAMPLER("plugin_sampler", [](const data::SamplerOptions& options) {
  log_name("sampler");
  data::SamplerOptions own = options;
  own.name = "distributed";
  return data::make_sampler(own);
});

COHORT_REGISTER_TENSOR_FORMAT(
    "plugin_format", {.extension = "plugin",
                      .write =
                          [](const std::filesystem::path& path, const checkpoint::TensorMap& tensors) {
                            log_name("format");
                            return checkpoint::write_new_safetensors(path, tensors, {{"format", "pt"}});
                          },
                      .read =
                          [](const std::shared_ptr<const checkpoint::MappedFile>& file) {
                            return checkpoint::SafetensorsFile::from_mapping(file).tensors();
                          }});

}  // namespace
