#pragma once

#include <ATen/core/Tensor.h>
#include <torch/nn/modules/container/any.h>

#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "cohort/base/placement.h"
#include "cohort/base/registry.h"

/// Ways to run a model, by name: plain, on several devices, or as a program or a library given to `--load`
/// registers.
///
///     COHORT_REGISTER_MODEL_RUNNER("twice", {.make = [](torch::nn::AnyModule model, const auto&) {
///       return cohort::parallel::ModelRunner{
///           [model](const at::Tensor& x) mutable { return model.forward(x) + model.forward(x); }};
///     }});
namespace cohort::parallel {

/// How a training step calls its model.
struct ModelRunner {
  /// Returns the mean over the samples of a (micro-)batch.
  using Loss = std::function<at::Tensor(const at::Tensor& logits, const at::Tensor& target)>;
  /// What `step` gives.
  struct Step {
    at::Tensor loss;    ///< of the whole batch, times `scale`
    at::Tensor logits;  ///< [N, ...]
  };

  /// Returns what the model makes of a batch, with its graph where gradients are on.
  std::function<at::Tensor(const at::Tensor& input)> forward;
  /// Runs forward, loss and backward as one, where these overlap. Adds the gradients of the loss times
  /// `scale` to the parameters' grad(), and returns tensors without graph. Empty: a step calls forward, and
  /// then the loss's own backward.
  std::function<Step(const at::Tensor& input, const at::Tensor& target, const Loss& loss, double scale)>
      step = nullptr;
};

/// What a runner is made from, besides the model.
struct ModelRunnerOptions {
  std::string name = "plain";                 ///< one of model_runner_names()
  at::Device device = at::kCPU;               ///< of inputs and logits
  std::vector<base::Placement> devices = {};  ///< empty: each core that the process may use, or each GPU
  std::map<std::string, base::Placement> device_map = {};  ///< layers and their placements; empty: measured
  std::string schedule = "1f1b";                           ///< of a pipeline
  std::int64_t num_micro_batches = 4;                      ///< of a pipeline
  std::int64_t batch_size = 32;                            ///< samples of one forward
  std::int64_t micro_batch_size = 0;  ///< of one micro-batch: BatchPlan's; 0: batch_size is cut into as many
  /// Returns what the model gets for `samples` samples: to measure layers with.
  std::function<at::Tensor(std::int64_t samples)> example_input = nullptr;
  /// Returns how many tensors of its size the optimizer keeps for a parameter: where layers are measured.
  /// Empty: none.
  std::function<double()> optimizer_states = nullptr;
};

/// Bytes of one kind each; none: not known, or not measured.
struct MemoryUse {
  std::optional<std::int64_t> model = {};      ///< parameters and buffers
  std::optional<std::int64_t> optimizer = {};  ///< its state, from the first step on
  std::optional<std::int64_t> batch = {};      ///< input and target, as the model gets them
  /// Kept by the forward for backward; of a pipeline's placement: the most after one of its forwards.
  std::optional<std::int64_t> activations = {};
  std::optional<std::int64_t> gradients = {};  ///< after backward
  std::optional<std::int64_t> averages = {};   ///< buffers of gradients besides: `average`'s chunks
  /// Sums of virtual ranks, what comes of them from other processes, and copies of buffers.
  std::optional<std::int64_t> virtual_ranks = {};
  std::optional<std::int64_t> peak = {};  ///< the most at any time of a step
};

/// What the plain runner takes for a step, and the step itself: what another runner's plan is made from. Its
/// functions may be kept in MeasuredRun::make, and are valid until the plan was measured.
struct PlainMemory {
  std::int64_t parameters = 0, buffers = 0;  ///< bytes
  std::int64_t samples = 0;                  ///< of one forward: BatchPlan's part
  MemoryUse use = {};                        ///< of the whole model on one placement
  /// Bytes for one forward and backward of so many samples: what the forward keeps for backward; the most at
  /// any time, gradients included, besides model, optimizer and batch.
  std::function<std::int64_t(std::int64_t samples)> activations = nullptr, peak = nullptr;
  std::string place = "cpu";    ///< that placement's name; "each of 2 ranks"
  bool adds_gradients = false;  ///< a step has several forwards: the gradients of the first ones are there
  /// Returns model, optimizer, gradients and activations of what has a name that `is_wanted`.
  std::function<MemoryUse(const std::function<bool(const std::string& name)>& is_wanted)> part = nullptr;
  torch::nn::AnyModule model = {};  ///< a copy for planning, without placements
  /// Runs forward, loss and backward of so many samples, whose batch has batch_bytes.
  std::function<void(const ModelRunner& runner, std::int64_t samples)> step = nullptr;
  std::function<std::int64_t(std::int64_t samples)> batch_bytes = nullptr;
};

/// What a runner keeps in one place: a replica, a placement, what all share.
struct PlannedPlace {
  std::string name;                               ///< "replica 1 on cpu:1"
  std::int64_t samples = 0;                       ///< of one forward there
  MemoryUse use = {};                             ///< of what is kept there, for that many samples
  std::optional<base::Placement> placement = {};  ///< whose thread computes there: it can be measured
};

/// How a step runs whose memory is counted (`cohort plan --memory --measure`), and what is known of a
/// place's thread besides its activations.
struct MeasuredRun {
  /// Is called on a placement's thread when a forward there has ended. `place`: among those with a placement.
  using AfterForward = std::function<void(std::size_t place, std::int64_t gradient_bytes)>;

