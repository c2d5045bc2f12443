// What follows where ranks do not reach each other, and their agents are heard.
#include "cohort/membership/internal/lost_links.h"

#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "rendezvous.h"
#include "tests/support/contains.h"

namespace cohort::membership {
namespace {

using std::chrono::milliseconds;
using test::Rendezvous;
using Names = std::vector<std::string>;

void lose_link(Rendezvous& run, const std::string& agent, MemberId other) {
  run.hear(agent, [&](Report& report) { report.lost_links = {other}; });
  run.seen.agents.at(agent).link_lost_at = run.seen.now;
}
void wait_and_hear(Rendezvous& run, milliseconds time, const Names& agents) {
  run.wait(time);
  for (const std::string& agent : agents) run.hear(agent);
}
// All are in the newest generation, with whole links.
void enter_all(Rendezvous& run, const Names& agents) {
  for (const std::string& agent : agents) run.hear(agent, [](Report& report) { report.lost_links.clear(); });
}

TEST(LostLinksTest, ALostLinkIsMadeAgainAndThenTheLaterMemberIsDropped) {
  Rendezvous run(1, 3);
  run.form({"a", "b", "c"});
  const auto lose = [&](const char* agent, MemberId other) {
    run.hear(agent, [&](Report& report) { report.lost_links = {other}; });
    run.seen.agents.at(agent).link_lost_at = run.seen.now;
    EXPECT_FALSE(run.step()) << "the other side may have died";
    run.wait(milliseconds(600));
    for (const char* const name : {"a", "b", "c"}) run.hear(name);
  };
  lose("b", 3);
  EXPECT_TRUE(run.step());
  EXPECT_EQ(run.members(), (Names{"a", "b", "c"}));
  EXPECT_EQ(run.record.generation.number, 2U);
  for (const char* const name : {"a", "b", "c"})
    run.hear(name, [](Report& report) { report.lost_links.clear(); });
  lose("b", 3);
  EXPECT_TRUE(run.step());
  EXPECT_EQ(run.members(), (Names{"a", "b"}));
}

// It may be the only one that can continue.
TEST(LostLinksTest, NobodyIsDroppedForALinkToAMemberThatGivesUp) {
  Rendezvous run(1, 3);
  run.record.settings.is_embedded = false;
  run.form({"a", "b", "c"});
  run.record.was_link_lost = true;
  lose_link(run, "a", 3);
  lose_link(run, "c", 2);
  for (const char* const agent : {"a", "b"}) {
    run.hear(agent, [](Report& report) {
      report.failure = "rank 0 was killed";
      report.ends_run = true;
    });
    run.seen.agents.at(agent).hopeless_at = run.seen.now;
  }
  wait_and_hear(run, milliseconds(2'500), {"a", "b", "c"});
  EXPECT_TRUE(run.step());
  EXPECT_EQ(run.members(), (Names{"c"}));
}

// One was stopped. Its agent, which lives, would have said by then that it has died.
TEST(LostLinksTest, WhereSilenceIsLongALinkIsMadeAgainOnceBothAgentsHaveBeenHeard) {
  Rendezvous run(1, 3);
  run.record.settings.silence = std::chrono::seconds(10);
  run.form({"a", "b", "c"});
  lose_link(run, "b", 3);
  wait_and_hear(run, milliseconds(400), {"a", "b", "c"});
  EXPECT_FALSE(run.step()) << "the other side may have died";
  wait_and_hear(run, milliseconds(200), {"a", "b"});
  EXPECT_FALSE(run.step()) << "the other side may have died, and its agent with it";
  wait_and_hear(run, milliseconds(1'000), {"a", "b", "c"});
  EXPECT_TRUE(run.step());
  EXPECT_EQ(run.record.generation.number, 2U);
  EXPECT_EQ(run.members(), (Names{"a", "b", "c"}));
}

// Two ranks of one node, of which one was stopped. Nobody else can say that their link is gone.
TEST(LostLinksTest, ALinkWithinAMemberIsMadeAgainToo) {
  Rendezvous run(1, 2);
  run.form({"a", "b"});
  lose_link(run, "a", 1);
  EXPECT_FALSE(run.step()) << "the other rank may have died";
  wait_and_hear(run, milliseconds(600), {"a", "b"});
  EXPECT_TRUE(run.step());
  EXPECT_EQ(run.record.generation.number, 2U);
  EXPECT_EQ(run.members(), (Names{"a", "b"}));
  EXPECT_EQ(run.record.generation.cause, "ranks of agent 1 at host-a:1 lost their link");
  EXPECT_FALSE(run.record.generation.is_planned);
}

TEST(LostLinksTest, WhereItIsLostAgainTheAgentHasTimeToEndARank) {
  Rendezvous run(1, 2);
  run.form({"a", "b"});
  lose_link(run, "b", 2);
  wait_and_hear(run, milliseconds(600), {"a", "b"});
  ASSERT_TRUE(run.step());
  enter_all(run, {"a", "b"});
  lose_link(run, "b", 2);
  run.wait(milliseconds(1'900));
  for (const char* const agent : {"a", "b"}) run.hear(agent);
  EXPECT_FALSE(run.step()) << run.record.generation.cause;
  run.wait(milliseconds(200));
  for (const char* const agent : {"a", "b"}) run.hear(agent);
  EXPECT_TRUE(run.step());
  EXPECT_EQ(run.record.generation.number, 3U);
  EXPECT_EQ(run.members(), (Names{"a", "b"})) << "no member is dropped";
}

// By its id "c" would be dropped, and it is "b" whose rank does not come.
TEST(LostLinksTest, TheMemberIsDroppedWhoseRankHasNotEntered) {
  Rendezvous run(1, 3);
  run.form({"a", "b", "c"});
  lose_link(run, "c", 2);
  wait_and_hear(run, milliseconds(600), {"a", "b", "c"});
  ASSERT_TRUE(run.step());
  ASSERT_TRUE(run.record.was_link_lost);
  enter_all(run, {"a", "c"});
  run.hear("b", [](Report& report) { report.entered = report.recovered = 1; });
  lose_link(run, "c", 2);
  run.wait(milliseconds(600));
  for (const char* const agent : {"a", "c"}) run.hear(agent);
  run.hear("b", [](Report& report) { report.entered = report.recovered = 1; });
  EXPECT_TRUE(run.step());
  EXPECT_EQ(run.members(), (Names{"a", "c"}));
}

TEST(LostLinksTest, TheMemberIsDroppedThatMostHaveLost) {
  Rendezvous run(1, 3);
  run.form({"a", "b", "c"});
  lose_link(run, "c", 2);
  wait_and_hear(run, milliseconds(600), {"a", "b", "c"});
  ASSERT_TRUE(run.step());
  enter_all(run, {"a", "b", "c"});
  lose_link(run, "b", 3);  // of its two ranks one hangs, and the other one has lost it
  run.hear("b", [](Report& report) { report.lost_links = {2, 3}; });
  lose_link(run, "c", 2);
  run.wait(milliseconds(600));
  for (const char* const agent : {"a", "b", "c"}) run.hear(agent);
  EXPECT_TRUE(run.step());
  EXPECT_EQ(run.members(), (Names{"a", "c"}));
}

}  // namespace
}  // namespace cohort::membership
