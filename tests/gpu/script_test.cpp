// Script mode on a GPU: the bits of eager mode there.
#include <ATen/autocast_mode.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <torch/csrc/autograd/autograd.h>

#include "cohort/models/lenet.h"
#include "cohort/models/resnet.h"
#include "cohort/models/vgg.h"
#include "cohort/optim/autocast.h"
#include "cohort/script/file.h"
#include "gpu_test.h"
#include "tests/script/trainings.h"
#include "tests/support/temp_dir.h"

namespace cohort::script {
namespace {

using namespace trainings;

class GpuScriptTest : public cohort::test::GpuTest {
 protected:
  Training training(bool adam = false, bool bf16 = false) const {
    return {.steps = 30, .adam = adam, .bf16 = bf16, .device = gpu};
  }
};

TEST_F(GpuScriptTest, MlpWithBatchNormAndDropout) {
  const auto make = [] { return cohort::test::small_mlp(); };
  expect_same(make, batches_of({16, 32}, 16), training());
  expect_same(make, batches_of({16, 32}, 16), training(true));
}

TEST_F(GpuScriptTest, LeNet) {
  expect_same([] { return models::LeNet5(options_of("lenet5", 1, 28, 1)); }, batches_of({4, 1, 28, 28}, 4),
              training());
}

// With a linear head: adaptive pooling's backward adds up in any order on a GPU.
TEST_F(GpuScriptTest, Vgg11OfAnEighthOfItsWidth) {
  auto options = options_of("vgg11", 3, 32, 0.125);
  options.head = "linear";
  expect_same([=] { return models::VGG(options); }, batches_of({2, 3, 32, 32}, 2), training());
}

TEST_F(GpuScriptTest, ResNet18OfAnEighthOfItsWidth) {
  expect_same([] { return models::ResNet(options_of("resnet18", 3, 32, 0.125)); },
              batches_of({2, 3, 32, 32}, 2), training());
}

TEST_F(GpuScriptTest, TransformerLayerWithAttentionAndDropout) {
  expect_same([] { return cohort::test::Encoder(); }, batches_of({6, 4, 32}, 24), training(true));
}

TEST_F(GpuScriptTest, InBf16) {
  expect_same([] { return cohort::test::small_mlp(); }, batches_of({16, 32}, 16), training(false, true));
  expect_same([] { return cohort::test::Encoder(); }, batches_of({6, 4, 32}, 24), training(true, true));
}

// Forward on a stream of LibTorch's pool, and backward called outside of it: each part of the backward waits
// for the one before.
TEST_F(GpuScriptTest, ABackwardInPartsIsOrderedAfterAForwardOnAnotherStream) {
  const at::Tensor w = at::rand({512, 512}, gpu).requires_grad_(),
                   v = at::rand({512, 512}, gpu).requires_grad_();
  const auto fn = [=](const at::Tensor& x) {
    at::Tensor y = x;
    for (int i = 0; i < 8; ++i) y = y.mm(w).tanh().mm(v).tanh();
    return y;
  };
  auto fast = script(fn, ScriptOptions().gradient_chunk_bytes(1));
  const c10::impl::VirtualGuardImpl cuda(c10::kCUDA);
  for (int call = 0; call < 12; ++call) {
    const at::Tensor x = at::rand({512, 512}, gpu);
    const Tensors expected = torch::autograd::grad({fn(x).sum()}, {w, v});
    cuda.synchronizeDevice(0);
    at::Tensor y;
    {
      const c10::StreamGuard guard(cuda.getStreamFromGlobalPool(gpu));
      y = fast(x);
    }
    cuda.synchronizeDevice(0);
    const Tensors found = torch::autograd::grad({y.sum()}, {w, v});
    EXPECT_TRUE(same_bits(found[0], expected[0]) && same_bits(found[1], expected[1])) << call;
  }
}

// Autocast on the GPU does not reach operators within a kernel that ran without it.
TEST_F(GpuScriptTest, KernelsThatCallOperatorsOfAutocastRunInTheTypeOfEagerMode) {
  auto fast = script([](const at::Tensor& x) { return at::cdist(x, x * 2).add(1); });
  at::autocast::set_autocast_enabled(at::kCUDA, true);
  for (int call = 0; call < 6; ++call) {
    const at::NoGradGuard no_grad;
    const at::Tensor x = at::rand({64, 32}, gpu);
    EXPECT_TRUE(same_bits(fast(x), at::cdist(x, x * 2).add(1))) << call;
  }
  at::autocast::set_autocast_enabled(at::kCUDA, false);
}

// Each of a device of its own, and a kernel that calls operators of autocast within: what was recorded
// decides, and never what autocast the caller has for either device.
TEST_F(GpuScriptTest, AFileBringsItsOwnAutocastForEachDeviceAndIgnoresTheCallers) {
  using optim::Autocast;
  const at::Tensor weights = at::rand({32, 32});
  const auto fn = [=](const at::Tensor& x) {
    return x.matmul(weights.to(x.device())).relu() + at::cdist(x, x * 2).sum();
  };
  const cohort::test::TempDir dir;
  const at::NoGradGuard no_grad;
  for (const at::Device own : {gpu, at::Device(at::kCPU)}) {
    const at::Tensor x = at::rand({64, 32}, at::TensorOptions(own));
    for (const bool is_narrow : {false, true}) {
      auto fast = script([&](const at::Tensor& input) {
        const Autocast autocast(own.type(), at::kBFloat16, is_narrow);
        return fn(input);
      });
      for (int call = 0; call < 2; ++call) fast(x);
      fast.save(dir / "a.program");
      const LoadedProgram program = load(dir / "a.program");
      const Tensors expected = {fast(x)};
      for (const bool on_gpu : {false, true}) {
        for (const bool on_cpu : {false, true}) {
          const Autocast there(at::kCUDA, at::kHalf, on_gpu), here(at::kCPU, at::kBFloat16, on_cpu);
          for (int call = 0; call < 6; ++call) {  // in the arena too
            EXPECT_TRUE(same_bits(program(x), expected)) << own << is_narrow << on_gpu << on_cpu << call;
          }
          EXPECT_EQ(at::autocast::is_autocast_enabled(at::kCUDA), on_gpu);
          EXPECT_EQ(at::autocast::is_autocast_enabled(at::kCPU), on_cpu);
          if (on_gpu) {
            const at::Tensor y = at::rand({4, 4}, gpu);
            EXPECT_EQ(y.mm(y).scalar_type(), at::kHalf);  // the caller's continues
          }
        }
      }
    }
  }
}

TEST_F(GpuScriptTest, AnIfOnATensorStaysEagerThereToo) {
  auto fast = script([](const at::Tensor& x) { return x.sum().item<float>() > 0 ? x * 2 : x * 3; });
  const at::Tensor x = at::ones({4}, gpu);
  for (int i = 0; i < 4; ++i) {
    EXPECT_TRUE(same_bits(fast(x), x * 2));
    EXPECT_TRUE(same_bits(fast(-x), x * -3));
  }
  EXPECT_NE(fast.explain().find("eager: "), std::string::npos) << fast.explain();
}

TEST_F(GpuScriptTest, AProgramForEachDevice) {
  auto fast = script([](const at::Tensor& x) { return (x * 2).tanh(); });
  const at::Tensor on_cpu = at::rand({8}), there = on_cpu.to(gpu);
  for (int i = 0; i < 5; ++i) {
    EXPECT_TRUE(same_bits(fast(on_cpu), (on_cpu * 2).tanh()));
    EXPECT_TRUE(same_bits(fast(there), (there * 2).tanh()));
  }
}

}  // namespace
}  // namespace cohort::script
