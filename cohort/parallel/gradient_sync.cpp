// In each of Cohort's syncs every rank holds the whole model; they differ in when gradients are averaged.
// average does so after backward; ddp has a reducer for each optimizer, which is prepared before the last
// backward. A step that prepared nothing is averaged at its end, so both take the same tasks.
#include "cohort/parallel/gradient_sync.h"

#include <map>

#include "cohort/base/error.h"
#include "cohort/parallel/reducer.h"
#include "cohort/parallel/virtual_ranks/virtual_rank_sync.h"

namespace cohort::parallel {
namespace {

class AverageSync : public ReplicatedSync {
 public:
  explicit AverageSync(const comm::Group& group) : ReplicatedSync(group), averager_(group) {}

  std::string name() const override { return "average"; }
  AverageReport average(const optim::Optimizer& optimizer, double samples, bool finite) override {
    return averager_.average(optimizer.parameters(), samples, finite);
  }

 private:
  GradientAverager averager_;
};

// A Reducer for the parameters of each optimizer.
class DdpSync : public ReplicatedSync {
 public:
  DdpSync(const comm::Group& group, ReducerOptions options)
      : ReplicatedSync(group), options_(std::move(options)) {
    // A run and its repetition end with the same bits. Where the order of a sum depends on the place in the
    // bucket, as in a ring, buckets must not depend on what was measured, or on when the run was resumed.
    if (!group.deterministic_rank_order()) options_.plan = BucketPlan::kDefinition;
  }

  std::string name() const override { return "ddp"; }

  void begin(const TaskParts& parts) override {
    if (options_.hook && parts.optimizers.size() > 1) {
      throw UsageError("parallel.gradient_sync",
                       base::concat("a communication hook is for one Reducer, got ", parts.optimizers.size(),
                                    " optimizers, which have a Reducer each"),
                       "ReducerOptions::make_hook, which makes one for each");
    }
    ReplicatedSync::begin(parts);
    std::map<const at::TensorImpl*, std::string> names;
    for (const NamedModule& entry : parts.modules) {
      const std::string prefix = entry.name.empty() ? "" : entry.name + ".";
      for (const auto& parameter : entry.module->named_parameters()) {
        names[parameter.value().unsafeGetTensorImpl()] = prefix + parameter.key();
      }
    }
    // Of an earlier fit() with the same sync.
    reducers_.clear();
    for (const NamedOptimizer& entry : parts.optimizers) {
      std::vector<NamedParameter> parameters;
      for (const at::Tensor& parameter : entry.optimizer->parameters()) {
        // A frozen parameter gets no gradient, so no bucket may wait for it.
        if (!parameter.requires_grad()) continue;
        const auto found = names.find(parameter.unsafeGetTensorImpl());
        parameters.push_back(
            {found != names.end() ? found->second : base::concat("parameter ", parameters.size()),
             parameter});
      }
      reducers_[entry.optimizer.get()] = std::make_unique<Reducer>(*group(), std::move(parameters), options_);
    }
  }

  void prepare(const optim::Optimizer& optimizer, double samples, bool finite) override {
    reducer_of(optimizer).prepare(StepInfo{.weight = samples, .finite = finite});
  }

  AverageReport average(const optim::Optimizer& optimizer, double samples, bool finite) override {
    // A training step that does not say beforehand is averaged now.
    if (!reducer_of(optimizer).is_prepared()) prepare(optimizer, samples, finite);
    return reducer_of(optimizer).finish();
  }

 private:
  Reducer& reducer_of(const optim::Optimizer& optimizer) {
    const auto found = reducers_.find(&optimizer);
    if (found == reducers_.end()) {
      throw UsageError("parallel.gradient_sync",
                       "gradients of an optimizer are to be averaged that was not added to the task",
                       "Task::add_optimizer");
    }
    return *found->second;
  }

