// ResNet-50 in two parts on two placements: conv1 to layer2 on the first, layer3 to fc on the second.
//
//   Run:      model_parallel_resnet50 [FIRST] [SECOND] [BATCH] [SIZE] [STEPS]
//             by default cpu:0/first cpu:0/second 4 64 3
//   Expect:   lines with what each part has, "1.4 million parameters", "22.1 million"; a line per step with
//             the losses of the two parts and of one device, equal but for rounding; then
//             "the same as on one device"
//
#include <torch/torch.h>

#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <exception>

#include "cohort/models/layers.h"
#include "cohort/models/resnet.h"
#include "cohort/models/stack.h"
#include "cohort/parallel/device_mapped.h"

namespace {

using cohort::base::Placement;
using cohort::models::ResNet;
using cohort::models::Stack;

// The layers of a ResNet, from the one called `begin` up to the one called `end`.
Stack part_of(const ResNet& resnet, const std::string& begin, const std::string& end) {
  Stack part;
  bool inside = false;
  for (const auto& [name, layer] : cohort::models::layers_of(resnet.ptr())) {
    inside = (inside || name == begin) && name != end;
    if (inside) part->add(layer);
  }
  return part;
}

struct TwoPartsImpl : torch::nn::Module {
  TwoPartsImpl(const ResNet& resnet, const Placement& on_first, const Placement& on_second)
      : first(register_module("first", part_of(resnet, "conv1", "layer3.0")), on_first),
        second(register_module("second", part_of(resnet, "layer3.0", "")), on_second) {}
  at::Tensor forward(const at::Tensor& images) { return second.forward(first.forward(images)); }

  cohort::parallel::DeviceMapped<Stack> first, second;
};
TORCH_MODULE(TwoParts);

ResNet make_resnet() {
  torch::manual_seed(1);
  cohort::models::ModelOptions options;
  options.name = "resnet50";
  options.num_classes = 10;
  return ResNet(options);
}

void describe(const char* which, const Placement& placement, torch::nn::Module& part) {
  double parameters = 0;
  for (const at::Tensor& parameter : part.parameters()) parameters += double(parameter.numel());
  std::printf("%s part on %s: %.1f million parameters\n", which, placement.name.c_str(), parameters / 1e6);
}

template <typename Model>
double step(Model& model, torch::optim::SGD& optimizer, const at::Tensor& images, const at::Tensor& labels) {
  optimizer.zero_grad();
  const at::Tensor output = model->forward(images);  // on the second placement
  const at::Tensor loss = torch::mse_loss(output, labels.to(output.device()));
  loss.backward();
  optimizer.step();
  return loss.template item<double>();
}

}  // namespace

int main(int argc, char** argv) {
  try {
    const Placement first = Placement::parse(argc > 1 ? argv[1] : "cpu:0/first");
    const Placement second = Placement::parse(argc > 2 ? argv[2] : "cpu:0/second");
    const int batch = argc > 3 ? std::atoi(argv[3]) : 4, size = argc > 4 ? std::atoi(argv[4]) : 64;
    const int steps = argc > 5 ? std::atoi(argv[5]) : 3;
    torch::set_num_threads(1);
    TwoParts model(make_resnet(), first, second);
    ResNet plain = make_resnet();  // the same initial values
    describe("first", first, *model->first.ptr());
    describe("second", second, *model->second.ptr());
    torch::optim::SGD optimizer(model->parameters(), 1e-4), optimizer_of_plain(plain->parameters(), 1e-4);
    bool is_same = true;
    for (int i = 1; i <= steps; ++i) {
      const at::Tensor images = torch::randn({batch, 3, size, size});
      const at::Tensor labels = torch::one_hot(torch::randint(10, {batch}), 10).to(torch::kFloat);
      const double loss = step(model, optimizer, images, labels);
      const double expected = step(plain, optimizer_of_plain, images, labels);
      std::printf("step %d  loss %.6f  on one device %.6f\n", i, loss, expected);
      is_same = is_same && std::abs(loss - expected) <= 1e-5 * std::abs(expected);
    }
    std::puts(is_same ? "the same as on one device" : "one device has other numbers");
    return is_same ? 0 : 1;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "error: %s\n", error.what());
    return 1;
  }
}
