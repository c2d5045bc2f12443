#pragma once

#include <torch/torch.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <string>
#include <vector>

#include "cohort/models/layers.h"
#include "cohort/models/resnet.h"
#include "cohort/pipeline/pipeline.h"

inline const char* const kPlacements = "cpu:0,cpu:1";

struct Arguments {
  std::int64_t images = 120, size = 128, batches = 3;
  int repeats = 3;
  std::vector<std::int64_t> split{4, 8, 12, 20, 30, 60};
  cohort::pipeline::Schedule schedule = cohort::pipeline::Schedule::kZeroBubble;
  std::string curve;
};

struct Seconds {
  double mean = 0, deviation = 0;
};

// Trains ResNet-50, cut and split as its caller says, and takes the time.
class Experiment {
 public:
  explicit Experiment(const Arguments& arguments)
      : arguments_(arguments),
        model_(options()),
        layers_(cohort::models::layers_of(model_.ptr())),
        optimizer_(model_->parameters(), 0.001) {
    images_ = torch::randn({arguments.images, 3, arguments.size, arguments.size});
    labels_ = torch::one_hot(torch::randint(1000, {arguments.images}), 1000).to(torch::kFloat);
  }

  // The published cut: conv1 to layer2 are the first part.
  std::vector<cohort::pipeline::Stage> published() const {
    std::size_t at = 0;
    while (layers_.layers()[at].name != "layer3.0") ++at;
    return {layers_.part(0, at), layers_.part(at, layers_.layers().size())};
  }

  // A stage per placement, in order; of a stage alone, on the first.
  Seconds run(const std::vector<cohort::pipeline::Stage>& stages, std::int64_t split_size,
              const std::string& placements = kPlacements) {
    cohort::pipeline::PipelineOptions options;
    options.placements = cohort::base::parse_placements(placements);
    options.placements.resize(stages.size());
    options.split_size = split_size;
    options.schedule = arguments_.schedule;
    cohort::pipeline::Pipeline pipe(stages, options);
    const auto train = [&] {
      optimizer_.zero_grad();
      pipe.step(images_, labels_,
                [](const at::Tensor& a, const at::Tensor& b) { return torch::mse_loss(a, b); });
      optimizer_.step();
    };
    train();  // memory comes, and kernels are made
    double sum = 0, squares = 0;
    for (int repeat = 0; repeat < arguments_.repeats; ++repeat) {
      const auto begin = std::chrono::steady_clock::now();
      for (std::int64_t batch = 0; batch < arguments_.batches; ++batch) train();
      const double time = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
      sum += time, squares += time * time;
    }
    const double mean = sum / arguments_.repeats;
    return {mean, std::sqrt(std::max(0.0, squares / arguments_.repeats - mean * mean))};
  }

  const cohort::pipeline::Stage& layers() const { return layers_; }
  at::Tensor images(std::int64_t count) const { return images_.narrow(0, 0, count); }

 private:
  static cohort::models::ModelOptions options() {
    cohort::models::ModelOptions options;
    options.name = "resnet50";
    options.num_classes = 1000;
    return options;
  }
  Arguments arguments_;
  cohort::models::ResNet model_;
  cohort::pipeline::Stage layers_;
  torch::optim::SGD optimizer_;
  at::Tensor images_, labels_;
};
