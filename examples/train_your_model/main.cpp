// Trainer with a training step of one's own: a small GAN, two networks and two optimizers.
//
//   Run:      train_your_model [EPOCHS] [RUN_FOLDER]     (a folder: checkpoints, and continues where it was)
//   Expect:   a line per epoch; the generated mean moves to 3.0 and its spread to 0.5
//
#include <torch/torch.h>

#include <cstdio>
#include <cstdlib>

#include "cohort/data/loader.h"
#include "cohort/data/tensor_dataset.h"
#include "cohort/memory/allocator.h"
#include "cohort/optim/adam.h"
#include "cohort/train/trainer.h"

namespace {

using namespace cohort;

torch::nn::Sequential make_net(int inputs, int outputs) {
  return torch::nn::Sequential(torch::nn::Linear(inputs, 32), torch::nn::ReLU(),
                               torch::nn::Linear(32, outputs));
}

/// What is trained, and what a step does. Trainer saves and restores all that is added here.
struct Gan : train::Task {
  Gan() {
    add_module("generator", generator.ptr());
    add_module("critic", critic.ptr());
    add_optimizer("generator", generator_optimizer);
    add_optimizer("critic", critic_optimizer);
  }

  train::StepMetrics train_step(data::Batch& batch) override {
    const at::Tensor real = batch.input();
    const at::Tensor ones = at::ones({batch.size, 1});
    const at::Tensor fake = generator->forward(at::randn({batch.size, 4}));

    critic_optimizer->zero_grad();
    at::Tensor critic_loss =
        torch::binary_cross_entropy_with_logits(critic->forward(real), ones) +
        torch::binary_cross_entropy_with_logits(critic->forward(fake.detach()), at::zeros_like(ones));
    critic_loss.backward();
    step_if_finite(*critic_optimizer);

    generator_optimizer->zero_grad();
    at::Tensor loss = torch::binary_cross_entropy_with_logits(critic->forward(fake), ones);
    loss.backward();
    step_if_finite(*generator_optimizer);
    const auto weight = static_cast<double>(batch.size);
    return {{"loss", loss, weight},
            {"critic_loss", critic_loss, weight},
            {"mean", fake.mean(), weight},
            {"spread", fake.std(), weight}};
  }

  torch::nn::Sequential generator = make_net(4, 1), critic = make_net(1, 1);
  std::shared_ptr<optim::Optimizer> generator_optimizer =
      std::make_shared<optim::Adam>(generator->parameters(), optim::AdamOptions(1e-3));
  std::shared_ptr<optim::Optimizer> critic_optimizer =
      std::make_shared<optim::Adam>(critic->parameters(), optim::AdamOptions(1e-3));
};

/// What happens while it runs: here, a line per epoch.
struct Print : train::Callback {
  void on_epoch_end(const train::EpochReport& report) override {
    std::printf("epoch %lld", static_cast<long long>(report.epoch));
    for (const auto& [name, value] : report.metrics) std::printf("  %s %.3f", name.c_str(), value);
    std::printf("\n");
  }
};

}  // namespace

int main(int argc, char** argv) {
  memory::tune_allocator();
  torch::manual_seed(1);
  const at::Tensor samples = at::randn({8192, 1}) * 0.5 + 3.0;
  data::Loader loader(std::make_shared<data::TensorDataset>(std::vector<at::Tensor>{samples}),
                      {.batch_size = 128, .shuffle = true, .seed = 1});
  Gan gan;
  train::TrainerOptions options;
  options.epochs(argc > 1 ? std::atoll(argv[1]) : 20);
  if (argc > 2) options.run_dir(argv[2]).resume("auto");
  train::Trainer trainer(options);
  trainer.add_callback(std::make_shared<Print>());
  trainer.fit(gan, loader);
}
