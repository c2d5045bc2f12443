// Collectives of backends of ours in LibTorch's profiler.
#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include "tests/support/profiled_calls.h"
#include "tests/support/ranks.h"

namespace cohort::comm {
namespace {

TEST(ProfiledCallTest, CollectivesAreSeenWithTheirBytesAndGroup) {
  test::ProfiledCalls profiled("shm:");
  test::run_ranks(
      2, "shm",
      [](Group& group) {
        test::make_calls_of_each_kind(group);
        at::Tensor both = at::ones({200});
        group.all_reduce(both).wait();
      },
      std::chrono::seconds(20), ConsistencyCheck::kOff);
  std::map<std::string, test::ProfiledCalls::CallCount> seen = profiled.finish();
  for (const char* name : {"shm:broadcast", "shm:all_gather", "shm:reduce_scatter"}) {
    EXPECT_EQ(seen[name].begun, 2) << name;
    EXPECT_EQ(seen[name].ended, 2) << name;
    EXPECT_EQ(seen[name].group, "world") << name;
  }
  EXPECT_EQ(seen["shm:send"].ended, 1);
  EXPECT_EQ(seen["shm:recv"].ended, 1);
  EXPECT_EQ(seen["shm:send"].bytes, 400);
  EXPECT_EQ(seen["shm:all_reduce"].begun, seen["shm:all_reduce"].ended);
  EXPECT_EQ(seen["shm:all_reduce"].bytes, 800) << "of the last one";
  EXPECT_EQ(seen["shm:all_gather"].bytes, 800);
}

}  // namespace
}  // namespace cohort::comm