  /// Returns how `model` is run, another copy of what was planned. Empty: as make_model_runner() does.
  std::function<ModelRunner(torch::nn::AnyModule model, const AfterForward& after_forward)> make = nullptr;
  bool calls_after_forward = false;
  bool has_gradients = true;
  bool has_peak = false;
  /// Another thread made the thread's part of model and optimizer, which each place with a placement gives.
  bool adds_model_to_peak = false;
};

/// What a runner keeps in each place.
struct RunnerMemory {
  // NOLINTNEXTLINE(google-explicit-constructor): most runners return places
  RunnerMemory(std::vector<PlannedPlace> planned) : places(std::move(planned)) {}
  RunnerMemory(std::vector<PlannedPlace> planned, MeasuredRun run)
      : places(std::move(planned)), measured(std::move(run)) {}

  std::vector<PlannedPlace> places;
  std::optional<PlannedPlace> all = {};      ///< all places together; none: their sum
  std::optional<MeasuredRun> measured = {};  ///< of a type with plan_is_measured
};

/// A way to run a model.
struct ModelRunnerType {
  /// Makes the runner of a model. Throws: UsageError for options that do not suit it.
  std::function<ModelRunner(torch::nn::AnyModule model, const ModelRunnerOptions& options)> make;
  /// The gradient sync that `auto` stands for where there are several ranks.
  std::string gradients = "ddp";
  /// Gradient syncs that do not see its gradients, and why.
  std::map<std::string, std::string> unfit_gradients = {};
  /// True: operators run on threads of their own, so the calling thread needs no others for itself, and
  /// script mode cannot record a step.
  bool has_own_threads = false;
  /// True: a forward and its backward are a function of model, input and the calling thread's generators, so
  /// a process may compute one virtual rank after the other (distributed.virtual_ranks, distributed.elastic).
  bool supports_virtual_ranks = false;
  /// True: it cuts a batch into ModelRunnerOptions::num_micro_batches, one forward each.
  bool cuts_micro_batches = false;
  /// True: ModelRunnerOptions::device_map says where its layers are.
  bool reads_device_map = false;
  /// True: plan_memory is of one of several ranks, too. False: of a single process.
  bool plans_ranks = false;
  /// True: plan_memory takes layers that `cohort plan --device-map` puts elsewhere, in options.device_map.
  bool plans_placed_layers = false;
  /// True: plan_memory needs options.device_map. It is not asked without.
  bool plan_needs_device_map = false;
  /// True: plan_memory returns RunnerMemory::measured. False: `--measure` is rejected before anything runs.
  bool plan_is_measured = false;
  /// Returns what a run keeps in each place: for `cohort plan --memory`. Empty: it is planned as the plain
  /// runner, and the plan says so.
  std::function<RunnerMemory(const PlainMemory& plain, const ModelRunnerOptions& options)> plan_memory =
      nullptr;
};

/// Returns what the placements of `device_map` keep, and what the rest does, where one layer after the other
/// runs: of the plain runner after apply_device_map(), or of model_parallel, whose map names each layer.
RunnerMemory memory_by_placement(const PlainMemory& plain,
                                 const std::map<std::string, base::Placement>& device_map);

/// Returns the type of that name. Throws: UsageError for an unknown name, naming the nearest and all, or for
/// one that two libraries registered.
ModelRunnerType model_runner_type(const std::string& name);

/// Returns how `model`, of which the runner shares the modules, is run. Throws: as model_runner_type(); what
/// the type's `make` throws.
ModelRunner make_model_runner(torch::nn::AnyModule model, const ModelRunnerOptions& options);

/// Returns all names, sorted.
std::vector<std::string> model_runner_names();

/// Makes `type` known as `name`. Throws: UsageError if the name is taken or empty. Threads: any.
void register_model_runner(const std::string& name, ModelRunnerType type);

/// What COHORT_REGISTER_MODEL_RUNNER calls while a library loads: a name that is taken stays with the first,
/// and model_runner_type throws, naming both places.
bool register_model_runner_at_load(const char* name, ModelRunnerType type, const char* file,
                                   int line) noexcept;

}  // namespace cohort::parallel

/// Registers a way to run a model where it is written, at namespace scope.
#define COHORT_REGISTER_MODEL_RUNNER(name, ...) \
  COHORT_REGISTER_AT_LOAD(parallel::register_model_runner_at_load, name, __VA_ARGS__)
