// What an agent knows of its part in the run.
#include "cohort/launch/internal/members/member_link.h"

#include <gtest/gtest.h>

#include "tests/support/comes_true.h"
#include "tests/support/net/port.h"

namespace cohort::launch {
namespace {

using membership::MemberStatus;

class MemberLinkTest : public ::testing::Test {
 protected:
  MemberLink agent(bool is_endpoint) {
    options.rendezvous.is_host = is_endpoint;
    return MemberLink(options, std::nullopt, MemberStatus());
  }
  static bool becomes_member(MemberLink& link, std::size_t num_members) {
    return test::comes_true([&] {
      link.update();
      return link.generation() != 0 && link.view().record->generation.members.size() == num_members;
    });
  }
  // Its ranks are in the newest generation.
  static void enter(MemberLink& link, std::string stuck = "") {
    MemberStatus status;
    status.entered = status.recovered = link.generation();
    status.is_ready = stuck.empty();
    status.stuck = std::move(stuck);
    link.set_status(status);
  }

  RunOptions options = [] {
    RunOptions run;
    run.nnodes = 2;
    run.run_id = "run";
    run.rendezvous.backend = RendezvousBackend::kEmbedded;
    run.rendezvous.endpoint = "127.0.0.1:" + std::to_string(test::free_port());
    run.rendezvous.is_elastic = true;
    return run;
  }();
};

// The one that has the record was given up, waits again, and may get the state. Members do not hear who
// waits.
TEST_F(MemberLinkTest, TheOnlyMemberDoesNotEndARunOfWhichAnotherAgentHasTheRecord) {
  MemberLink endpoint = agent(true);
  ASSERT_TRUE(becomes_member(endpoint, 1));
  EXPECT_TRUE(endpoint.is_needed());
  enter(endpoint);
  MemberLink other = agent(false);
  ASSERT_TRUE(becomes_member(other, 2));
  EXPECT_FALSE(other.is_needed());
  enter(other);
  ASSERT_TRUE(becomes_member(endpoint, 2));
  EXPECT_TRUE(endpoint.is_needed());
  ASSERT_TRUE(test::comes_true([&] {
    endpoint.update();
    return endpoint.view().record->holders.size() == 2;
  }));
  enter(endpoint, "local rank 0 has not entered it");
  ASSERT_TRUE(becomes_member(other, 1));
  EXPECT_FALSE(other.is_needed());
  other.close();
  endpoint.close();
}

}  // namespace
}  // namespace cohort::launch
