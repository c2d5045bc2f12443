// The task is made twice from the same seed, eager and scripted, and both make the same first steps on the
// same batch. Generators are seeded anew for each step, so parameters and buffers afterwards can be compared
// bit for bit. The first steps are enough for all recordings, so only replays are measured, in turns with the
// eager task.
#include "cohort/train/script_bench.h"

#include <ATen/ATen.h>

#include <cmath>
#include <utility>

#include "cohort/base/error.h"
#include "cohort/core/device.h"
#include "cohort/memory/allocation_profiler.h"
#include "cohort/train/batch_plan.h"
#include "cohort/train/check_parts.h"
#include "cohort/train/classification.h"
#include "cohort/train/internal/config_choices.h"
#include "cohort/train/internal/factories.h"
#include "cohort/train/internal/model_runners.h"

namespace cohort::train {
namespace {

// Enough for both recordings, the third where state is made lazily, and replays.
constexpr int kFirstSteps = 8;

// A task, its model, and the batch that it is measured on.
class Subject {
 public:
  Subject(std::unique_ptr<ClassificationTask> task, std::shared_ptr<torch::nn::Module> module,
          const data::Batch& batch, std::int64_t seed)
      : batch_(batch),
        seed_(static_cast<std::uint64_t>(seed)),
        module_(std::move(module)),
        task_(std::move(task)) {
    for (int step = 0; step < kFirstSteps; ++step) train();
    for (const auto& entry : module_->named_parameters()) state_.push_back(entry.value().detach().clone());
    for (const auto& entry : module_->named_buffers()) state_.push_back(entry.value().clone());
    for (int call = 0; call < kFirstSteps; ++call) evaluate();
  }

  void train() {
    // By the number of the step: eager and scripted draw the same numbers in dropout.
    core::reseed_generators(seed_, static_cast<std::uint64_t>(step_++), 0);
    task_->set_training(true);
    task_->train_step(batch_);
  }
  void evaluate() {
    const at::NoGradGuard no_grad;
    task_->set_training(false);
    task_->eval_step(batch_);
  }
  std::int64_t peak_of_step() {
    const memory::AllocationProfiler profiler;
    train();
    return profiler.total().peak;
  }
  // After the first steps.
  const std::vector<at::Tensor>& state() const { return state_; }
  std::string explain() const { return task_->explain(); }

 private:
  data::Batch batch_;
  std::uint64_t seed_;
  std::int64_t step_ = 0;
  std::shared_ptr<torch::nn::Module> module_;
  std::unique_ptr<ClassificationTask> task_;
  std::vector<at::Tensor> state_;
};

bool same(const std::vector<at::Tensor>& a, const std::vector<at::Tensor>& b) {
  for (std::size_t i = 0; i < a.size(); ++i) {
    if (!at::equal(a[i], b[i])) return false;
  }
  return a.size() == b.size();
}

bench::Comparison compare(Subject& eager, Subject& scripted, void (Subject::*work)(),
                          const ScriptBenchOptions& options) {
  const auto variant = [&](const char* name, Subject& subject) {
    return bench::Variant{name, [&subject, work](const bench::Shape& /*none*/) {
                            return [&subject, work] { (subject.*work)(); };
                          }};
  };
  return bench::compare({variant("eager", eager), variant("script", scripted)},
                        bench::CompareOptions().timeit(options.timeit()));
}

std::string line(const char* what, const bench::Comparison& found) {
  const auto& eager = found.rows.at(0).measurement;
  const auto& scripted = found.rows.at(1);
  return base::concat(
      what, bench::to_text(eager.median()), " eager, ", bench::to_text(scripted.measurement.median()),
      " with script: ", std::round(scripted.ratio * 100) / 100, "x (spread ",
      std::lround(100 * eager.spread()), " and ", std::lround(100 * scripted.measurement.spread()), " %)\n");
}

}  // namespace

ScriptBench bench_script(config::Config config, const ScriptBenchOptions& options) {
  config.train.script = true;
  check_config(config);
  check_schedule_and_hook(config.distributed);
  check_parts(config);
  const at::Device device = core::resolve_device(config.train.device).device;
  core::set_intra_op_threads(static_cast<int>(config.train.threads));
  const auto data =
      make_dataset(config.data, Split::kTrain, dataset_setup(config.model, config.train, config.run.seed));
  // The batch of a step, which is computed again and again.
  const BatchPlan plan = batch_plan(config.train, config.distributed, config.data, 1).with_whole_steps();
  const auto loader = make_loader(config.data, Split::kTrain, data,
                                  {.plan = plan, .device = device, .seed = config.run.seed});
  const std::optional<data::Batch> batch = loader->next();
  if (!batch) throw UsageError("train.bench_script", "the training data has no batch");
  const bool channels_last = is_channels_last(config.train);
  const data::Field input = input_field(config.data, channels_last, *data);
  const auto make_subject = [&](bool script) {
    const torch::nn::AnyModule model =
        make_model(config.model, {.input = input,
                                  .num_classes = static_cast<std::int64_t>(data->classes().size()),
                                  .device = device,
                                  .seed = config.run.seed,
                                  .channels_last = channels_last});
    const MeasuredStep measured{.input = input, .plan = plan, .optim = config.optim};
    auto task = std::make_unique<ClassificationTask>(
        model, make_model_runner(config.distributed, model, device, measured),
        make_optimizer(config.optim, *model.ptr()), nullptr,
        classification_options(config.train, config.optim.clip_norm, plan).script(script));
    return Subject(std::move(task), model.ptr(), *batch, config.run.seed);
  };
  // Both keep the one batch, whose values no step may change; both start from the same seed.
  Subject eager = make_subject(false);
  Subject scripted = make_subject(true);

  ScriptBench result;
  result.model = config.model.name;
  result.batch_size = batch->size;
  result.same_bits = same(eager.state(), scripted.state());
  // The profiler counts what the CPU's allocator gives out.
  if (device.is_cpu()) {
    result.eager_peak = eager.peak_of_step();
    result.scripted_peak = scripted.peak_of_step();
  }
  result.step = compare(eager, scripted, &Subject::train, options);
  result.forward = compare(eager, scripted, &Subject::evaluate, options);
  result.explained = scripted.explain();
  return result;
}

std::string to_text(const ScriptBench& bench) {
  constexpr double kMiB = 1 << 20;
  const auto mib = [&](std::int64_t bytes) {
    return std::round(static_cast<double>(bytes) / kMiB * 100) / 100;
  };
  const int threads = bench.step.rows.at(0).measurement.threads;
  std::string text =
      base::concat(bench.model, ", batches of ", bench.batch_size, ", ", threads,
                   threads == 1 ? " thread\n" : " threads\n", line("training step  ", bench.step),
                   line("evaluation     ", bench.forward));
  if (bench.eager_peak) {
    text += base::concat("peak of a step ", mib(*bench.eager_peak), " MiB eager, ", mib(*bench.scripted_peak),
                         " MiB with script\n");
  }
  text += base::concat("weights        ", bench.same_bits ? "the same bits" : "DIFFER", " after ",
                       kFirstSteps, " steps\n\n");
  return text + bench.explained;
}

}  // namespace cohort::train
