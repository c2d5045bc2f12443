// Which rank of a node an agent ends, as others wait for it in vain.
#include "cohort/launch/internal/members/hung_ranks.h"

#include <gtest/gtest.h>
#include <signal.h>
#include <sys/ptrace.h>
#include <sys/wait.h>
#include <unistd.h>

#include "tests/support/contains.h"

namespace cohort::launch {
namespace {

using std::chrono::milliseconds;

constexpr membership::MemberId kSelf = 3;

class HungRanksTest : public ::testing::Test {
 protected:
  HungRanksTest() : ranks(2) {
    for (ObservedRank& rank : ranks) rank.pid = 10;
    enter(1);
  }
  // Both have answered the order of a generation, and entered it.
  void enter(std::uint64_t number) {
    generation = number;
    for (ObservedRank& rank : ranks) {
      rank.told = rank.status.heard = rank.status.entered = rank.to_enter = number;
      rank.status.lost_links.clear();
    }
  }
  // Both have been told of it.
  void begin_generation(std::uint64_t number) {
    for (ObservedRank& rank : ranks) rank.told = rank.to_enter = number;
  }
  // Looks as often as an agent does, for so long. Returns the place that was found.
  std::optional<std::size_t> look_for(milliseconds time) {
    for (const auto end = now + time; now <= end; now += milliseconds(100)) {
      if (const auto found = hung.find_hung(generation, kSelf, ranks, now)) {
        why = found->why;
        is_found_traced = found->is_traced;
        return found->place;
      }
    }
    return std::nullopt;
  }

