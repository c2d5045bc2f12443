#include "cohort/train/strategy.h"

#include "cohort/core/error.h"
#include "cohort/train/task.h"

namespace cohort::train {
namespace {

class AverageStrategy : public Strategy {
 public:
  explicit AverageStrategy(comm::Group group) : averager_(std::move(group)) {}

  std::string name() const override { return "average"; }
  const comm::Group* group() const override { return &averager_.group(); }
  void begin(const Task& task) override {
    for (const Task::NamedModule& entry : task.modules()) averager_.broadcast(*entry.module);
  }
  void synchronize_buffers(const Task& task) override {
    for (const Task::NamedModule& entry : task.modules()) averager_.broadcast_buffers(*entry.module);
  }
  parallel::AverageReport average(const optim::Optimizer& optimizer, double samples, bool finite) override {
    std::vector<at::Tensor> parameters;
    for (const optim::ParamGroup& group : optimizer.param_groups()) {
      parameters.insert(parameters.end(), group.params.begin(), group.params.end());
    }
    return averager_.average(parameters, samples, finite);
  }

 private:
  parallel::GradientAverager averager_;
};

}  // namespace

parallel::AverageReport Strategy::average(const optim::Optimizer& /*optimizer*/, double samples,
                                          bool finite) {
  parallel::AverageReport report;
  report.weight = samples;
  if (!finite) report.bad_rank = 0;
  return report;
}

std::shared_ptr<Strategy> make_strategy(const std::string& name, comm::Group group) {
  const int size = group ? group.size() : 1;
  if (name == "single" || (name == "auto" && size == 1)) {
    if (size > 1) {
      throw UsageError("train.strategy",
                       core::concat("the strategy is single, and there are ", size, " ranks"),
                       "distributed.strategy=average, or one process");
    }
    return std::make_shared<Strategy>();
  }
  if (name == "average" || name == "auto") {
    if (!group) throw UsageError("train.strategy", "the strategy average needs a process group");
    return std::make_shared<AverageStrategy>(std::move(group));
  }
  throw UsageError("train.strategy", core::concat("there is no strategy \"", name, "\""),
                   "auto, single or average");
}

}  // namespace cohort::train
