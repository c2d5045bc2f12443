// Files that Cohort wrote at commit 1203c97, before its modules were renamed and moved: golden/run_1203c97,
// with the script that made them.
#include <ATen/Parallel.h>
#include <gtest/gtest.h>
#include <torch/version.h>

#include <iostream>

#include "cohort/base/error.h"
#include "cohort/checkpoint/safetensors.h"
#include "cohort/checkpoint/state_dict.h"
#include "cohort/models/registry.h"
#include "cohort/script/file.h"
#include "cohort/train/internal/fit/compatibility.h"
#include "cohort/train/run.h"
#include "tests/support/source_dir.h"
#include "tests/train/small_run.h"

namespace cohort::train {
namespace {

namespace fs = std::filesystem;
using test::read_file;
using test::SmallRun;

class EarlierFilesTest : public testing::Test {
 protected:
  EarlierFilesTest() {
    fs::copy(golden / "run", run.path(), fs::copy_options::recursive | fs::copy_options::copy_symlinks);
  }

  /// Resumes the run under the configuration that it was started with.
  FitResult resume(std::vector<std::string> overrides) const {
    overrides.insert(overrides.end(), {"run.dir=" + run.path().string(), "run.resume=auto"});
    return run_training(config::load_config((golden / "run/config.yaml").string(), overrides), "test").fit;
  }

  const fs::path golden = test::source_dir() / "tests/train/golden/run_1203c97";
  const SmallRun run;
};

// A learning rate of 0 leaves the weights as they were read.
TEST_F(EarlierFilesTest, WeightsAreReadAndWrittenBitForBit) {
  const std::string before = run.model();
  EXPECT_EQ(resume({"train.max_steps=8", "optim.lr=0"}).steps, 8);
  EXPECT_TRUE(fs::canonical(run.path() / "checkpoints" / "last").string().ends_with("step_00000008"));
  EXPECT_TRUE(run.model() == before);
}

// Its last 8 steps give the bits that they gave there, where nothing has other kernels or another order of
// additions. Elsewhere they round in another way.
TEST_F(EarlierFilesTest, ARunContinuesFromWeightsMomentumScheduleAndPosition) {
  const checkpoint::TensorMap expected = checkpoint::load_safetensors(golden / "continued.safetensors");
  EXPECT_EQ(resume({"train.max_steps=0"}).steps, 15);
  const checkpoint::TensorMap got =
      checkpoint::load_safetensors(run.path() / "checkpoints/last/model.safetensors");
  ASSERT_EQ(got.size(), expected.size());
  const std::string here = base::concat("LibTorch ", TORCH_VERSION, "\ninstructions ", instruction_set(),
                                        "\nthreads ", at::get_num_threads(), "\n");
  const std::string there = read_file(golden / "made_with.txt");
  const bool is_bitwise = here == there;
  std::cout << (is_bitwise ? "compared bit for bit, with\n" : "compared by tolerance, with\n") << here
            << "The files were made with\n"
            << there;
  for (std::size_t i = 0; i < expected.size(); ++i) {
    EXPECT_EQ(got[i].first, expected[i].first);
    const at::Tensor &is = got[i].second, &was = expected[i].second;
    EXPECT_TRUE(is_bitwise ? at::equal(is, was) : at::allclose(is, was, 1e-5, 1e-7)) << got[i].first;
  }
}

TEST_F(EarlierFilesTest, AProgramComputesWhatTheModelDoes) {
  const script::LoadedProgram program = script::load(golden / "model.program");
  torch::nn::AnyModule model = models::make_model(
      {.name = "mlp", .num_classes = 4, .in_channels = 1, .image_size = 4, .extra = {{"hidden", "8"}}});
  checkpoint::load_module_state(
      *model.ptr(), checkpoint::load_safetensors(golden / "run/checkpoints/last/model.safetensors"));
  model.ptr()->eval();
  const at::Tensor images = at::arange(16, at::kFloat).view({1, 1, 4, 4}) / 16;
  const at::NoGradGuard no_grad;
  const std::vector<at::Tensor> got = program(images);
  ASSERT_EQ(got.size(), 1u);
  EXPECT_TRUE(at::equal(got[0], model.forward(images)));
}

}  // namespace
}  // namespace cohort::train
