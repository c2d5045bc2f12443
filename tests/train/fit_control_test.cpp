#include "cohort/train/internal/fit/fit_control.h"

#include <gtest/gtest.h>
#include <signal.h>

#include "cohort/base/error.h"
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
  RankCoordinator ranks(nullptr);
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
  RankCoordinator ranks(nullptr);
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
  RankCoordinator ranks(nullptr);
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

TEST(FitControlTest, ASignalOfOneRankStopsAllAtTheSamePoll) {
  test::run_ranks(2, "gloo", [](comm::Group& group) {
    // Signals are the process's, of which both ranks are threads: rank 1 hears none by itself.
    const bool is_asked = group.rank() == 0;
    const TrainerOptions options = TrainerOptions().handle_signals(is_asked);
    RankCoordinator ranks(&group);
    const SavePolicy policy(options);
    FitControl control(options, ranks);
    control.begin();
    control.poll(policy);
    if (is_asked) raise(SIGTERM);
    control.poll(policy);
    EXPECT_EQ(control.stop_signal(), 0) << "what was wished at the poll before";
    control.poll(policy);
    EXPECT_EQ(control.stop_signal(), SIGTERM);
  });
}

}  // namespace
}  // namespace cohort::train
