#include "cohort/membership/generation_change.h"

#include <gtest/gtest.h>

#include <optional>
#include <vector>

namespace cohort::membership {
namespace {

Generation planned_generation(std::uint64_t number, const std::vector<MemberId>& ids) {
  Generation generation;
  generation.number = number;
  generation.is_planned = true;
  for (const MemberId id : ids) generation.members.push_back({id, "agent " + std::to_string(id), "host", 1});
  return generation;
}

// In generation 1 of two members, as its first process.
GenerationChange in_first_generation() {
  GenerationChange change;
  EXPECT_TRUE(change.announce(planned_generation(1, {1, 2}), 0));
  change.enter();
  return change;
}

TEST(GenerationChangeTest, OnlyNewsIsAnnounced) {
  GenerationChange change = in_first_generation();
  EXPECT_FALSE(change.announce(planned_generation(1, {1, 2}), 0));
  EXPECT_FALSE(change.has_next());
  EXPECT_TRUE(change.announce(planned_generation(1, {1, 2}), std::nullopt)) << "it was given up";
  change.enter();
  EXPECT_FALSE(change.process());
  EXPECT_FALSE(change.announce(planned_generation(1, {1, 2}), std::nullopt));
}

TEST(GenerationChangeTest, AGoodbyeEndsAStepThatItsSenderHasNotFinished) {
  GenerationChange change = in_first_generation();
  change.on_goodbye(1, 5);  // before this process hears of the generation
  EXPECT_FALSE(change.drops_step(5)) << "there is no generation to enter yet";
  change.announce(planned_generation(2, {1, 2}), 0);
  EXPECT_TRUE(change.drops_step(5));
  EXPECT_FALSE(change.drops_step(4)) << "the sender has finished the step";
  change.on_link_lost(1);
  EXPECT_FALSE(change.drops_step(4)) << "all that it sent has come";
  change.on_link_lost(std::nullopt);
  EXPECT_TRUE(change.drops_step(4));
}

TEST(GenerationChangeTest, WhoLeavesMayFinishTheStep) {
  GenerationChange change = in_first_generation();
  EXPECT_TRUE(change.announce(planned_generation(2, {2}), std::nullopt));
  EXPECT_FALSE(change.announce(planned_generation(2, {2}), std::nullopt)) << "its agent says it again";
  EXPECT_FALSE(change.drops_step(5));
  change.on_goodbye(1, 6);
  EXPECT_FALSE(change.drops_step(5));
  EXPECT_TRUE(change.drops_step(6)) << "the other one has left after six steps";
  Generation unplanned = planned_generation(2, {2});
  unplanned.is_planned = false;
  change = in_first_generation();
  change.announce(unplanned, std::nullopt);
  EXPECT_TRUE(change.drops_step(5));
  change = in_first_generation();
  change.announce(planned_generation(2, {1, 2}), 0);
  change.announce(planned_generation(2, {1, 2}), std::nullopt);
  EXPECT_TRUE(change.drops_step(5)) << "it was given up";
}

TEST(GenerationChangeTest, AHelloCountsOfWhoWasHere) {
  GenerationChange change = in_first_generation();
  change.announce(planned_generation(2, {1, 2, 3}), 0);
  change.on_hello(2, 2, 0);
  EXPECT_FALSE(change.drops_step(3)) << "agent 3 is new";
  change.on_hello(2, 1, 4);
  EXPECT_FALSE(change.drops_step(3));
  change.on_hello(2, 1, 3);
  EXPECT_TRUE(change.drops_step(3));
  Generation other = planned_generation(2, {1, 2});
  other.members[1].incarnation = "another agent";
  change = in_first_generation();
  change.announce(other, 0);
  change.on_hello(2, 1, 3);
  EXPECT_FALSE(change.drops_step(3));
}

TEST(RecoveryTest, TheHighestNumberOfStepsIsTheNewestState) {
  Recovery recovery(4, 7);
  recovery.on_hello(2, 7);
  EXPECT_EQ(recovery.missing(), (std::vector<int>{0, 1, 3}));
  recovery.on_hello(0, 6);
  recovery.on_hello(1, std::nullopt);
  recovery.on_hello(3, 7);
  EXPECT_TRUE(recovery.has_all());
  EXPECT_FALSE(recovery.is_state_lost());
  EXPECT_EQ(recovery.newest(), 7U);
  EXPECT_EQ(recovery.holders(), (std::vector<int>{2, 3}));
  EXPECT_EQ(recovery.behind(), (std::vector<int>{0, 1}));
}

TEST(RecoveryTest, AStateThatIsNotWholeIsNone) {
  Recovery recovery(2, 0);
  recovery.on_hello(0, std::nullopt);
  recovery.on_hello(1, std::nullopt);
  EXPECT_TRUE(recovery.is_state_lost());
  recovery.on_hello(1, 0);
  EXPECT_FALSE(recovery.is_state_lost());
  EXPECT_EQ(recovery.behind(), std::vector<int>{0});
  Recovery late(1, 9);
  late.on_hello(0, 8);
  EXPECT_FALSE(late.is_state_lost()) << "one step is made again";
  late.on_hello(0, 7);
  EXPECT_TRUE(late.is_state_lost());
}

}  // namespace
}  // namespace cohort::membership
