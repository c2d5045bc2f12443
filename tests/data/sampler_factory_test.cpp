#include "cohort/data/sampler_factory.h"

#include <gtest/gtest.h>

#include <algorithm>

#include "tests/support/throws.h"

namespace cohort::data {
namespace {

// Every `stride`-th sample, then those between.
class Strided : public Sampler {
 public:
  Strided(std::int64_t size, std::int64_t stride) : size_(size), stride_(stride) {}
  std::int64_t size() const override { return size_; }
  std::vector<std::int64_t> order(std::int64_t /*epoch*/) const override {
    std::vector<std::int64_t> order;
    for (std::int64_t first = 0; first < stride_; ++first) {
      for (std::int64_t i = first; i < size_; i += stride_) order.push_back(i);
    }
    return order;
  }

 private:
  std::int64_t size_, stride_;
};

COHORT_REGISTER_SAMPLER("strided", [](const SamplerOptions& options) {
  return std::make_shared<Strided>(options.size, options.extra.integer("stride", 2, 1));
});

TEST(SamplerFactoryTest, EachNameIsTheSamplerOfThatName) {
  EXPECT_EQ(make_sampler({.name = "sequential", .size = 4})->order(3),
            (std::vector<std::int64_t>{0, 1, 2, 3}));
  EXPECT_EQ(make_sampler({.name = "random", .size = 9, .seed = 5})->order(2), RandomSampler(9, 5).order(2));
  const SamplerOptions options{.size = 10, .world_size = 4, .seed = 7, .last_batch = LastBatchPolicy::kDrop};
  EXPECT_EQ(
      make_sampler(options)->order(1),
      DistributedSampler(10, {.world_size = 4, .seed = 7, .last_batch = LastBatchPolicy::kDrop}).order(1));
}

TEST(SamplerFactoryTest, ARegisteredSamplerIsMadeByNameWithItsOptions) {
  EXPECT_EQ(make_sampler({.name = "strided", .size = 5, .extra = {{"stride", "3"}}})->order(0),
            (std::vector<std::int64_t>{0, 3, 1, 4, 2}));
  COHORT_EXPECT_THROW_WITH(make_sampler({.name = "strided", .size = 5, .extra = {{"strid", "3"}}}),
                           ConfigError, "strid");
  COHORT_EXPECT_THROW_WITH(make_sampler({.name = "stride", .size = 5}), UsageError,
                           "there is no sampler 'stride'. Try: strided; ");
  EXPECT_NO_THROW(check_sampler_name("auto"));
  COHORT_EXPECT_THROW_WITH(
      register_sampler("auto",
                       [](const SamplerOptions& of) { return std::make_shared<Strided>(of.size, 2); }),
      UsageError, "the sampler 'auto' is registered already, by Cohort");
  COHORT_EXPECT_THROW_WITH(make_sampler({.name = "random", .size = 5, .extra = {{"a", "b"}}}), ConfigError,
                           "a");
}

}  // namespace
}  // namespace cohort::data
