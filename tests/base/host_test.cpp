#include "cohort/base/host.h"

#include <gtest/gtest.h>

namespace cohort::base {
namespace {

TEST(HostTest, AHostHasOneOfItsAddressesTowardsAnother) {
  EXPECT_EQ(address_towards("127.0.0.1"), "127.0.0.1");
  EXPECT_EQ(address_towards("127.0.0.2").substr(0, 4), "127.");
  EXPECT_EQ(address_towards("no..host"), "");
}

}  // namespace
}  // namespace cohort::base
