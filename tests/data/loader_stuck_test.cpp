// A loader whose worker is stuck in a sample: what was read ahead is never delivered at another place.
#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <functional>
#include <vector>

#include "cohort/base/error.h"
#include "cohort/data/loader.h"
#include "tests/support/comes_true.h"
#include "tests/support/gate.h"

namespace cohort::data {
namespace {

/// Sample i is the number i. Reading `stuck_at` waits, the first time.
class StuckOnce : public ExampleDataset {
 public:
  std::int64_t size() const override { return 40; }
  std::vector<at::Tensor> get(std::int64_t index, base::RandomStream&) const override {
    if (index == stuck_at && !is_stuck.exchange(true)) gate.wait();
    return {at::scalar_tensor(index, at::kLong)};
  }

  std::atomic<std::int64_t> stuck_at{-1};
  mutable std::atomic<bool> is_stuck{false};
  mutable cohort::test::Gate gate;
};

/// The samples of all batches that are left of the epoch.
std::vector<std::int64_t> rest_of(Loader& loader) {
  std::vector<std::int64_t> samples;
  while (auto batch = loader.next()) {
    for (std::int64_t i = 0; i < batch->size; ++i) {
      samples.push_back(batch->fields[0][i].item<std::int64_t>());
      EXPECT_EQ(samples.back(), batch->indices[static_cast<std::size_t>(i)]);
    }
  }
  return samples;
}

std::vector<std::int64_t> numbers_from(std::int64_t begin) {
  std::vector<std::int64_t> numbers;
  for (std::int64_t i = begin; i < 40; ++i) numbers.push_back(i);
  return numbers;
}

/// `leap` times out, as a worker is stuck; then the loader is where `leap` asked it to go.
void expect_leap(const std::function<void(Loader&)>& leap, std::int64_t epoch, std::int64_t first) {
  const auto dataset = std::make_shared<StuckOnce>();
  dataset->fields();  // reads sample 0
  dataset->stuck_at = 13;
  Loader loader(dataset,
                {.batch_size = 10, .workers = 2, .prefetch = 2, .timeout = std::chrono::milliseconds(200)});
  ASSERT_TRUE(loader.next().has_value());
  ASSERT_TRUE(cohort::test::comes_true([&] { return dataset->is_stuck.load(); }));
  EXPECT_THROW(leap(loader), TimeoutError);
  dataset->gate.open();
  EXPECT_EQ(loader.state().epoch, epoch);
  EXPECT_EQ(rest_of(loader), numbers_from(first));
}

TEST(LoaderStuckTest, ALeapThatTimesOutHasBeenMade) {
  expect_leap([](Loader& loader) { loader.set_epoch(1); }, 1, 0);
  expect_leap([](Loader& loader) { loader.restore({.epoch = 2, .samples_consumed = 20}); }, 2, 20);
  expect_leap([](Loader& loader) { loader.set_shares(0, 1); }, 0, 10);
}

}  // namespace
}  // namespace cohort::data