  ReducerOptions options_;
  std::map<const optim::Optimizer*, std::unique_ptr<Reducer>> reducers_;
};

std::shared_ptr<GradientSync> make_average(const comm::Group& group, const ReducerOptions& /*options*/) {
  return std::make_shared<AverageSync>(group);
}

std::shared_ptr<GradientSync> make_ddp(const comm::Group& group, const ReducerOptions& options) {
  return std::make_shared<DdpSync>(group, options);
}

std::shared_ptr<GradientSync> make_none(const comm::Group& group, const ReducerOptions& /*options*/) {
  if (group && group.size() > 1) {
    throw UsageError("parallel.gradient_sync",
                     base::concat("gradients are kept by \"none\", and there are ", group.size(), " ranks"),
                     "distributed.gradients=ddp, or one process");
  }
  return std::make_shared<GradientSync>();
}

std::shared_ptr<GradientSync> make_auto(const comm::Group& group, const ReducerOptions& options) {
  return make_gradient_sync(resolve_gradients("auto", group ? group.size() : 1), group, options);
}

std::shared_ptr<VirtualRankSync> make_sums(const comm::Group& group, const VirtualRankOptions& options) {
  return std::make_shared<VirtualRankSync>(group, options);
}

[[noreturn]] void throw_made_nothing(const std::string& name) {
  throw UsageError("parallel.gradient_sync",
                   base::concat("the factory of the gradient sync '", name, "' returned nothing"));
}

// What every sync needs is checked here once, and not in each factory.
GradientSyncType checked_sync(const std::string& name, GradientSyncType type) {
  type.make = [name, needs_group = type.needs_group, make = std::move(type.make)](
                  const comm::Group& group, const ReducerOptions& options) {
    if (needs_group && !group) {
      throw UsageError("parallel.gradient_sync",
                       base::concat("the gradient sync '", name, "' needs a process group"));
    }
    if (!make) {
      throw UsageError("parallel.gradient_sync",
                       base::concat("the gradient sync '", name, "' was registered without make"));
    }
    std::shared_ptr<GradientSync> sync = make(group, options);
    if (sync == nullptr) throw_made_nothing(name);
    return sync;
  };
  return type;
}

base::Registry<GradientSyncType>& sync_registry() {
  static auto* instance = new base::Registry<GradientSyncType>(
      "gradient sync", "parallel.gradient_sync",
      {{"auto", {.make = make_auto, .needs_group = false, .make_virtual_ranks = make_sums}},
       {"none", {.make = make_none, .needs_group = false}},
       {"average",
        checked_sync("average",
                     {.make = make_average, .copies_gradients = true, .make_virtual_ranks = make_sums})},
       {"ddp", checked_sync("ddp", {.make = make_ddp, .make_virtual_ranks = make_sums})}});
  return *instance;
}

}  // namespace

std::shared_ptr<GradientSync> make_gradient_sync(const std::string& name, comm::Group group,
                                                 const ReducerOptions& options) {
  return gradient_sync_type(name).make(group, options);
}

std::shared_ptr<VirtualRankSync> make_virtual_rank_sync(const std::string& name, const comm::Group& group,
                                                        const VirtualRankOptions& options) {
  const GradientSyncType type = gradient_sync_type(name);
  if (!type.make_virtual_ranks) {
    throw UsageError("parallel.gradient_sync",
                     base::concat("the gradient sync '", name, "' does not support virtual ranks"),
                     "distributed.gradients=auto, or distributed.virtual_ranks=0");
  }
  std::shared_ptr<VirtualRankSync> sync = type.make_virtual_ranks(group, options);
  if (sync == nullptr) throw_made_nothing(name);
  return sync;
}

std::string resolve_gradients(const std::string& name, int num_ranks, const std::string& of_runner) {
  if (name != "auto") return name;
  return num_ranks == 1 ? "none" : of_runner;
}

std::vector<std::string> gradient_sync_names() {
  return sync_registry().names();
}

GradientSyncType gradient_sync_type(const std::string& name) {
  return sync_registry().get(name);
}

void register_gradient_sync(const std::string& name, GradientSyncType type) {
  if (!type.make) throw UsageError("parallel.gradient_sync", "a gradient sync needs make");
  sync_registry().add(name, checked_sync(name, std::move(type)), "register_gradient_sync");
}

bool register_gradient_sync_at_load(const char* name, GradientSyncType type, const char* file,
                                    int line) noexcept {
  return sync_registry().add_at_load(name, checked_sync(name, std::move(type)), file, line);
}

}  // namespace cohort::parallel
