// Cohort without its Trainer: an own loop over the loader, a fused optimizer, a schedule and a checkpoint.
//
//   Run:      own_loop [STEPS]
//   Expect:   a line per 20 steps with a falling loss, then "read back: max difference 0"
//
#include <torch/torch.h>

#include <cstdio>
#include <cstdlib>

#include "cohort/checkpoint/safetensors.h"
#include "cohort/checkpoint/state_dict.h"
#include "cohort/core/allocator.h"
#include "cohort/data/loader.h"
#include "cohort/optim/adam.h"
#include "cohort/optim/schedule.h"

namespace {

/// A data set is a size and a function: points of a noisy sine.
class Sine : public cohort::data::ExampleDataset {
 public:
  std::int64_t size() const override { return 4096; }
  std::vector<at::Tensor> get(std::int64_t index, cohort::core::RandomStream& random) const override {
    const double x = 6.28 * static_cast<double>(index) / 4096;
    const double y = std::sin(x) + 0.01 * random.normal();
    return {at::full({1}, x, at::kFloat), at::full({1}, y, at::kFloat)};
  }
};

}  // namespace

int main(int argc, char** argv) {
  cohort::core::tune_allocator();
  const std::int64_t steps = argc > 1 ? std::atoll(argv[1]) : 200;
  torch::manual_seed(1);

  torch::nn::Sequential net(torch::nn::Linear(1, 64), torch::nn::Tanh(), torch::nn::Linear(64, 1));
  cohort::optim::Adam optimizer(net->parameters(), cohort::optim::AdamOptions(1e-2));
  const auto schedule = cohort::optim::cosine(steps);
  cohort::data::Loader loader(std::make_shared<Sine>(),
                              {.batch_size = 64, .workers = 1, .shuffle = true, .seed = 1});

  std::int64_t step = 0;
  for (std::int64_t epoch = 0; step < steps; ++epoch) {
    loader.set_epoch(epoch);
    while (auto batch = loader.next()) {
      schedule->apply(optimizer, step);
      optimizer.zero_grad();
      at::Tensor loss = torch::mse_loss(net->forward(batch->input()), batch->target());
      loss.backward();
      optimizer.step();
      if (++step % 20 == 0)
        std::printf("step %lld  loss %.5f\n", static_cast<long long>(step), loss.item<double>());
      if (step == steps) break;
    }
  }

  cohort::checkpoint::save_safetensors("own_loop.safetensors", cohort::checkpoint::module_state(*net));
  double difference = 0;
  const auto parameters = net->named_parameters();
  for (const auto& [name, tensor] : cohort::checkpoint::load_safetensors("own_loop.safetensors")) {
    difference = std::max(difference, (parameters[name] - tensor).abs().max().item<double>());
  }
  std::printf("read back: max difference %g\n", difference);
  return difference == 0 ? 0 : 1;
}
