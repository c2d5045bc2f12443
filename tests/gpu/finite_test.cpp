// Gradients that are not finite on a GPU: no step is made of them, and nobody waits to know.
#include <ATen/ATen.h>
#include <c10/core/Event.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/utils/clip_grad.h>
#include <torch/optim/adam.h>
#include <torch/optim/adamw.h>
#include <torch/optim/sgd.h>

#include <cmath>
#include <limits>

#include "cohort/base/error.h"
#include "cohort/data/tensor_dataset.h"
#include "cohort/optim/adam.h"
#include "cohort/optim/clip.h"
#include "cohort/optim/sgd.h"
#include "cohort/train/classification.h"
#include "cohort/train/internal/fit/step_check.h"
#include "cohort/train/trainer.h"
#include "gpu_test.h"
#include "tests/support/throws.h"
#include "tests/train/steep.h"

namespace cohort {
namespace {

using test::Steep;

class GpuFiniteTest : public test::GpuTest {
 protected:
  std::vector<at::Tensor> parameters() const {
    return {at::ones({5, 3}, gpu).set_requires_grad(true), at::ones({70'000}, gpu).set_requires_grad(true)};
  }
  /// A number that the GPU takes a while to come to.
  at::Tensor busy() const {
    at::Tensor numbers = at::rand({4096, 4096}, gpu);
    for (int i = 0; i < 200; ++i) numbers = numbers.mm(numbers).tanh();
    return numbers.sum();
  }
  void set_gradients(std::vector<at::Tensor>& of, double value) const {
    for (at::Tensor& parameter : of) parameter.mutable_grad() = at::full_like(parameter, value);
  }
};

std::vector<std::unique_ptr<optim::Optimizer>> optimizers(const std::vector<at::Tensor>& parameters) {
  std::vector<std::unique_ptr<optim::Optimizer>> made;
  made.push_back(
      std::make_unique<optim::SGD>(parameters, optim::SGDOptions(0.1).momentum(0.9).dampening(0.2)));
  made.push_back(std::make_unique<optim::Adam>(parameters, optim::AdamOptions(0.1)));
  made.push_back(std::make_unique<optim::AdamW>(parameters, optim::AdamWOptions(0.1)));
  return made;
}

TEST_F(GpuFiniteTest, AStepThatIsNotMadeLeavesNoTrace) {
  for (const double bad : {std::numeric_limits<double>::infinity(), std::nan("")}) {
    for (std::size_t kind = 0; kind < 3; ++kind) {
      for (const int bad_step : {1, 3}) {
        SCOPED_TRACE(base::concat(kind, ", step ", bad_step, ", ", bad));
        std::vector<at::Tensor> ours = parameters(), straight = parameters();
        const auto optimizer = std::move(optimizers(ours)[kind]),
                   peer = std::move(optimizers(straight)[kind]);
        for (int step = 1; step <= 4; ++step) {
          if (step == bad_step) {
            set_gradients(ours, 0.5);
            ours[1].mutable_grad()[69'999] = bad;
            const optim::NonFinite found = optim::find_non_finite(optimizer->param_groups());
            EXPECT_TRUE(found.on_device.is_cuda());
            optimizer->step_unless(found);
          }
          set_gradients(ours, 0.1 * step);
          set_gradients(straight, 0.1 * step);
          optimizer->step_unless(optim::find_non_finite(optimizer->param_groups()));
          peer->step();
        }
        for (std::size_t i = 0; i < ours.size(); ++i) EXPECT_TRUE(at::equal(ours[i], straight[i])) << i;
        EXPECT_EQ(optimizer->state().scalars, peer->state().scalars);
      }
    }
  }
}

TEST_F(GpuFiniteTest, NeitherClippingNorTheStepWaitsForTheGpu) {
  const c10::impl::VirtualGuardImpl cuda(c10::kCUDA);
  std::vector<at::Tensor> ours = parameters();
  optim::SGD optimizer(ours, optim::SGDOptions(0.1));
  const auto step = [&](const at::Tensor& zero) {
    for (at::Tensor& parameter : ours) parameter.mutable_grad() = at::ones_like(parameter) + zero;
    c10::Event gradients_are_there(c10::kCUDA);
    gradients_are_there.record(cuda.getStream(gpu));
    optimizer.step_unless(optim::find_non_finite(optimizer.param_groups()));
    const bool waited_for_finding = gradients_are_there.query();
    for (at::Tensor& parameter : ours) parameter.mutable_grad() = at::ones_like(parameter) + zero;
    optim::clip_grad_norm_unless_non_finite_(optimizer.param_groups(), 0.5);
    return std::pair(waited_for_finding, gradients_are_there.query());
  };
  for (int i = 0; i < 3; ++i) step(at::zeros({}, gpu));  // loads the kernels
  cuda.synchronizeDevice(0);
  // The flag of the step before is looked at now, and stands before what keeps the GPU busy.
  EXPECT_EQ(step(busy() * 0), std::pair(false, false));
  cuda.synchronizeDevice(0);
}

TEST_F(GpuFiniteTest, CheckingAStepDoesNotWaitForTheOneAfterIt) {
  const c10::impl::VirtualGuardImpl cuda(c10::kCUDA);
  train::StepCheck check;
  const auto add = [&](std::int64_t step, const at::Tensor& loss) {
    return check.add(step, {{"loss", loss, 1}}, optim::non_finite_scalar(loss));
  };
  add(1, at::ones({}, gpu));
  EXPECT_EQ(add(2, at::full({}, std::nan(""), gpu)).size(), 1u);  // loads the kernels
  cuda.synchronizeDevice(0);
  const at::Tensor late = busy() * 0;
  c10::Event is_done(c10::kCUDA);
  is_done.record(cuda.getStream(gpu));
  const auto known = add(3, late);
  EXPECT_FALSE(is_done.query());
  ASSERT_EQ(known.size(), 1u);
  EXPECT_FALSE(known[0].is_finite());
  EXPECT_TRUE(check.take_pending()->is_finite());
}

data::Loader loader_on(at::Device device, std::int64_t bad_batch = -1) {
  at::manual_seed(7);
  const at::Tensor input = at::randn({40, 6});
  const at::Tensor target = input.argmax(1);
  if (bad_batch >= 0) input.narrow(0, bad_batch * 8, 8).fill_(std::nan(""));
  return data::Loader(std::make_shared<data::TensorDataset>(std::vector<at::Tensor>{input, target}),
                      {.batch_size = 8, .device = device});
}

TEST_F(GpuFiniteTest, AStepThatIsLeftOutLeavesNoTraceInRunningStatistics) {
  const torch::nn::BatchNorm1d norm(6);
  torch::nn::Sequential net(norm, torch::nn::Linear(6, 6));
  net->to(gpu);
  train::ClassificationTask task(
      net.ptr(), std::make_shared<optim::SGD>(net->parameters(), optim::SGDOptions(0.1)), nullptr);
  data::Loader loader = loader_on(gpu, 2);
  train::Trainer(train::TrainerOptions().stop_on_non_finite(false)).fit(task, loader);
  EXPECT_TRUE(at::isfinite(norm->running_mean).all().item<bool>());
  EXPECT_TRUE(at::isfinite(norm->running_var).all().item<bool>());
  EXPECT_EQ(norm->num_batches_tracked.item<std::int64_t>(), 4);
}

TEST_F(GpuFiniteTest, ATrainerContinuesWithAFiniteModel) {
  for (const double clip_norm : {0.0, 1.0}) {
    for (const bool in_loss : {false, true}) {
      SCOPED_TRACE(base::concat("clip_norm ", clip_norm, in_loss ? ", loss" : ", gradient"));
      Steep net(in_loss ? -1 : 5);
      net->to(gpu);
      auto optimizer = std::make_shared<optim::SGD>(net->parameters(), optim::SGDOptions(0.1).momentum(0.9));
      train::ClassificationTask task(net.ptr(), optimizer, nullptr,
                                     train::ClassificationOptions().clip_norm(clip_norm));
      data::Loader loader = loader_on(gpu, in_loss ? 4 : -1);  // the very last step
      const train::FitResult result =
          train::Trainer(train::TrainerOptions().stop_on_non_finite(false)).fit(task, loader);
      for (const at::Tensor& parameter : net->parameters())
        EXPECT_TRUE(at::isfinite(parameter).all().item<bool>());
      EXPECT_TRUE(std::isfinite(result.metrics.at("train_loss")));
    }
  }
}

TEST_F(GpuFiniteTest, ATrainerStopsAtTheVeryLastStepToo) {
  Steep net(5);
  net->to(gpu);
  auto optimizer = std::make_shared<optim::SGD>(net->parameters(), optim::SGDOptions(0.1));
  train::ClassificationTask task(net.ptr(), optimizer, nullptr);
  data::Loader loader = loader_on(gpu);
  COHORT_EXPECT_THROW_WITH(train::Trainer(train::TrainerOptions()).fit(task, loader), NumericError,
                           "a gradient of step 5 (epoch 1) is not finite");
}

}  // namespace
}  // namespace cohort
