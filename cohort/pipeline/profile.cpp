// Each repeat sends a micro-batch through all layers, each a stage of its own, forward and then backward.
// Other placements of the same device run the same layers meanwhile, as they will in a pipeline. A layer is
// on a single thread at a time: locks guard layers, and layers that share a parameter share a lock. The first
// repeat does not count, and times are medians. Whatever hangs is left behind, so what it uses is shared with
// it.
#include "cohort/pipeline/profile.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/ones_like.h>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <mutex>
#include <unordered_map>

#include "cohort/base/placement.h"
#include "cohort/base/threads/wait.h"
#include "cohort/core/device.h"
#include "cohort/memory/internal/live_bytes.h"
#include "cohort/parallel/placement_worker.h"
#include "cohort/pipeline/internal/stage_run.h"

namespace cohort::pipeline {
namespace {

using base::concat;
using Clock = std::chrono::steady_clock;
constexpr const char* kWhereProfile = "pipeline.profile_layers";

double median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}

double ms_since(Clock::time_point begin) {
  return std::chrono::duration<double, std::milli>(Clock::now() - begin).count();
}

// A layer, and those that share a parameter with it, are on one thread at a time.
class LayerLocks {
 public:
  explicit LayerLocks(const Stage& model) : names_(model.layers().size()), number_(model.layers().size()) {
    std::unordered_map<const void*, std::size_t> owners;
    for (std::size_t i = 0; i < number_.size(); ++i) {
      number_[i] = i;
      names_[i] = model.layers()[i].name;
      for (const at::Tensor& parameter : model.part(i, i + 1).parameters()) {
        const auto [owner, is_new] = owners.try_emplace(parameter.unsafeGetTensorImpl(), i);
        const std::size_t own_group = number_[i], owner_group = number_[owner->second];
        // Both groups become one, as each layer of either may run with the shared parameter.
        if (!is_new) std::replace(number_.begin(), number_.end(), own_group, owner_group);
      }
    }
  }

  // The layer is the caller's until this goes. Throws: TimeoutError naming the layer.
  class Lock {
   public:
    Lock(LayerLocks& locks, std::size_t layer, base::Deadline deadline)
        : locks_(locks), number_(locks.number_[layer]) {
      std::unique_lock lock(locks_.mutex_);
      const auto is_free = [this] { return !locks_.is_taken_[number_]; };
      if (!base::wait(locks_.changed_, lock, is_free, deadline)) {
        deadline.check(kWhereProfile,
                       concat("layer ", locks_.names_[layer], ", which another placement runs"));
      }
      locks_.is_taken_[number_] = true;
    }
    ~Lock() {
      {
        const std::lock_guard lock(locks_.mutex_);
        locks_.is_taken_[number_] = false;
      }
      locks_.changed_.notify_all();
    }
    Lock(const Lock&) = delete;
    Lock& operator=(const Lock&) = delete;

   private:
    LayerLocks& locks_;
    const std::size_t number_;
  };

 private:
  std::vector<std::string> names_;
  std::vector<std::size_t> number_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<bool> is_taken_ = std::vector<bool>(number_.size());
};

// What all placements run. Shared, as one that hangs is left behind.
struct ProfileState {
  Stage model;
  bool split;
  at::Tensor micro_batch;
  LayerLocks locks;
  base::Deadline deadline;
  std::atomic<bool> is_over{false};
};

// One forward and backward through all layers, each by itself.
class Pass {
 public:
  explicit Pass(ProfileState& state)
      : forward(state.model.layers().size()),
        input_gradient(forward),
        weight_gradient(forward),
        bytes(forward.size()) {
    run(state);
  }

  std::vector<double> forward, input_gradient, weight_gradient;
  std::vector<std::int64_t> bytes;

