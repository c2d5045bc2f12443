#include "cohort/autograd/scoped_version_counter.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

namespace cohort::autograd {
namespace {

TEST(ScopedVersionCounterTest, WritesToOnePartAreNoChangesOfAnother) {
  const at::Tensor whole = at::zeros({4});
  at::Tensor left = whole.narrow(0, 0, 2), right = whole.narrow(0, 2, 2);
  const ScopedVersionCounter of_left(left, whole), of_right(right, whole);
  const auto whole_before = version_of(whole), right_before = version_of(right);
  left.add_(1);
  left.add_(1);
  EXPECT_EQ(version_of(left), 2u);
  EXPECT_EQ(version_of(right), right_before);
  EXPECT_EQ(version_of(whole), whole_before);
  EXPECT_EQ(whole[0].item<float>(), 2);
}

TEST(ScopedVersionCounterTest, PublishedChangesOfThePartsAreChangesOfTheWhole) {
  const at::Tensor whole = at::zeros({4});
  at::Tensor left = whole.narrow(0, 0, 2), right = whole.narrow(0, 2, 2);
  ScopedVersionCounter of_left(left, whole), of_right(right, whole);
  const auto before = version_of(whole);
  left.add_(1);
  right.add_(1);
  right.add_(1);
  of_left.publish();
  of_right.publish();
  EXPECT_EQ(version_of(whole), before + 3);
  of_left.sync();
  of_right.sync();
  const auto left_before = version_of(left);
  of_left.propagate();
  EXPECT_EQ(version_of(left), left_before) << "nobody has written to the whole since sync()";
}

// What a part saved for backward is then found to be changed.
TEST(ScopedVersionCounterTest, ALaterChangeOfTheWholeIsOneOfEachPart) {
  const at::Tensor whole = at::zeros({4});
  const at::Tensor left = whole.narrow(0, 0, 2), right = whole.narrow(0, 2, 2);
  ScopedVersionCounter of_left(left, whole), of_right(right, whole);
  whole.add_(1);
  for (int i = 0; i < 2; ++i) {
    of_left.propagate();
    of_right.propagate();
    EXPECT_EQ(version_of(left), 1u) << "counted once";
    EXPECT_EQ(version_of(right), 1u);
  }
}

TEST(ScopedVersionCounterTest, BackwardRejectsAPartWhoseWholeWasChanged) {
  const at::Tensor whole = at::ones({4}), weight = at::ones({2}).requires_grad_();
  const at::Tensor part = whole.narrow(0, 0, 2);
  ScopedVersionCounter count(part, whole);
  const at::Tensor unharmed = (weight * part).sum(), harmed = (weight * part).sum();
  unharmed.backward();
  whole.add_(1);
  count.propagate();
  EXPECT_THROW(harmed.backward(), c10::Error);
}

TEST(ScopedVersionCounterTest, VersionsThatAreNotCountedAre0) {
  EXPECT_EQ(version_of(at::Tensor()), 0u);
  const c10::InferenceMode mode;
  at::Tensor tensor = at::zeros({1});
  tensor.add_(1);
  EXPECT_EQ(version_of(tensor), 0u);
}

}  // namespace
}  // namespace cohort::autograd
