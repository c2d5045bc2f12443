// A training loop of image classification, and mixed precision.
#include <torch/torch.h>

#include <cstdio>
#include <string>

#include "cohort/data/image_folder.h"
#include "cohort/data/loader.h"
#include "cohort/data/synthetic.h"
#include "cohort/data/transforms/transform.h"
#include "cohort/models/vgg.h"
#include "cohort/optim/autocast.h"
#include "cohort/optim/schedule.h"
#include "cohort/optim/sgd.h"

using namespace cohort;

namespace {

std::shared_ptr<data::Dataset> photos(const std::string& folder) {
  return std::make_shared<data::ImageFolder>(
      folder,
      data::ImageFolderOptions{
          .transforms = {data::random_resized_crop(32), data::random_horizontal_flip(), data::to_tensor(),
                         data::normalize({0.485, 0.456, 0.406}, {0.229, 0.224, 0.225})}});
}

void train(std::shared_ptr<data::Dataset> train_set) {
  models::ModelOptions options;
  options.name = "vgg11_bn";
  options.num_classes = 10;
  options.width = 0.125;
  options.head = "linear";
  models::VGG model(options);
  data::Loader loader(train_set, {.batch_size = 32, .workers = 2, .shuffle = true, .seed = 1});
  optim::SGD optimizer(model->parameters(), optim::SGDOptions(0.05).momentum(0.9).weight_decay(5e-4));
  const auto schedule = optim::per_epoch(optim::step_decay(30, 0.1), loader.batches_per_epoch());
  int64_t step = 0;
  for (int epoch = 0; epoch < 2; ++epoch) {
    loader.set_epoch(epoch);
    double sum = 0;
    while (auto batch = loader.next()) {
      schedule->apply(optimizer, step++);
      optimizer.zero_grad();
      auto output = model->forward(batch->input());
      auto loss = torch::cross_entropy_loss(output, batch->target());
      loss.backward();
      optimizer.step();
      sum += loss.item<double>() * double(batch->size);
    }
    std::printf("epoch %d  loss %.4f\n", epoch, sum / double(train_set->size()));
  }
}

void mixed_precision() {
  torch::nn::Linear model(64, 10);
  optim::SGD optimizer(model->parameters(), optim::SGDOptions(0.01));
  const at::Tensor input = torch::randn({32, 64}), target = torch::randint(10, {32});
  optimizer.zero_grad();
  at::Tensor loss;
  {
    optim::Autocast autocast(at::kCPU, at::kBFloat16);
    loss = torch::cross_entropy_loss(model->forward(input), target);
  }
  loss.backward();
  optimizer.step();
  std::printf("mixed precision: loss %.4f\n", loss.item<double>());
}

}  // namespace

void run_training(const std::string& folder) {
  torch::manual_seed(1);
  if (!folder.empty()) {
    train(photos(folder));
  } else {
    train(
        std::make_shared<data::SyntheticDataset>(data::SyntheticOptions{.size = 256, .shape = {3, 32, 32}}));
  }
  mixed_precision();
}
