#include "cohort/train/internal/elastic/elastic_coordinator.h"

#include <gtest/gtest.h>

#include <chrono>
#include <mutex>
#include <string>
#include <vector>

#include "cohort/base/error.h"
#include "tests/support/comes_true.h"
#include "tests/train/elastic/fake_run.h"

namespace cohort::train {
namespace {

using checkpoint::LoadedCheckpoint;

/// Returns what three processes throw that load a checkpoint together. `load`: of process 0.
std::vector<std::string> errors_of(const std::function<std::optional<LoadedCheckpoint>()>& load) {
  std::mutex mutex;
  std::vector<std::string> errors(3, "nothing");
  test::FakeRun run(4, {}, [&](int id, std::shared_ptr<elastic::Session> session) {
    session->set_state({.save = [] { return elastic::StateSnapshot(); }, .load = [](const auto&) {}});
    ElasticCoordinator ranks(session);
    ranks.set_info(session->enter(0));
    try {
      static_cast<void>(ranks.load(load));
    } catch (const Error& error) {
      const std::lock_guard lock(mutex);
      errors[static_cast<std::size_t>(id)] = error.what();
    }
    session->commit(1);
    session->finish();
  });
  run.run(3);
  return errors;
}

TEST(ElasticCoordinatorTest, ACheckpointThatProcess0CannotReadIsAnErrorOfAll) {
  const std::vector<std::string> errors =
      errors_of([]() -> std::optional<LoadedCheckpoint> { throw DataError("test.load", "a bad disk"); });
  EXPECT_EQ(errors[0], "[test.load] a bad disk");
  for (const std::size_t other : {1U, 2U}) {
    EXPECT_NE(errors[other].find(
                  "process 0 cannot read the checkpoint that the run resumes from: [test.load] a bad disk"),
              std::string::npos)
        << errors[other];
  }
}

TEST(ElasticCoordinatorTest, ACheckpointThatAnotherProcessCannotReadIsAnErrorOfAll) {
  const std::vector<std::string> errors =
      errors_of([] { return LoadedCheckpoint{.folder = "/dev/null/none", .content = {}}; });
  EXPECT_NE(errors[0].find("process 1 cannot read the checkpoint"), std::string::npos) << errors[0];
  EXPECT_NE(errors[2].find("/dev/null"), std::string::npos) << errors[2];
}

TEST(ElasticCoordinatorTest, WithoutACheckpointNobodyReadsOne) {
  const std::vector<std::string> errors = errors_of([] { return std::nullopt; });
  EXPECT_EQ(errors, (std::vector<std::string>(3, "nothing")));
}

/// A process of a generation that another one is to follow.
struct ChangingSession : elastic::Session {
  int virtual_ranks() const override { return 4; }
  void set_state(elastic::StateAccess) override {}
  elastic::GenerationInfo enter(std::uint64_t) override { return {.generation = 1}; }
  bool must_enter() const override { return is_planned || is_lost; }
  bool must_leave() const override { return is_lost; }
  std::shared_ptr<parallel::SliceExchange> exchange() const override { return nullptr; }
  void begin_changes() override {}
  void commit(std::uint64_t) override {}
  elastic::GenerationInfo finish() override { return {}; }
  bool is_planned = false, is_lost = false;
};

TEST(ElasticCoordinatorTest, APlannedChangeWaitsForAnEvaluationForAWhile) {
  const auto session = std::make_shared<ChangingSession>();
  ElasticCoordinator patient(session), hasty(session, std::chrono::milliseconds(0));
  for (ElasticCoordinator* const ranks : {&patient, &hasty}) {
    ranks->set_info(session->enter(0));
    EXPECT_FALSE(ranks->find_evaluation(8));
    EXPECT_NO_THROW(ranks->check_evaluation());
  }
  session->is_planned = true;
  EXPECT_NO_THROW(patient.check_evaluation());
  EXPECT_THROW(patient.check_members(), elastic::GenerationEnded) << "between two steps it does not wait";
  EXPECT_THROW(hasty.check_evaluation(), elastic::GenerationEnded) << "its time is over";
  session->is_lost = true;
  EXPECT_THROW(patient.check_evaluation(), elastic::GenerationEnded);
}

/// Returns how long a planned change waits for an evaluation.
std::chrono::steady_clock::duration time_until_it_ends(ElasticCoordinator& ranks) {
  const auto begin = std::chrono::steady_clock::now();
  EXPECT_TRUE(test::comes_true([&] {
    try {
      ranks.check_evaluation();
      return false;
    } catch (const elastic::GenerationEnded&) {
      return true;
    }
  }));
  return std::chrono::steady_clock::now() - begin;
}

TEST(ElasticCoordinatorTest, AnEvaluationThatIsMadeAnewIsWaitedForLonger) {
  const auto session = std::make_shared<ChangingSession>();
  session->is_planned = true;
  ElasticCoordinator ranks(session, std::chrono::milliseconds(300));
  ranks.set_info(session->enter(0));
  const auto time_of = [&] {
    EXPECT_FALSE(ranks.find_evaluation(8));
    return time_until_it_ends(ranks);
  };
  EXPECT_GE(time_of(), std::chrono::milliseconds(300));
  EXPECT_GE(time_of(), std::chrono::milliseconds(600));
}

/// The same beside another process, over that one's exchange.
struct ChangingMember : ChangingSession {
  std::shared_ptr<parallel::SliceExchange> exchange() const override { return links; }
  std::shared_ptr<parallel::SliceExchange> links;
};

TEST(ElasticCoordinatorTest, ANewcomerWaitsForAnEvaluationAsLongAsTheOthers) {
  constexpr std::chrono::milliseconds kWait(40);
  std::chrono::steady_clock::duration waited{};
  test::FakeRun run(4, {}, [&](int id, std::shared_ptr<elastic::Session> session) {
    session->set_state({.save = [] { return elastic::StateSnapshot(); }, .load = [](const auto&) {}});
    const auto changing = std::make_shared<ChangingMember>();
    ElasticCoordinator ranks(changing, kWait);
    // The first process has begun it twice alone.
    for (int time = 0; id == 0 && time < 2; ++time) EXPECT_FALSE(ranks.find_evaluation(8));
    session->enter(0);
    changing->links = session->exchange();
    changing->is_planned = true;
    ranks.set_info(changing->enter(0));
    EXPECT_FALSE(ranks.find_evaluation(8));
    if (id == 1) waited = time_until_it_ends(ranks);
    session->finish();
  });
  run.run(2);
  EXPECT_GE(waited, 3 * kWait);
}

}  // namespace
}  // namespace cohort::train
