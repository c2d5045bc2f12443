#include "cohort/pipeline/model_runner.h"

#include <memory>
#include <utility>

namespace cohort::pipeline {

parallel::ModelRunner run_pipeline(PipelineParts parts, at::Device device) {
  const auto pipe = std::make_shared<Pipeline>(std::move(parts.stages), std::move(parts.options));
  parallel::ModelRunner runner;
  runner.forward = [=](const at::Tensor& input) { return pipe->forward(input).to(device); };
  runner.step = [=](const at::Tensor& input, const at::Tensor& target,
                    const parallel::ModelRunner::Loss& loss, double scale) {
    const at::Tensor value = pipe->step(input, target, loss, scale);
    return parallel::ModelRunner::Step{value.to(device), pipe->outputs().front().to(device)};
  };
  return runner;
}

}  // namespace cohort::pipeline
