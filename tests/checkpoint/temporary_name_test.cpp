#include "cohort/checkpoint/internal/temporary_name.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include "cohort/base/host.h"

namespace cohort::checkpoint {
namespace {

TEST(TemporaryNameTest, NamesHostAndProcess) {
  const std::string name = temporary_name("epoch_1");
  EXPECT_TRUE(name.starts_with(".epoch_1.cohort-" + base::host_name() + "-")) << name;
  EXPECT_NE(name.find("-" + std::to_string(::getpid()) + "-"), std::string::npos) << name;
  const auto parsed = parse_temporary_name(name);
  ASSERT_TRUE(parsed.has_value());
  EXPECT_EQ(parsed->name, "epoch_1");
  EXPECT_EQ(parsed->owner, Owner::kRuns);
}

TEST(TemporaryNameTest, OfAProcessHereItIsKnownWhetherItRuns) {
  const std::string own = temporary_name("a");
  EXPECT_EQ(parse_temporary_name(own.substr(0, own.rfind('-')) + "-1")->owner, Owner::kEnded);
}

TEST(TemporaryNameTest, OfAnotherHostOrContainerNothingIsKnown) {
  // Another host of this name, whose first process namespace has the number of this one's.
  EXPECT_EQ(parse_temporary_name(".a.cohort-" + base::host_name() + "-4026531836-1-1")->owner,
            Owner::kUnknown);
  EXPECT_EQ(parse_temporary_name(".a.cohort-some-host.org-1-2-3")->owner, Owner::kUnknown);
  EXPECT_EQ(parse_temporary_name(".a.cohort-" + base::host_name() + "-1-1-1")->owner, Owner::kUnknown);
}

TEST(TemporaryNameTest, OtherNamesAreNotTaken) {
  for (const char* name : {"", ".", ".a", "a.cohort-h-1-2-3", ".a.cohort-", ".a.cohort-1-2",
                           ".a.cohort-1-2-3", ".a.cohort-h-1-2-", ".a.cohort-h-1--3", ".a.cohort-h-x-2-3",
                           ".a.cohort-h-1-2-3x", ".cohort-h-1-2-3"}) {
    EXPECT_FALSE(parse_temporary_name(name)) << name;
  }
}

}  // namespace
}  // namespace cohort::checkpoint
