// A model of your own, trained with an installed Cohort from a project of your own.
//
//   Run:      my_project
//   Expect:   two lines, the second with a loss below 0.1, and exit status 0
//
#include <cohort/data/loader.h>
#include <cohort/memory/allocator.h>
#include <cohort/optim/adam.h>
#include <torch/torch.h>

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <memory>
#include <vector>

namespace {

/// Is a point inside the unit circle?
class Circle : public cohort::data::ExampleDataset {
 public:
  std::int64_t size() const override { return 4096; }
  std::vector<at::Tensor> get(std::int64_t, cohort::base::RandomStream& random) const override {
    const double x = 3 * random.uniform() - 1.5, y = 3 * random.uniform() - 1.5;
    const std::int64_t inside = std::hypot(x, y) < 1 ? 1 : 0;
    return {torch::tensor({x, y}, at::kFloat), torch::tensor(inside)};
  }
};

struct NetImpl : torch::nn::Module {
  NetImpl() {
    hidden = register_module("hidden", torch::nn::Linear(2, 32));
    out = register_module("out", torch::nn::Linear(32, 2));
  }
  at::Tensor forward(const at::Tensor& x) { return out(torch::tanh(hidden(x))); }
  torch::nn::Linear hidden{nullptr}, out{nullptr};
};
TORCH_MODULE(Net);

}  // namespace

int main() {
  cohort::memory::tune_allocator();
  torch::manual_seed(1);
  Net net;
  cohort::optim::Adam optimizer(net->parameters(), cohort::optim::AdamOptions(2e-2));
  cohort::data::Loader loader(std::make_shared<Circle>(),
                              {.batch_size = 64, .workers = 1, .shuffle = true, .seed = 1});

  double loss_value = 0;
  for (std::int64_t epoch = 0; epoch < 6; ++epoch) {
    loader.set_epoch(epoch);
    while (auto batch = loader.next()) {
      optimizer.zero_grad();
      const at::Tensor loss = torch::cross_entropy_loss(net->forward(batch->input()), batch->target());
      loss.backward();
      optimizer.step();
      loss_value = loss.item<double>();
    }
    if (epoch == 0 || epoch == 5)
      std::printf("epoch %lld  loss %.4f\n", static_cast<long long>(epoch + 1), loss_value);
  }
  return loss_value < 0.1 ? 0 : 1;
}
