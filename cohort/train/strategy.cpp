// In each strategy every rank holds the whole model; they differ in when gradients are averaged. average does
// so after backward; ddp has a reducer for each optimizer, which is prepared before the last backward. A step
// that prepared nothing is averaged at its end, so both strategies take the same tasks.
#include "cohort/train/strategy.h"

#include <map>

#include "cohort/base/error.h"
#include "cohort/parallel/broadcast.h"
#include "cohort/parallel/reducer.h"

namespace cohort::train {
namespace {

std::vector<at::Tensor> parameters_of(const optim::Optimizer& optimizer) {
  std::vector<at::Tensor> parameters;
  for (const optim::ParamGroup& group : optimizer.param_groups()) {
    parameters.insert(parameters.end(), group.params.begin(), group.params.end());
  }
  return parameters;
}

// Every rank holds the whole model.
class Replicated : public Strategy {
 public:
  explicit Replicated(comm::Group group) : group_(std::move(group)) {}
  const comm::Group* group() const override { return &group_; }
  void begin(const TaskParts& parts) override {
    for (const NamedModule& entry : parts.modules) parallel::broadcast_module(group_, *entry.module);
  }
  void synchronize_buffers(const TaskParts& parts) override {
    for (const NamedModule& entry : parts.modules) parallel::broadcast_buffers(group_, *entry.module);
  }

 private:
  const comm::Group group_;
};

class AverageStrategy : public Replicated {
 public:
  explicit AverageStrategy(const comm::Group& group) : Replicated(group), averager_(group) {}

  std::string name() const override { return "average"; }
  parallel::AverageReport average(const optim::Optimizer& optimizer, double samples, bool finite) override {
    return averager_.average(parameters_of(optimizer), samples, finite);
  }

 private:
  parallel::GradientAverager averager_;
};

// A Reducer for the parameters of each optimizer.
class DdpStrategy : public Replicated {
 public:
  DdpStrategy(const comm::Group& group, parallel::ReducerOptions options)
      : Replicated(group), options_(std::move(options)) {
    // A run and its repetition end with the same bits. Where the order of a sum hangs on the place in the
    // bucket, as in a ring, buckets must not hang on what was measured, or on when the run was resumed.
    if (!group.deterministic_rank_order()) options_.plan = parallel::BucketPlan::kDefinition;
  }

  std::string name() const override { return "ddp"; }

  void begin(const TaskParts& parts) override {
    Replicated::begin(parts);
    std::map<const at::TensorImpl*, std::string> names;
    for (const NamedModule& entry : parts.modules) {
      const std::string prefix = entry.name.empty() ? "" : entry.name + ".";
      for (const auto& parameter : entry.module->named_parameters()) {
        names[parameter.value().unsafeGetTensorImpl()] = prefix + parameter.key();
      }
    }
    reducers_.clear();
    for (const NamedOptimizer& entry : parts.optimizers) {
      std::vector<parallel::NamedParameter> parameters;
      for (const at::Tensor& parameter : parameters_of(*entry.optimizer)) {
        if (!parameter.requires_grad()) continue;
        const auto found = names.find(parameter.unsafeGetTensorImpl());
        parameters.push_back(
            {found != names.end() ? found->second : base::concat("parameter ", parameters.size()),
             parameter});
      }
      reducers_[entry.optimizer.get()] =
          std::make_unique<parallel::Reducer>(*group(), std::move(parameters), options_);
    }
  }

  void prepare(const optim::Optimizer& optimizer, double samples, bool finite) override {
    reducer_of(optimizer).prepare(parallel::Contribution{.weight = samples, .finite = finite});
  }

  parallel::AverageReport average(const optim::Optimizer& optimizer, double samples, bool finite) override {
    // A training step that does not say beforehand is averaged now.
    if (!reducer_of(optimizer).is_prepared()) prepare(optimizer, samples, finite);
    return reducer_of(optimizer).finish();
  }

 private:
  parallel::Reducer& reducer_of(const optim::Optimizer& optimizer) {
    const auto found = reducers_.find(&optimizer);
    if (found == reducers_.end()) {
      throw UsageError("train.strategy",
                       "gradients of an optimizer are to be averaged that was not added to the task",
                       "Task::add_optimizer");
    }
    return *found->second;
  }

  parallel::ReducerOptions options_;
  std::map<const optim::Optimizer*, std::unique_ptr<parallel::Reducer>> reducers_;
};

}  // namespace

parallel::AverageReport Strategy::average(const optim::Optimizer& /*optimizer*/, double samples,
                                          bool finite) {
  parallel::AverageReport report;
  report.weight = samples;
  if (!finite) report.bad_rank = 0;
  return report;
}

std::shared_ptr<Strategy> make_strategy(const std::string& name, comm::Group group,
                                        const parallel::ReducerOptions& options) {
  const int size = group ? group.size() : 1;
  if (name == "none" || (name == "auto" && size == 1)) {
    if (size > 1) {
      throw UsageError("train.strategy",
                       base::concat("gradients are kept by \"", name, "\", and there are ", size, " ranks"),
                       "distributed.gradients=ddp, or one process");
    }
    return std::make_shared<Strategy>();
  }
  const bool is_average = name == "average";
  if (is_average || name == "ddp" || name == "auto") {
    if (!group)
      throw UsageError("train.strategy", base::concat("gradients by \"", name, "\" need a process group"));
    if (is_average) return std::make_shared<AverageStrategy>(group);
    return std::make_shared<DdpStrategy>(group, options);
  }
  throw UsageError("train.strategy", base::concat("there is no gradient sync \"", name, "\""),
                   "auto, none, average or ddp");
}

}  // namespace cohort::train
