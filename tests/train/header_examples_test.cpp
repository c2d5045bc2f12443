// Examples of headers, compiled. The lines of an example stand here as they do in its header, in their order.
#include "tests/support/header_examples.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>
#include <torch/nn/modules/linear.h>

#include "cohort/autograd/recompute.h"
#include "cohort/base/log.h"
#include "cohort/base/placement.h"
#include "cohort/bench/compare.h"
#include "cohort/bench/timeit.h"
#include "cohort/checkpoint/run_checkpoints.h"
#include "cohort/checkpoint/state_dict.h"
#include "cohort/config/config.h"
#include "cohort/data/image_folder.h"
#include "cohort/data/loader.h"
#include "cohort/data/transforms/transform_pipeline.h"
#include "cohort/models/layers.h"
#include "cohort/models/mlp.h"
#include "cohort/ops/check.h"
#include "cohort/ops/operator.h"
#include "tests/support/source_dir.h"
#include "tests/support/temp_dir.h"

namespace cohort {
namespace {

struct Mask {
  at::Tensor kept;
};
COHORT_NESTED(Mask, kept)

struct MaskedLayer {
  std::pair<at::Tensor, at::Tensor> both(const at::Tensor& x, const Mask& mask) const {
    return {x * mask.kept, x + mask.kept};
  }
};

// clang-format off

[[maybe_unused]] void loader_example(const data::ImageFolderOptions& options) {
  using namespace data;
  const auto train = [](const at::Tensor&, const at::Tensor&) {};
  Loader loader(std::make_shared<ImageFolder>("data/train", options),
                {.batch_size = 128, .workers = 2});
  for (std::int64_t epoch = 0; epoch < 10; ++epoch) {
    while (auto batch = loader.next()) train(batch->input(), batch->target());
  }
}

void checkpoints_example(const std::filesystem::path& run_dir, torch::nn::Linear model) {
  using namespace checkpoint;
  RunCheckpoints checkpoints(run_dir / "checkpoints", {.keep = 3});
  checkpoints.save("epoch_0005", {.model = module_state(*model), .state = {{"epoch", 5}}});

  auto found = checkpoints.load_usable();
  if (found) load_module_state(*model, found->content.model);
}

std::string timeit_example(const at::Tensor& x, const at::Tensor& y) {
  bench::Measurement figure =
      bench::timeit([&] { return x.mul(y); }, bench::TimeitOptions().label("mul"));
  std::string line = figure.to_text();
  // mul: best 1.23 us, median 1.25 us, spread 2 %, 7 rounds of 20000 calls, 1 thread
  return line;
}

[[maybe_unused]] std::string compare_example() {
  const auto composite = [](const bench::Shape& shape) {
    return [x = at::ones(shape)] { return x.sigmoid().mul(x); };
  };
  const auto fused = [](const bench::Shape& shape) { return [x = at::ones(shape)] { return at::silu(x); }; };
  auto figures = bench::compare(
      {{"composite", composite}, {"fused", fused}},  // each returns the call for a bench::Shape
      bench::CompareOptions().shapes({{1024, 64}, {1024, 4096}}).threads({1, 2}));
  std::string table = figures.markdown();
  return table;
}

[[maybe_unused]] void transforms_example(std::span<const std::byte> bytes, base::RandomStream& random, float* buffer) {
  using namespace data;
  const std::vector<double> mean{0.5}, std{0.2};
  TransformPipeline pipeline(
      {random_resized_crop(64), random_horizontal_flip(), to_tensor(), normalize(mean, std)});
  pipeline.run_encoded(bytes, "cat.jpg", random, buffer, Layout::kChannelsLast);
}

[[maybe_unused]] void config_example() {
  auto config = cohort::config::load_config("configs/fashion-vgg.yaml", {"optim.lr=0.05"});
  for (const auto& line : config.warnings) cohort::base::log_warning(line);
}

at::Tensor recompute_example(torch::nn::Linear block, const at::Tensor& x) {
  const auto layer = std::make_unique<MaskedLayer>();
  const Mask mask{at::ones({2})};
  auto y = autograd::recompute(block, x);   // a module of one tensor
  auto [a, b] = autograd::recompute(        // anything of nested.h
      [&](const at::Tensor& x, const Mask& m) { return layer->both(x, m); }, x, mask);
  return y + a + b;
}

std::vector<std::string> layers_example(models::MLP model) {
  std::vector<std::string> names;
  for (const auto& [name, layer] : models::layers_of(model.ptr())) names.push_back(name);
  return names;
}

at::Tensor scale(const at::Tensor& x, double by) { return x * by; }
at::Tensor scale_meta(const at::Tensor& x, double by) { return x * by; }
TORCH_LIBRARY(mine, library) {
  cohort::ops::define(library, "scale(Tensor x, float by) -> Tensor")
      .cpu(&scale)
      .meta(&scale_meta)
      .backward([](const cohort::ops::Call& call, const std::vector<at::Tensor>& gradients) {
        return std::vector<at::Tensor>{gradients[0] * call.argument<double>(1)};
      });
}

at::Tensor operator_example(const at::Tensor& x) {
  at::Tensor y;
  static const auto scale = cohort::ops::find<at::Tensor(const at::Tensor&, double)>("mine::scale");
  y = scale.call(x, 2.0);
  return y;
}

void check_example() {
  const at::Tensor x = at::ones({2, 3}, at::kDouble).requires_grad_();
  ops::opcheck("mine::scale", {x, 2.0});
  ops::gradcheck([](const auto& inputs) { return std::vector<at::Tensor>{inputs[0].sin()}; }, {x});
}

// clang-format on

TEST(HeaderExamplesTest, StandHereInTheOrderOfTheirHeaders) {
  const std::string here = test::read_file(test::source_dir() / "tests/train/header_examples_test.cpp");
  for (const char* header : {"data/loader.h", "checkpoint/run_checkpoints.h", "bench/timeit.h",
                             "bench/compare.h", "data/transforms/transform_pipeline.h", "config/config.h",
                             "autograd/recompute.h", "models/layers.h", "ops/operator.h", "ops/check.h"}) {
    const std::vector<std::string> lines = test::example_of(header);
    EXPECT_FALSE(lines.empty()) << header;
    EXPECT_EQ(test::first_missing(lines, here), "") << header;
  }
}

TEST(HeaderExamplesTest, AreComparedInTheirOrder) {
  EXPECT_EQ(test::first_missing({"a();", "b();"}, "  a();\n  c();\n  b();\n"), "");
  EXPECT_EQ(test::first_missing({"b();", "a();"}, "  a();\n  b();\n"), "a();");
  EXPECT_EQ(test::first_missing({"a();", "a();"}, "  a();\n  b();\n"), "a();");
}

TEST(HeaderExamplesTest, SayWhatTheySay) {
  const test::TempDir folder;
  checkpoints_example(folder.path(), torch::nn::Linear(2, 3));
  EXPECT_TRUE(std::filesystem::exists(folder / "checkpoints" / "epoch_0005" / "model.safetensors"));
  EXPECT_TRUE(timeit_example(at::ones({4}), at::ones({4})).starts_with("mul: best "));
  const at::Tensor x = at::ones({2});
  EXPECT_EQ(recompute_example(torch::nn::Linear(2, 2), x).sizes(), x.sizes());
  models::ModelOptions mlp;
  mlp.name = "mlp";
  mlp.image_size = 2;
  EXPECT_FALSE(layers_example(models::MLP(mlp)).empty());
  EXPECT_TRUE(at::equal(operator_example(x), 2 * x));
  EXPECT_NO_THROW(check_example());
}

TEST(HeaderExamplesTest, EveryPlacementOfTheTableIsWhatItSays) {
  const std::map<std::string, std::string> cores = {
      {"cpu", "4-7"}, {"cpu:0", "4"}, {"cpu:2-3", "6-7"}, {"cpu:0,2", "4,6"}, {"cpu:0/a", "4"}};
  const base::CpuSet allowed = base::CpuSet::parse("4-7");
  const std::vector<std::string> lines = test::example_of("base/placement.h");
  EXPECT_EQ(lines.size(), 6u);
  for (const std::string& line : lines) {
    const std::string text = line.substr(0, line.find(' '));
    const base::Placement placement = base::Placement::parse(text, allowed);
    if (text == "cuda:3") {
      EXPECT_EQ(placement.device, text);
    } else {
      EXPECT_EQ(placement.cpus.to_string(), cores.at(text)) << text;
    }
  }
}

}  // namespace
}  // namespace cohort
