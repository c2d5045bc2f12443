#pragma once

#include <ATen/Context.h>
#include <gtest/gtest.h>

#include "cohort/core/device.h"

namespace cohort::test {

/// Called in SetUp(): skips the test where there is no GPU, and says why.
inline void skip_without_gpu() {
  const core::ResolvedDevice found = core::resolve_device("auto");
  if (found.device.is_cpu()) GTEST_SKIP() << found.reason;
}

/// A test that needs a GPU. Kernels are those that repeat their bits, and compute in float32 where they say
/// so.
class GpuTest : public ::testing::Test {
 protected:
  void SetUp() override {
    skip_without_gpu();
    if (IsSkipped()) return;
    at::Context& context = at::globalContext();
    context.setDeterministicCuDNN(true);
    context.setAllowTF32CuDNN(false);
    context.setAllowTF32CuBLAS(false);
  }

  const at::Device gpu{at::kCUDA, 0};
};

}  // namespace cohort::test
