#include "cohort/parallel/internal/gradient_buckets.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include "cohort/base/error.h"
#include "tests/support/ranks.h"
#include "tests/support/throws.h"

namespace cohort::parallel {
namespace {

// Four parameters of 1 KiB each, in the order of definition.
std::vector<NamedParameter> four_parameters() {
  std::vector<NamedParameter> parameters;
  for (const char* name : {"a", "b", "c", "d"}) {
    parameters.push_back({name, at::zeros({256}).requires_grad_()});
  }
  return parameters;
}

ReducerOptions small_buckets() {
  ReducerOptions options;
  options.first_bucket_bytes = 1024;
  options.bucket_cap_bytes = 2048;
  options.plan = BucketPlan::kDefinition;
  return options;
}

using Names = std::vector<std::vector<std::string>>;

TEST(GradientBucketsTest, AreFilledInTheReverseOrderOfDefinition) {
  test::run_ranks(2, "gloo", [](comm::Group& group) {
    const GradientBuckets buckets(group, four_parameters(), small_buckets());
    EXPECT_EQ(buckets.names(), (Names{{"d"}, {"c", "b"}, {"a"}}));
  });
}

TEST(GradientBucketsTest, TheUsersOwnGroupsStayAsTheyAre) {
  test::run_ranks(2, "gloo", [](comm::Group& group) {
    ReducerOptions options = small_buckets();
    options.buckets = {{"a", "d"}, {"b"}, {"c"}};
    const GradientBuckets buckets(group, four_parameters(), options);
    EXPECT_EQ(buckets.names(), options.buckets);
  });
}

// put, launch, wait, scatter: the sum over ranks of scaled gradients, in memory that the buckets own.
TEST(GradientBucketsTest, GradientsBecomeTheScaledSumOverRanks) {
  test::run_ranks(2, "gloo", [](comm::Group& group) {
    const std::vector<NamedParameter> parameters = four_parameters();
    GradientBuckets buckets(group, parameters, small_buckets());
    for (const NamedParameter& parameter : parameters) {
      parameter.tensor.mutable_grad() = at::full({256}, group.rank() + 1.0f);
    }
    buckets.begin_backward();
    for (Gradient& gradient : buckets.gradients) {
      gradient.is_used = true;
      buckets.put(gradient, 0.5, 1);
    }
    for (std::size_t b = 0; b < buckets.buckets.size(); ++b) buckets.launch(b);
    buckets.wait_for_all();
    ReduceReport report;
    buckets.scatter_to_grads(at::Tensor(), report);
    for (const NamedParameter& parameter : parameters) {
      EXPECT_TRUE(at::equal(parameter.tensor.grad(), at::full({256}, 1.5f))) << parameter.name;
    }
    EXPECT_EQ(report.bytes, 4096);
    const Gradient& c = buckets.gradients[1];
    EXPECT_EQ(c.name, "c");
    EXPECT_TRUE(c.parameter.grad().is_alias_of(buckets.buckets[1].flat)) << "a view of the bucket";
  });
}

TEST(GradientBucketsTest, AMissingGradientTravelsAsZeros) {
  test::run_ranks(2, "gloo", [](comm::Group& group) {
    const std::vector<NamedParameter> parameters = four_parameters();
    GradientBuckets buckets(group, parameters, small_buckets());
    if (group.rank() == 1) parameters[0].tensor.mutable_grad() = at::full({256}, 3.0f);
    buckets.begin_backward();
    for (Gradient& gradient : buckets.gradients) buckets.put(gradient, 1, 1);
    for (std::size_t b = 0; b < buckets.buckets.size(); ++b) buckets.launch(b);
    buckets.wait_for_all();
    ReduceReport report;
    buckets.scatter_to_grads(at::Tensor(), report);
    EXPECT_TRUE(at::equal(parameters[0].tensor.grad(), at::full({256}, 3.0f)));
    EXPECT_TRUE(at::equal(parameters[3].tensor.grad(), at::zeros({256})));
  });
}

TEST(GradientBucketsTest, AGradientOfAnotherKindIsRejectedByName) {
  test::run_ranks(2, "gloo", [](comm::Group& group) {
    const std::vector<NamedParameter> parameters = four_parameters();
    GradientBuckets buckets(group, parameters, small_buckets());
    parameters[1].tensor.mutable_grad() = at::ones({256}).to_sparse();
    Gradient& b = buckets.gradients[2];
    COHORT_EXPECT_THROW_WITH(buckets.put(b, 1, 1), UsageError,
                             "the gradient of b is sparse, expected a dense one of float");
  });
}

}  // namespace
}  // namespace cohort::parallel
