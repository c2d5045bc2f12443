// Examples of headers, compiled. Each line of an example stands here as it does in its header.
#include <ATen/ATen.h>
#include <gtest/gtest.h>
#include <torch/nn/modules/linear.h>

#include <fstream>
#include <regex>

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

// clang-format on

// The lines of the examples in a header, without their indentation.
std::vector<std::string> example_of(const std::string& header) {
  std::ifstream file(test::source_dir() / "cohort" / header);
  std::vector<std::string> lines;
  for (std::string line; std::getline(file, line);) {
    std::smatch code;
    if (std::regex_match(line, code, std::regex("/// {5,}(.*)"))) lines.push_back(code[1]);
  }
  return lines;
}

TEST(HeaderExamplesTest, StandHereAsTheyStandInTheirHeaders) {
  const std::string here = test::read_file(test::source_dir() / "tests/train/header_examples_test.cpp");
  for (const char* header :
       {"data/loader.h", "checkpoint/run_checkpoints.h", "bench/timeit.h", "bench/compare.h",
        "data/transforms/transform_pipeline.h", "config/config.h", "autograd/recompute.h"}) {
    const std::vector<std::string> lines = example_of(header);
    EXPECT_FALSE(lines.empty()) << header;
    for (const std::string& line : lines) {
      EXPECT_NE(here.find(" " + line + "\n"), std::string::npos) << header << ": " << line;
    }
  }
}

TEST(HeaderExamplesTest, SayWhatTheySay) {
  const test::TempDir folder;
  checkpoints_example(folder.path(), torch::nn::Linear(2, 3));
  EXPECT_TRUE(std::filesystem::exists(folder / "checkpoints" / "epoch_0005" / "model.safetensors"));
  EXPECT_TRUE(timeit_example(at::ones({4}), at::ones({4})).starts_with("mul: best "));
  const at::Tensor x = at::ones({2});
  EXPECT_EQ(recompute_example(torch::nn::Linear(2, 2), x).sizes(), x.sizes());
}

TEST(HeaderExamplesTest, EveryPlacementOfTheTableIsOne) {
  const std::vector<std::string> lines = example_of("base/placement.h");
  EXPECT_EQ(lines.size(), 6u);
  for (const std::string& line : lines) {
    const std::string text = line.substr(0, line.find(' '));
    if (text.starts_with("cpu")) continue;  // which cores there are depends on the machine
    EXPECT_EQ(text, "cuda:3");
  }
}

}  // namespace
}  // namespace cohort
