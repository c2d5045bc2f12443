#include <gtest/gtest.h>

#include "cohort/parallel/device_mapped.h"
#include "tests/support/random/random_calls.h"
#include "tests/support/seeds.h"

namespace cohort::parallel {
namespace {

struct ProgramImpl : torch::nn::Module {
  explicit ProgramImpl(const test::RandomProgram& given) : program(given) {}
  test::Tensors forward(const at::Tensor& a, const at::Tensor& b, const at::Tensor& c) {
    return program({a, b, c});
  }
  test::RandomProgram program;
};
TORCH_MODULE(Program);

TEST(RandomProgramsTest, PlacedModulesDoWhatThePlainCallDoes) {
  const auto seeds = test::Seeds::usual(200);
  int compared = 0;
  for (unsigned seed = seeds.first; seed < seeds.end; ++seed) {
    compared += test::expect_like_plain(
        seed,
        [](const test::RandomProgram& program, const test::Captured&) -> test::Run {
          const auto placed =
              std::make_shared<DeviceMapped<Program>>(Program(program), base::Placement::parse("cpu:0"));
          return [=](const test::Tensors& in) { return placed->forward(in.at(0), in.at(1), in.at(2)); };
        },
        {"with a graph of its own", "hand over a clone() of one of them", "step the optimizer after backward",
         "A view was created in no_grad"});
  }
  EXPECT_GT(compared, static_cast<int>(seeds.count()));
}

}  // namespace
}  // namespace cohort::parallel
