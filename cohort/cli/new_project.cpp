// A table: the files of `cohort new project`, as texts. They are the smallest plug-in that trains: a data set
// and a model that register themselves, and a configuration that names both. The data set is drawn from its
// seed, so the project trains before the user has any data.
#include "cohort/cli/internal/new_files.h"

namespace cohort::cli {
namespace {

constexpr std::string_view kProjectCMake =
    R"--(# lib@NAME@.so: a model and a data set for `cohort train --load`. README.md has the commands.
cmake_minimum_required(VERSION 3.22)
project(@NAME@ LANGUAGES CXX)
if(NOT CMAKE_BUILD_TYPE)
  set(CMAKE_BUILD_TYPE Release)
endif()

find_package(Cohort @VERSION@ REQUIRED)

add_library(@NAME@ MODULE @NAME@.cpp)
target_link_libraries(@NAME@ PRIVATE cohort::data cohort::models)
)--";

constexpr std::string_view kProjectSource =
    R"--(// A data set and a model for `cohort train`. Change both to yours.
#include <ATen/ops/relu.h>
#include <ATen/ops/scalar_tensor.h>
#include <ATen/ops/tensor.h>
#include <cohort/data/dataset.h>
#include <cohort/models/registry.h>
#include <torch/nn/modules/linear.h>

#include <cmath>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

namespace {

/// Points on two rings, and on which ring each lies. Yours may list the files in args.at("path"), which is
/// data.path/train or data.path/val, and read one of them in get().
class Rings : public cohort::data::ExampleDataset {
 public:
  explicit Rings(const cohort::data::DatasetArgs& args)
      : size_(args.integer("size", 1000, 1)),
        noise_(args.number("noise", 0.2)),
        seed_(args.at("split") == "train" ? 1 : 2) {}

  std::int64_t size() const override { return size_; }
  std::vector<std::string> classes() const override { return {"inner", "outer"}; }

  /// Called by several threads at once. What differs from epoch to epoch, such as a crop, draws from the
  /// stream that is handed in; these points are the same in each, and draw from a stream of their own.
  std::vector<at::Tensor> get(std::int64_t index, cohort::base::RandomStream&) const override {
    const auto position = static_cast<std::uint64_t>(index);
    cohort::base::RandomStream random(seed_, 0, position, cohort::base::Purpose::kUser);
    const std::int64_t label = index % 2;
    const double angle = random.uniform(0, 6.283185307179586);
    const double radius = 1.0 + static_cast<double>(label) + noise_ * random.normal();
    return {at::tensor({radius * std::cos(angle), radius * std::sin(angle)}, at::kFloat),
            at::scalar_tensor(label, at::kLong)};
  }

 private:
  std::int64_t size_;
  double noise_;
  std::uint64_t seed_;
};

struct NetImpl : torch::nn::Module {
  NetImpl(std::int64_t width, std::int64_t num_classes)
      : hidden(register_module("hidden", torch::nn::Linear(2, width))),
        out(register_module("out", torch::nn::Linear(width, num_classes))) {}
  at::Tensor forward(const at::Tensor& x) { return out(at::relu(hidden(x))); }
  torch::nn::Linear hidden, out;
};
TORCH_MODULE(Net);

}  // namespace

// The names that @NAME@.yaml uses, and what `data.options` and `model.options` may say.
COHORT_REGISTER_DATASET(@NAME@_data, [](const cohort::data::DatasetArgs& args) {
  return std::make_shared<const Rings>(args);
});

COHORT_REGISTER_MODEL("@NAME@_net", [](const cohort::models::ModelOptions& options) {
  return torch::nn::AnyModule(Net(options.extra.integer("width", 32, 1), options.num_classes));
});
)--";

constexpr std::string_view kConfig =
    R"--(# All keys: cohort train --help-config. On the command line key=value wins over this file.
model:
  name: @NAME@_net
  options: {width: 32}
data:
  type: @NAME@_data
  options: {size: 1000, noise: 0.2}
optim: {name: adamw, lr: 0.01}
train: {epochs: 5, batch_size: 50}
run: {name: @NAME@}
)--";

constexpr std::string_view kReadme =
    R"--(# @NAME@

A model and a data set of your own (`@NAME@.cpp`), trained by `cohort train` as `@NAME@.yaml` says.

    cmake -B build -DCMAKE_PREFIX_PATH=COHORT && cmake --build build
    cohort train --load ./build/lib@NAME@.so --config @NAME@.yaml
    cohort eval --load ./build/lib@NAME@.so --run runs/@NAME@-DATE-TIME

COHORT is the folder that Cohort was installed in, or its build folder, `build/release` of the clone.
`cohort train` prints the run folder, which `cohort eval` takes. Cohort's docs/guide/plugins.md says what a
model and a data set may do.
)--";

}  // namespace

const std::vector<NewFile>& project_files() {
  static const std::vector<NewFile> files = {{"CMakeLists.txt", kProjectCMake},
                                             {"@NAME@.cpp", kProjectSource},
                                             {"@NAME@.yaml", kConfig},
                                             {"README.md", kReadme}};
  return files;
}

}  // namespace cohort::cli
