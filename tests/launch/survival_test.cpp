// Which processes a signal would end, from looks that a test plays.
#include "cohort/launch/internal/survival.h"

#include <gtest/gtest.h>
#include <signal.h>

#include <algorithm>

namespace cohort::launch {
namespace {

TEST(SurvivalTest, ManyProcessesTakeAsManyPausesAsOne) {
  int pauses = 0, looks = 0;
  const auto blocked = [&](std::size_t) {
    ++looks;
    return SignalFate::kBlocked;
  };
  const auto pause = [&] { return ++pauses > 0; };
  EXPECT_EQ(survives(64, blocked, pause), std::vector<bool>(64, true));
  EXPECT_EQ(pauses, 19);
  EXPECT_EQ(looks, 64 * 20);
}

TEST(SurvivalTest, LooksThatTakeAllTheTimeAreMadeInFewRounds) {
  for (const int rounds : {1, 3, 4, 9}) {  // that there is time for
    int pauses = 0, looks = 0;
    const auto blocked = [&](std::size_t) {
      ++looks;
      return SignalFate::kBlocked;
    };
    EXPECT_EQ(survives(64, blocked, [&] { return ++pauses < rounds; }), std::vector<bool>(64, true));
    EXPECT_EQ(looks, 64 * std::max(4, rounds)) << rounds;
  }
}

// Its main thread starts a program at the first look, and has all signals blocked for that moment.
TEST(SurvivalTest, AThreadThatWaitsForTheSignalNeedsASecondLook) {
  int looks = 0;
  const auto dies = [&](std::size_t) { return ++looks == 1 ? SignalFate::kAwaited : SignalFate::kEnds; };
  const auto pause = [] { return true; };
  EXPECT_EQ(survives(1, dies, pause), std::vector<bool>{false});
  looks = 0;
  const auto waits = [&](std::size_t) {
    ++looks;
    return SignalFate::kAwaited;
  };
  EXPECT_EQ(survives(1, waits, pause), std::vector<bool>{true});
  EXPECT_EQ(looks, 2);
}

TEST(SurvivalTest, EachProcessGetsAnAnswerOfItsOwn) {
  int rounds = 0;
  const auto look = [&](std::size_t at) {
    if (at == 0) return SignalFate::kHandled;
    if (at == 1) return SignalFate::kEnds;
    return at == 2 && rounds == 3 ? SignalFate::kEnds : SignalFate::kBlocked;
  };
  const auto pause = [&] { return ++rounds > 0; };
  EXPECT_EQ(survives(4, look, pause), (std::vector<bool>{true, false, false, true}));
  EXPECT_TRUE(survives(0, look, pause).empty());
}

TEST(SurvivalTest, AProcessThatIsNotThereDoesNotSurvive) {
  EXPECT_EQ(fate_of(1'000'000'000, SIGUSR1), SignalFate::kEnds);
}

}  // namespace
}  // namespace cohort::launch
