// Model parallel at its smallest: the two halves of a toy model on two placements, of which each has a thread
// of its own for forward and backward.
//
//   Run:      model_parallel [FIRST] [SECOND] [STEPS]     placements; by default cpu:0/first, cpu:0/second,
//   100 Expect:   a line per 20 steps with the loss, falling from about 1; then
//             "the same as on one device"
//
#include <torch/torch.h>

#include <cstdio>
#include <cstdlib>
#include <exception>

#include "cohort/parallel/device_mapped.h"

namespace {

using cohort::base::Placement;

struct ToyModelImpl : torch::nn::Module {
  ToyModelImpl(const Placement& first, const Placement& second)
      : net1(register_module("net1", torch::nn::Linear(10, 10)), first),
        net2(register_module("net2", torch::nn::Linear(10, 5)), second) {}
  at::Tensor forward(const at::Tensor& x) { return net2.forward(torch::relu(net1.forward(x))); }

  cohort::parallel::DeviceMapped<torch::nn::Linear> net1, net2;
};
TORCH_MODULE(ToyModel);

template <typename Model>
double train(Model& model, int steps, bool print) {
  torch::optim::SGD optimizer(model->parameters(), 0.05);  // parameters may be on several devices
  torch::manual_seed(2);
  const at::Tensor input = torch::randn({20, 10}), target = torch::randn({20, 5});
  double last = 0;
  for (int step = 1; step <= steps; ++step) {
    optimizer.zero_grad();
    const at::Tensor output = model->forward(input);  // on the second placement
    const at::Tensor loss = torch::mse_loss(output, target.to(output.device()));
    loss.backward();  // through the second half on its thread, then through the first
    optimizer.step();
    last = loss.template item<double>();
    if (print && (step == 1 || step % 20 == 0)) std::printf("step %3d  loss %.5f\n", step, last);
  }
  return last;
}

}  // namespace

int main(int argc, char** argv) {
  try {
    const Placement first = Placement::parse(argc > 1 ? argv[1] : "cpu:0/first");
    const Placement second = Placement::parse(argc > 2 ? argv[2] : "cpu:0/second");
    const int steps = argc > 3 ? std::atoi(argv[3]) : 100;
    torch::set_num_threads(1);
    torch::manual_seed(1);
    ToyModel model(first, second);
    torch::manual_seed(1);
    torch::nn::Linear net1(10, 10), net2(10, 5);
    torch::nn::Sequential plain(net1, torch::nn::ReLU(), net2);
    const double loss = train(model, steps, true), expected = train(plain, steps, false);
    const bool is_same = std::abs(loss - expected) < 1e-5;
    std::printf(is_same ? "the same as on one device\n" : "one device has %.6f\n", expected);
    return is_same ? 0 : 1;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "error: %s\n", error.what());
    return 1;
  }
}
