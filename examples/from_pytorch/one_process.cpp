// Several devices without a launcher: DataParallel, and a pipeline.
#include <torch/torch.h>

#include <cstdio>

#include "cohort/models/layers.h"
#include "cohort/models/resnet.h"
#include "cohort/parallel/data_parallel.h"
#include "cohort/pipeline/pipeline.h"

using namespace cohort;

namespace {

struct NetImpl : torch::nn::Cloneable<NetImpl> {
  NetImpl(int64_t in, int64_t out) : in(in), out(out) { reset(); }
  void reset() override { fc = register_module("fc", torch::nn::Linear(in, out)); }
  at::Tensor forward(const at::Tensor& input) { return fc->forward(input); }

  int64_t in, out;
  torch::nn::Linear fc{nullptr};
};
TORCH_MODULE(Net);

void data_parallel() {
  const at::Tensor input = torch::randn({30, 5}), target = torch::randn({30, 2});
  Net net(5, 2);
  parallel::DataParallel<Net> model(net, {.device_ids = base::parse_placements("cpu:0/a,cpu:0/b")});
  torch::optim::SGD optimizer(net->parameters(), 0.01);
  auto output = model.forward(input);
  auto loss = torch::mse_loss(output, target);
  loss.backward();
  optimizer.step();
  std::printf("data_parallel: output of %d rows, loss %.4f\n", int(output.size(0)), loss.item<double>());
}

models::ResNet make_resnet() {
  models::ModelOptions options;
  options.name = "resnet50";
  options.num_classes = 10;
  options.width = 0.25;
  return models::ResNet(options);
}

void pipelined() {
  const at::Tensor images = torch::randn({12, 3, 32, 32});
  const at::Tensor labels = torch::one_hot(torch::randint(10, {12}), 10).to(torch::kFloat);
  models::ResNet resnet = make_resnet();
  pipeline::Stage whole(models::layers_of(resnet.ptr()));
  size_t cut = 0;
  while (whole.layers()[cut].name != "layer3.0") ++cut;
  pipeline::Pipeline pipe({whole.part(0, cut), whole.part(cut, whole.layers().size())},
                          {.placements = base::parse_placements("cpu:0/a,cpu:0/b"), .split_size = 4});
  torch::optim::SGD optimizer(resnet->parameters(), 0.001);
  optimizer.zero_grad();
  auto loss = pipe.step(images, labels, [](const at::Tensor& output, const at::Tensor& label) {
    return torch::mse_loss(output, label);
  });
  optimizer.step();
  std::printf("pipelined: %d micro-batches, loss %.4f\n", pipe.num_micro_batches(12), loss.item<double>());
}

}  // namespace

void run_one_process() {
  torch::set_num_threads(1);
  torch::manual_seed(1);
  data_parallel();
  pipelined();
}
