#include "cohort/pipeline/profile.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/ones_like.h>

#include <algorithm>

#include "cohort/core/live_bytes.h"
#include "cohort/core/placement.h"
#include "cohort/parallel/placement_worker.h"
#include "cohort/pipeline/stage_run.h"

namespace cohort::pipeline {
namespace {

using core::concat;
using Clock = std::chrono::steady_clock;
constexpr const char* kWhere = "pipeline.profile_layers";

double median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}

double ms_since(Clock::time_point begin) {
  return std::chrono::duration<double, std::milli>(Clock::now() - begin).count();
}

// One forward and backward through all layers, each by itself.
class Pass {
 public:
  Pass(const Stage& model, bool split, std::vector<LayerProfile>& profiles)
      : model_(model), split_(split), profiles_(profiles) {}

  void run(const at::Tensor& input) {
    const core::LiveBytes bytes;
    const std::size_t count = model_.layers().size();
    std::vector<StageRun> runs;
    Tensors in{input};
    for (std::size_t i = 0; i < count; ++i) {
      const std::int64_t before = bytes.now();
      const auto begin = Clock::now();
      const bool wanted = i > 0 && in.front().requires_grad();
      runs.emplace_back(model_.part(i, i + 1), Tensors{in.front().detach()}, std::vector<bool>{wanted},
                        split_);
      forward.push_back(ms_since(begin));
      in = runs.back().outputs();
      if (in.size() != 1) {
        throw UsageError(kWhere, concat("layer ", model_.layers()[i].name, " hands ", in.size(),
                                        " tensors on, expected one"));
      }
      profiles_[i].activation_bytes = bytes.now() - before;
    }
    input_gradient.resize(count);
    weight_gradient.resize(count);
    Tensors gradient{at::ones_like(in.front())};
    in.clear();
    for (std::size_t i = count; i-- > 0;) {
      auto begin = Clock::now();
      if (!split_) {
        gradient = runs[i].backward(gradient);
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

  std::vector<double> forward, input_gradient, weight_gradient;

 private:
  const Stage& model_;
  const bool split_;
  std::vector<LayerProfile>& profiles_;
};

}  // namespace

KeepState::KeepState(const std::vector<Stage>& stages) {
  for (const Stage& stage : stages) {
    for (const at::Tensor& buffer : stage.buffers()) buffers_.emplace_back(buffer, buffer.detach().clone());
    for (const at::Tensor& parameter : stage.parameters()) {
      gradients_.emplace_back(parameter, parameter.grad());
      parameter.mutable_grad() = at::Tensor();
    }
  }
}

KeepState::~KeepState() {
  const at::NoGradGuard no_grad;
  for (auto& [buffer, value] : buffers_) buffer.copy_(value);
  // Backwards, as a parameter of two stages stands here twice.
  for (auto each = gradients_.rbegin(); each != gradients_.rend(); ++each)
    each->first.mutable_grad() = each->second;
}

std::vector<LayerProfile> profile_layers(const Stage& model, const at::Tensor& micro_batch,
                                         const ProfileOptions& options) {
  if (!model.is_list())
    throw UsageError(kWhere, concat(model.name(), " is no list of layers"), "a torch::nn::Sequential");
  if (options.repeats < 1)
    throw UsageError(kWhere, concat("got ", options.repeats, " repeats, expected at least 1"));
  const KeepState keep({model});
  std::vector<LayerProfile> profiles(model.layers().size());
  for (std::size_t i = 0; i < profiles.size(); ++i) {
    const Stage layer = model.part(i, i + 1);
    profiles[i].name = model.layers()[i].name;
    for (const at::Tensor& parameter : layer.parameters()) {
      profiles[i].parameter_bytes += static_cast<std::int64_t>(parameter.nbytes());
    }
  }
  const auto worker = parallel::PlacementWorker::of(core::Placement::parse(options.placement));
  std::vector<Pass> passes;
  worker->run("profile", [&] {
    const at::AutoGradMode gradients(true);
    for (int repeat = 0; repeat <= options.repeats; ++repeat) {  // the first does not count
      Pass pass(model, options.split, profiles);
      pass.run(micro_batch.detach().to(worker->device()));
      if (repeat > 0) passes.push_back(std::move(pass));
    }
  });
  for (std::size_t i = 0; i < profiles.size(); ++i) {
    const auto median_of = [&](std::vector<double> Pass::*times) {
      std::vector<double> values;
      for (const Pass& pass : passes) values.push_back((pass.*times)[i]);
      return median(std::move(values));
    };
    profiles[i].forward = median_of(&Pass::forward);
    profiles[i].input_gradient = median_of(&Pass::input_gradient);
    profiles[i].weight_gradient = median_of(&Pass::weight_gradient);
  }
  return profiles;
}

}  // namespace cohort::pipeline
