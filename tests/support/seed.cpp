#include <ATen/CPUGeneratorImpl.h>
#include <gtest/gtest.h>

#include <mutex>

namespace cohort::test {
namespace {

// Every test draws the same numbers in every run: LibTorch seeds its generator from the machine's entropy.
// Not by at::manual_seed(), which would look for GPUs before a test asks for one.
class Seeded : public testing::EmptyTestEventListener {
  void OnTestStart(const testing::TestInfo& /*test*/) override {
    at::Generator generator = at::detail::getDefaultCPUGenerator();
    const std::lock_guard lock(generator.mutex());
    generator.set_current_seed(1);
  }
};

[[maybe_unused]] const bool is_registered = [] {
  testing::UnitTest::GetInstance()->listeners().Append(new Seeded);  // which owns it
  return true;
}();

}  // namespace
}  // namespace cohort::test
