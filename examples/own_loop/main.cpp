// Cohort without its Trainer: an own loop over the loader, a fused optimizer, a schedule and checkpoints from
// which it continues where it was.
//
//   Run:      own_loop [STEPS] [FOLDER]      run it again with the same FOLDER and more STEPS: it continues
//   Expect:   a line per 20 steps with a falling loss, then "stopped and resumed: max difference 0"
//
#include <torch/torch.h>

#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <random>

#include "cohort/checkpoint/run_checkpoints.h"
#include "cohort/data/loader.h"
#include "cohort/memory/allocator.h"
#include "cohort/optim/adam.h"
#include "cohort/optim/schedule.h"
#include "cohort/train/loop_state.h"

namespace {

/// A data set is a size and a function: points of a noisy sine.
class Sine : public cohort::data::ExampleDataset {
 public:
  std::int64_t size() const override { return 4096; }
  std::vector<at::Tensor> get(std::int64_t index, cohort::base::RandomStream& random) const override {
    const double x = 6.28 * static_cast<double>(index) / 4096;
    const double y = std::sin(x) + 0.01 * random.normal();
    return {at::full({1}, x, at::kFloat), at::full({1}, y, at::kFloat)};
  }
};

/// Trains up to step `steps`, from the last checkpoint in `folder` where there is one, and returns the model.
torch::nn::Sequential train(const std::filesystem::path& folder, std::int64_t steps, std::int64_t all_steps) {
  torch::manual_seed(1);
  torch::nn::Sequential net(torch::nn::Linear(1, 64), torch::nn::Tanh(), torch::nn::Linear(64, 1));
  cohort::optim::Adam optimizer(net->parameters(), cohort::optim::AdamOptions(1e-2));
  const auto schedule = cohort::optim::cosine(all_steps);
  cohort::data::Loader loader(std::make_shared<Sine>(),
                              {.batch_size = 64, .workers = 1, .shuffle = true, .seed = 1});

  cohort::train::LoopState loop(*net, optimizer, loader);
  cohort::checkpoint::RunCheckpoints checkpoints(folder);
  if (auto found = checkpoints.load_usable()) loop.restore(found->content);

  while (loop.step < steps) {
    auto batch = loader.next();
    if (!batch) continue;  // the end of an epoch: the next call begins another
    schedule->apply(optimizer, loop.step);
    optimizer.zero_grad();
    at::Tensor loss = torch::mse_loss(net->forward(batch->input()), batch->target());
    loss.backward();
    optimizer.step();
    ++loop.step;
    if (loop.step % 20 == 0) {
      std::printf("step %lld  loss %.5f\n", static_cast<long long>(loop.step), loss.item<double>());
    }
    if (loop.step % 50 == 0 || loop.step == steps) {
      checkpoints.save("step_" + std::to_string(loop.step), loop.content());
    }
  }
  return net;
}

}  // namespace

int main(int argc, char** argv) {
  cohort::memory::tune_allocator();
  const std::int64_t steps = argc > 1 ? std::atoll(argv[1]) : 200;
  if (argc > 2) {
    train(argv[2], steps, steps);
    return 0;
  }
  // The same training twice: in one go, and stopped in the middle.
  const auto folder =
      std::filesystem::temp_directory_path() / ("own_loop_" + std::to_string(std::random_device()()));
  const torch::nn::Sequential straight = train(folder / "straight", steps, steps);
  train(folder / "stopped", steps / 2, steps);
  const torch::nn::Sequential resumed = train(folder / "stopped", steps, steps);
  std::filesystem::remove_all(folder);
  double difference = 0;
  const auto parameters = straight->named_parameters();
  for (const auto& entry : resumed->named_parameters()) {
    difference = std::max(difference, (parameters[entry.key()] - entry.value()).abs().max().item<double>());
  }
  std::printf("stopped and resumed: max difference %g\n", difference);
  return difference == 0 ? 0 : 1;
}
