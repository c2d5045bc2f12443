#include "cohort/train/internal/fit/fit_control.h"

#include <gtest/gtest.h>
#include <signal.h>

#include "cohort/base/error.h"
#include "cohort/train/internal/fit/group_coordinator.h"
#include "tests/support/ranks.h"
#include "tests/support/throws.h"

namespace cohort::train {
namespace {

bool sigterm_is_default() {
  struct sigaction now {};
  sigaction(SIGTERM, nullptr, &now);
  return now.sa_handler == SIG_DFL;
}

TEST(FitControlTest, SignalsAreHeardFromBeginOnAndOnlyWhereTheOptionsSaySo) {
  ASSERT_TRUE(sigterm_is_default());
  const TrainerOptions hears = TrainerOptions().handle_signals(true), does_not;
  GroupCoordinator ranks(nullptr);
  {
    FitControl deaf(does_not, ranks), control(hears, ranks);
    deaf.begin();
    EXPECT_TRUE(sigterm_is_default());
    control.begin();
    EXPECT_FALSE(sigterm_is_default());
    FitControl second(hears, ranks);
    COHORT_EXPECT_THROW_WITH(second.begin(), UsageError, "another instance handles the signals");
  }
  EXPECT_TRUE(sigterm_is_default());
}

TEST(FitControlTest, AStopSignalIsToldAtThePollAfterItAndStays) {
  const TrainerOptions options = TrainerOptions().handle_signals(true);
  GroupCoordinator ranks(nullptr);
  const SavePolicy policy(options);
  FitControl control(options, ranks);
  control.begin();
  EXPECT_EQ(control.poll(policy).stop_signal, 0);
  raise(SIGTERM);
  EXPECT_FALSE(control.stopping());
  EXPECT_EQ(control.poll(policy).stop_signal, SIGTERM);
  EXPECT_TRUE(control.stopping());
  control.poll(policy);
  EXPECT_EQ(control.stop_signal(), SIGTERM);
}

TEST(FitControlTest, ASaveIsAskedForOnceByASignalAndByTheClockUntilItIsMade) {
  const TrainerOptions options = TrainerOptions().handle_signals(true).save_every_minutes(1e-9);
  GroupCoordinator ranks(nullptr);
  const SavePolicy policy(options);  // it was never begun
  FitControl control(options, ranks);
  control.begin();
  raise(SIGUSR1);
  EXPECT_TRUE(control.poll(policy).save_now);
  const RankCoordinator::ControlRequests agreed = control.poll(policy);
  EXPECT_FALSE(agreed.save_now);
  EXPECT_TRUE(agreed.save_due);
  EXPECT_FALSE(control.stopping());
}

// Ranks hear one poll late that a save is due. By then rank 0 has told once more that it is.
TEST(FitControlTest, ASaveThatIsDueIsAskedForOnceOnSeveralRanks) {
  test::run_ranks(2, "gloo", [](comm::Group& group) {
    const TrainerOptions options = TrainerOptions().save_every_minutes(1e-9);
    GroupCoordinator ranks(&group);
    SavePolicy policy(options);
    FitControl control(options, ranks);
    EXPECT_FALSE(control.poll(policy).save_due);
    EXPECT_TRUE(control.poll(policy).save_due);
    policy.saving();
    EXPECT_FALSE(control.poll(policy).save_due) << "the save is made";
    EXPECT_TRUE(control.poll(policy).save_due) << "the next one is due";
  });
}

// A launcher hands a signal on to each rank, and one of them may get it a step later.
TEST(FitControlTest, ASaveThatTwoRanksAreAskedForInTurnIsMadeOnce) {
  test::run_ranks(2, "gloo", [](comm::Group& group) {
    const bool is_asked = group.rank() == 1;  // at the second poll
    const TrainerOptions options = TrainerOptions().handle_signals(is_asked);
    GroupCoordinator ranks(&group);
    SavePolicy policy(options);
    FitControl control(options, ranks);
    control.begin();
    // Rank 0's requests, as it hears no signals of its own here.
    RankCoordinator::ControlRequests requests;
    requests.save_now = true;
    if (is_asked) {
      EXPECT_FALSE(control.poll(policy).save_now);
      raise(SIGUSR1);
      EXPECT_TRUE(control.poll(policy).save_now);
      policy.saving();
      EXPECT_FALSE(control.poll(policy).save_now);
    } else {
      ranks.agree_on(requests);
      ranks.agree_on({});
      ranks.agree_on({});
    }
  });
}

TEST(FitControlTest, ASignalOfOneRankStopsAllAtTheSamePoll) {
  test::run_ranks(2, "gloo", [](comm::Group& group) {
    // Signals are the process's, of which both ranks are threads: rank 1 hears none by itself.
    const bool is_asked = group.rank() == 0;
    const TrainerOptions options = TrainerOptions().handle_signals(is_asked);
    GroupCoordinator ranks(&group);
    const SavePolicy policy(options);
    FitControl control(options, ranks);
    control.begin();
    control.poll(policy);
    if (is_asked) raise(SIGTERM);
    control.poll(policy);
    EXPECT_EQ(control.stop_signal(), 0) << "what was requested at the poll before";
    control.poll(policy);
    EXPECT_EQ(control.stop_signal(), SIGTERM);
  });
}

}  // namespace
}  // namespace cohort::train