 private:
  void run(ProfileState& state) {
    const at::AutoGradMode gradients(true);
    const memory::LiveBytes live;
    std::vector<StageRun> runs;
    Tensors in{state.micro_batch};
    for (std::size_t i = 0; i < forward.size(); ++i) {
      const LayerLocks::Lock lock_of_layer(state.locks, i, state.deadline);
      const std::int64_t before = live.now();
      const auto begin = Clock::now();
      const bool wanted = i > 0 && in.front().requires_grad();
      runs.emplace_back(state.model.part(i, i + 1), Tensors{in.front().detach()}, std::vector<bool>{wanted},
                        state.split);
      forward[i] = ms_since(begin);
      in = runs.back().outputs();
      if (in.size() != 1) {
        throw UsageError(kWhereProfile, concat("layer ", state.model.layers()[i].name, " hands ", in.size(),
                                               " tensors on, expected one"));
      }
      // What the forward left alive: its output, and what its backward will read.
      bytes[i] = live.now() - before;
    }
    Tensors gradient{at::ones_like(in.front())};
    in.clear();
    for (std::size_t i = forward.size(); i-- > 0;) {
      const LayerLocks::Lock lock_of_layer(state.locks, i, state.deadline);
      auto begin = Clock::now();
      if (!state.split) {
        gradient = runs[i].backward(gradient);
        // One backward made both, and half for each is a guess.
        input_gradient[i] = weight_gradient[i] = ms_since(begin) / 2;
        continue;
      }
      gradient = runs[i].input_gradients(gradient);
      input_gradient[i] = ms_since(begin);
      begin = Clock::now();
      runs[i].weight_gradients();
      weight_gradient[i] = ms_since(begin);
    }
  }
};

// Passes on the first placement, while the others that share its device are busy with the same layers.
std::vector<Pass> run_passes(const std::shared_ptr<ProfileState>& state, const ProfileOptions& options) {
  const base::Deadline deadline = state->deadline;
  const auto timed = parallel::PlacementWorker::of(options.placements.front());
  state->micro_batch = state->micro_batch.detach().to(timed->device());
  std::vector<std::shared_ptr<parallel::PlacementWorker>> workers;
  std::vector<base::Future<void>> company;
  for (std::size_t i = 1; i < options.placements.size(); ++i) {
    workers.push_back(parallel::PlacementWorker::of(options.placements[i]));
    if (workers.back()->device() != timed->device() || workers.back() == timed) continue;
    company.push_back(workers.back()->submit("profile", [state] {
      do {
        const Pass pass(*state);
      } while (!state->is_over);
    }));
  }
  const auto passes = std::make_shared<std::vector<Pass>>();  // a pass that is late outlives this function
  const auto run_all = [state, passes, repeats = options.repeats] {
    for (int i = 0; i <= repeats && !state->is_over; ++i) passes->emplace_back(*state);
  };
  try {
    if (timed->is_current()) {
      run_all();
    } else {
      company.push_back(timed->submit("profile", run_all));
      company.back().get(deadline);
    }
    state->is_over = true;
    for (auto& each : company) {
      if (each.valid()) each.get(deadline);
    }
  } catch (...) {
    state->is_over = true;
    const base::Deadline late(options.timeout);  // until they end they add to gradients
    for (auto& each : company) {
      try {
        if (each.valid()) each.get(late);
      } catch (const std::exception&) {  // the first error says more
      }
    }
    throw;
  }
  passes->erase(passes->begin());  // the first does not count
  return std::move(*passes);
}

}  // namespace

KeepState::KeepState(const std::vector<Stage>& stages) {
  for (const Stage& stage : stages) {
    for (const at::Tensor& buffer : stage.buffers()) buffers_.emplace_back(buffer, buffer.detach().clone());
    for (const at::Tensor& parameter : stage.parameters()) {
      // Set aside and not copied: backward makes new ones meanwhile.
      gradients_.emplace_back(parameter, parameter.grad());
      parameter.mutable_grad() = at::Tensor();
    }
  }
}

KeepState::~KeepState() {
  const at::NoGradGuard no_grad;
  for (auto& [buffer, value] : buffers_) buffer.copy_(value);
  // Backwards, as a parameter of two stages stands here twice.
  for (auto each = gradients_.rbegin(); each != gradients_.rend(); ++each) {
    // Stages may have moved their parameters to another device meanwhile.
    at::Tensor& gradient = each->second;
    if (gradient.defined()) gradient = gradient.to(each->first.device());
    each->first.mutable_grad() = gradient;
  }
}

OwnNumbers::OwnNumbers(const std::vector<c10::Device>& devices)
    : OwnNumbers(devices,
                 at::make_generator<at::CPUGeneratorImpl>(c10::detail::getNonDeterministicRandom())) {}

// Operators that are given the CPU's global generator draw from `own`, too.
OwnNumbers::OwnNumbers(const std::vector<c10::Device>& devices, const at::Generator& own)
    : scope_(own, own), gpus_(core::generators_of_gpus(devices)) {}

std::vector<LayerProfile> profile_layers(const Stage& model, const at::Tensor& micro_batch,
                                         const ProfileOptions& options) {
  if (!model.is_list())
    throw UsageError(kWhereProfile, concat(model.name(), " is no list of layers"), "a torch::nn::Sequential");
  if (options.repeats < 1)
    throw UsageError(kWhereProfile, concat("got ", options.repeats, " repeats, expected at least 1"));
  if (options.placements.empty()) throw UsageError(kWhereProfile, "got no placement", "cpu:0");
  const KeepState keep({model});
  std::vector<LayerProfile> profiles(model.layers().size());
  for (std::size_t i = 0; i < profiles.size(); ++i) {
    const Stage layer = model.part(i, i + 1);
    profiles[i].name = model.layers()[i].name;
    for (const at::Tensor& parameter : layer.parameters()) {
      profiles[i].parameter_bytes += static_cast<std::int64_t>(parameter.nbytes());
    }
  }
  const OwnNumbers numbers({core::device_of(options.placements.front())});
  const std::shared_ptr<ProfileState> state(new ProfileState{
      model, options.split, micro_batch, LayerLocks(model), base::Deadline(options.timeout)});
  const std::vector<Pass> passes = run_passes(state, options);
  for (std::size_t i = 0; i < profiles.size(); ++i) {
    const auto median_of = [&](std::vector<double> Pass::*times) {
      std::vector<double> values;
      for (const Pass& pass : passes) values.push_back((pass.*times)[i]);
      return median(std::move(values));
    };
    profiles[i].activation_bytes = passes.front().bytes[i];
    profiles[i].forward = median_of(&Pass::forward);
    profiles[i].input_gradient = median_of(&Pass::input_gradient);
    profiles[i].weight_gradient = median_of(&Pass::weight_gradient);
  }
  return profiles;
}

}  // namespace cohort::pipeline
