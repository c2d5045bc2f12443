#include "cohort/train/loop_state.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>
#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/dropout.h>
#include <torch/nn/modules/linear.h>
#include <torch/optim/adam.h>

#include "cohort/base/error.h"
#include "cohort/checkpoint/state_dict.h"
#include "cohort/data/tensor_dataset.h"
#include "cohort/optim/adam.h"
#include "cohort/optim/schedule.h"
#include "cohort/train/classification.h"
#include "cohort/train/trainer.h"
#include "tests/support/temp_dir.h"
#include "tests/support/throws.h"

namespace cohort::train {
namespace {

namespace nn = torch::nn;

std::shared_ptr<data::Dataset> samples(std::int64_t count = 20) {
  const at::Tensor input = at::arange(count * 3, at::kFloat).view({count, 3}) / 60;
  return std::make_shared<data::TensorDataset>(std::vector<at::Tensor>{input, input.sum(1, true)});
}

/// A loop of one's own, with all that a resume can forget: Adam's moments and steps, batch norm's statistics,
/// dropout, a shuffled order, a schedule.
struct OwnLoop {
  explicit OwnLoop(std::uint64_t seed = 1, int workers = 0)
      : loader(samples(), {.batch_size = 4, .workers = workers, .shuffle = true, .seed = 3}) {
    at::manual_seed(seed);
    net = nn::Sequential(nn::Linear(3, 8), nn::BatchNorm1d(8), nn::Dropout(0.5), nn::Linear(8, 1));
    optimizer = std::make_unique<optim::Adam>(net->parameters(), optim::AdamOptions(0.01).amsgrad(true));
    loop = std::make_unique<LoopState>(*net, *optimizer, loader);
  }

  void train(std::int64_t until) {
    const auto schedule = optim::cosine(30);
    while (loop->step < until) {
      auto batch = loader.next();
      if (!batch) continue;
      schedule->apply(*optimizer, loop->step);
      optimizer->zero_grad();
      torch::mse_loss(net->forward(batch->input()), batch->target()).backward();
      optimizer->step();
      ++loop->step;
    }
  }

  nn::Sequential net{nullptr};
  std::unique_ptr<optim::Optimizer> optimizer;
  data::Loader loader;
  std::unique_ptr<LoopState> loop;
};

void expect_same(const OwnLoop& a, const OwnLoop& b) {
  const auto left = checkpoint::module_state(*a.net), right = checkpoint::module_state(*b.net);
  for (std::size_t i = 0; i < left.size(); ++i) {
    EXPECT_TRUE(at::equal(left[i].second, right[i].second)) << left[i].first;
  }
}

TEST(LoopStateTest, ALoopThatWasStoppedAnywhereContinuesWithTheSameBits) {
  OwnLoop straight;
  straight.train(17);
  for (const std::int64_t stop : {0, 1, 4, 5, 6, 13}) {
    SCOPED_TRACE(stop);
    const test::TempDir dir;
    {
      OwnLoop first;
      first.train(stop);
      checkpoint::RunCheckpoints(dir.path()).save("here", first.loop->content({{"best", 0.5}}));
      first.train(stop + 3);  // what a killed process did after its last save
    }
    OwnLoop second(99, 2);  // other values and another generator, until it is restored
    const auto found = checkpoint::RunCheckpoints(dir.path()).load_usable();
    ASSERT_TRUE(found);
    EXPECT_EQ(second.loop->restore(found->content).at("best"), 0.5);
    EXPECT_EQ(second.loop->step, stop);
    second.train(17);
    expect_same(straight, second);
  }
}

TEST(LoopStateTest, RestoringRejectsWhatItDidNotWrite) {
  OwnLoop own_loop;
  own_loop.train(2);
  const auto content = own_loop.loop->content();
  EXPECT_TRUE(own_loop.loop->restore(content).is_null());

  nn::Sequential other(nn::Linear(3, 1));
  optim::Adam adam(other->parameters(), optim::AdamOptions(0.01));
  COHORT_EXPECT_THROW_WITH(LoopState(*other, adam, own_loop.loader).restore(content), DataError,
                           "is not of this model");

  data::Loader fewer(samples(16), {.batch_size = 4, .shuffle = true, .seed = 3});
  COHORT_EXPECT_THROW_WITH(LoopState(*own_loop.net, *own_loop.optimizer, fewer).restore(content), DataError,
                           "16");

  const test::TempDir dir;
  nn::Sequential net(nn::Linear(3, 2));
  ClassificationTask task(net.ptr(),
                          std::make_shared<optim::Adam>(net->parameters(), optim::AdamOptions(0.1)), nullptr);
  data::Loader classes(std::make_shared<data::TensorDataset>(
                           std::vector<at::Tensor>{at::zeros({4, 3}), at::zeros({4}, at::kLong)}),
                       {.batch_size = 4});
  const FitResult trained = Trainer(TrainerOptions().run_dir(dir.path())).fit(task, classes);
  const auto of_trainer = checkpoint::RunCheckpoints::load(trained.last_checkpoint);
  COHORT_EXPECT_THROW_WITH(own_loop.loop->restore(of_trainer), DataError, "lacks what LoopState needs");
  COHORT_EXPECT_THROW_WITH(
      Trainer(TrainerOptions().run_dir(dir.path() / "x").resume([&] {
        return checkpoint::RunCheckpoints(dir.path() / "own").save("a", content).string();
      }()))
          .fit(task, classes),
      DataError, "lacks what Trainer needs");
}

}  // namespace
}  // namespace cohort::train