  bool is_traced = false;
  HungRanks hung{milliseconds(500), [this](int) { return is_traced; }};
  std::vector<ObservedRank> ranks;
  std::uint64_t generation = 1;
  HungRanks::Time now = HungRanks::Time() + std::chrono::hours(1);
  std::string why;
  bool is_found_traced = false;
};

TEST_F(HungRanksTest, ARankThatDoesNotAnswerIsFoundAfterTenSilences) {
  begin_generation(2);
  ranks[0].status.heard = 2;
  EXPECT_EQ(look_for(milliseconds(4'900)), std::nullopt);
  EXPECT_EQ(look_for(milliseconds(400)), 1U);
  EXPECT_TRUE(test::contains(why, "has not answered its agent for 5000 ms"));
}

TEST_F(HungRanksTest, ARankIsFoundOnce) {
  begin_generation(2);
  ranks[0].status.heard = 2;
  EXPECT_EQ(look_for(milliseconds(5'200)), 1U);
  EXPECT_EQ(look_for(std::chrono::minutes(1)), std::nullopt) << "it has been killed, and ends late";
  ranks[1].pid = 11;
  EXPECT_EQ(look_for(milliseconds(5'200)), 1U) << "its successor";
}

TEST_F(HungRanksTest, ARankUnderADebuggerIsNotKilledBeforeThatHasLetItGo) {
  begin_generation(2);
  ranks[0].status.heard = 2;
  is_traced = true;
  EXPECT_EQ(look_for(milliseconds(5'200)), 1U);
  EXPECT_TRUE(is_found_traced);
  EXPECT_EQ(look_for(std::chrono::minutes(1)), std::nullopt) << "once";
  is_traced = false;
  EXPECT_EQ(look_for(milliseconds(5'200)), 1U);
  EXPECT_FALSE(is_found_traced);
}

TEST_F(HungRanksTest, AProcessUnderADebuggerIsKnown) {
  EXPECT_FALSE(HungRanks::is_process_traced(::getppid()));
  const pid_t child = ::fork();
  if (child == 0) {
    if (::ptrace(PTRACE_TRACEME, 0, nullptr, nullptr) == 0) ::raise(SIGSTOP);
    ::_exit(0);
  }
  int status = 0;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  ASSERT_TRUE(WIFSTOPPED(status)) << "ptrace is not allowed here";
  EXPECT_TRUE(HungRanks::is_process_traced(child));
  ::kill(child, SIGKILL);
  EXPECT_EQ(::waitpid(child, &status, 0), child);
  EXPECT_FALSE(HungRanks::is_process_traced(child));
}

TEST_F(HungRanksTest, AShortSilenceGivesARankTwoSeconds) {
  HungRanks impatient(milliseconds(20), [](int) { return false; });
  begin_generation(2);
  ranks[0].status.heard = 2;
  const auto begin = now;
  std::optional<HungRanks::Found> found;
  for (; !found && now < begin + milliseconds(4'000); now += milliseconds(100)) {
    found = impatient.find_hung(generation, kSelf, ranks, now);
  }
  ASSERT_TRUE(found);
  EXPECT_GT(now, begin + milliseconds(2'000));
  EXPECT_TRUE(test::contains(found->why, "for 2000 ms")) << found->why;
}

TEST_F(HungRanksTest, ARankForWhichNobodyWaitsNeedNotAnswer) {
  ranks[0].told = ranks[1].told = 2;  // an order without a new generation
  EXPECT_EQ(look_for(std::chrono::minutes(2)), std::nullopt);
  ranks[0].to_enter = ranks[1].to_enter = 0;
  EXPECT_EQ(look_for(std::chrono::minutes(2)), std::nullopt);
}

TEST_F(HungRanksTest, ASuccessorHasTheWholeTime) {
  begin_generation(2);
  ranks[0].status.heard = ranks[0].status.entered = 2;
  EXPECT_EQ(look_for(milliseconds(4'900)), std::nullopt);
  ranks[1].pid = 11;  // a warm process, between two looks
  EXPECT_EQ(look_for(milliseconds(4'900)), std::nullopt);
  EXPECT_EQ(look_for(milliseconds(400)), 1U);
}

TEST_F(HungRanksTest, ARankThatAnswersMayComputeForAsLongAsItWants) {
  begin_generation(2);
  ranks[0].status.heard = ranks[1].status.heard = 2;
  ranks[0].status.entered = 2;
  EXPECT_EQ(look_for(std::chrono::minutes(2)), std::nullopt);
}

TEST_F(HungRanksTest, AnswersThatComeLateEachGiveTheWholeTimeAgain) {
  for (std::uint64_t order = 2; order < 20; ++order) {  // one is always under way
    ranks[1].told = ranks[1].to_enter = order + 1;
    ranks[1].status.heard = order;
    EXPECT_EQ(look_for(milliseconds(1'000)), std::nullopt);
  }
  EXPECT_EQ(look_for(milliseconds(6'000)), 1U);
}

TEST_F(HungRanksTest, ARankThatNeverAnswersOrHasNotBegunIsLeftAlone) {
  begin_generation(2);
  ranks[0].status.heard = 2;
  ranks[1].status.heard = 0;
  EXPECT_EQ(look_for(std::chrono::minutes(2)), std::nullopt);
}

TEST_F(HungRanksTest, AnAgentThatWasStoppedItselfBeginsAnew) {
  begin_generation(2);
  EXPECT_EQ(look_for(milliseconds(4'000)), std::nullopt);
  now += std::chrono::minutes(1);
  EXPECT_EQ(look_for(milliseconds(4'000)), std::nullopt);
  EXPECT_EQ(look_for(milliseconds(2'000)), 0U);
}

TEST_F(HungRanksTest, OfTwoRanksThatLoseTheirLinkTwiceTheLaterOneEnds) {
  ranks[0].status.lost_links = ranks[1].status.lost_links = {kSelf};
  EXPECT_EQ(look_for(std::chrono::minutes(1)), std::nullopt) << "the next generation has new links";
  enter(2);
  ranks[0].status.lost_links = ranks[1].status.lost_links = {kSelf};
  EXPECT_EQ(look_for(milliseconds(400)), std::nullopt) << "one may have died";
  EXPECT_EQ(look_for(milliseconds(400)), 1U);
  EXPECT_TRUE(test::contains(why, "made no step in generation 2"));
}

TEST_F(HungRanksTest, TheOneEndsThatHasNotEntered) {
  ranks[1].status.lost_links = {kSelf};
  EXPECT_EQ(look_for(milliseconds(1'000)), std::nullopt);
  enter(2);
  ranks[0].status.entered = 1;
  ranks[1].status.lost_links = {kSelf};
  EXPECT_EQ(look_for(milliseconds(1'000)), 0U);
}

TEST_F(HungRanksTest, AThirdRankThatHasNotEnteredIsNoEndOfALostLink) {
  ranks.resize(3, ranks[0]);
  std::uint64_t number = 1;
  for (const bool both_have_lost_it : {true, false}) {
    for (const bool is_repeated : {false, true}) {
      enter(++number);
      ranks[0].status.lost_links = {kSelf};
      if (both_have_lost_it) ranks[1].status.lost_links = {kSelf};
      ranks[2].status.entered = number - 1;  // its constructor takes long
      const auto found = look_for(milliseconds(1'000));
      if (!is_repeated) EXPECT_EQ(found, std::nullopt);
      if (is_repeated) EXPECT_EQ(found, both_have_lost_it ? 1U : 0U);
    }
  }
}

TEST_F(HungRanksTest, AStepBetweenTwoLossesMakesTheSecondOneTheFirst) {
  ranks[0].status.lost_links = {kSelf};
  EXPECT_EQ(look_for(milliseconds(1'000)), std::nullopt);
  enter(2);
  ranks[1].status.committed_steps = 1;
  ranks[0].status.lost_links = {kSelf};
  EXPECT_EQ(look_for(std::chrono::minutes(1)), std::nullopt);
}

TEST_F(HungRanksTest, ARankThatHasSaidNothingForLongIsNamedOnce) {
  EXPECT_EQ(hung.find_mute(ranks, now), std::nullopt);
  now += std::chrono::seconds(31);
  EXPECT_EQ(hung.find_mute(ranks, now), std::nullopt);
  ranks[1].status = {};
  EXPECT_EQ(hung.find_mute(ranks, now), std::nullopt) << "it has just begun";
  now += std::chrono::seconds(31);
  EXPECT_EQ(hung.find_mute(ranks, now), 1U);
  EXPECT_EQ(hung.find_mute(ranks, now), std::nullopt);
}

TEST_F(HungRanksTest, ASuccessorHasTheWholeTimeToSaySomething) {
  ranks[1].status = {};
  EXPECT_EQ(hung.find_mute(ranks, now), std::nullopt);
  now += std::chrono::seconds(20);
  ranks[1].pid = 11;  // it begins between two looks
  EXPECT_EQ(hung.find_mute(ranks, now), std::nullopt);
  now += std::chrono::seconds(20);
  EXPECT_EQ(hung.find_mute(ranks, now), std::nullopt) << "the one before was mute for 20 s";
  now += std::chrono::seconds(11);
  EXPECT_EQ(hung.find_mute(ranks, now), 1U);
}

TEST_F(HungRanksTest, LinksToOtherMembersAndToADeadRankSayNothing) {
  for (std::uint64_t number = 1; number < 4; ++number) {
    enter(number);
    ranks[0].status.lost_links = {kSelf + 1};
    EXPECT_EQ(look_for(milliseconds(1'000)), std::nullopt);
    ranks[0].status.lost_links = {kSelf};
    ranks[1].pid = 0;
    EXPECT_EQ(look_for(milliseconds(1'000)), std::nullopt);
    ranks[1].pid = 10;
  }
}

}  // namespace
}  // namespace cohort::launch
