#include "cohort/train/internal/elastic/elastic_coordinator.h"

#include <gtest/gtest.h>

#include <mutex>
#include <string>
#include <vector>

#include "cohort/base/error.h"
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
    ranks.set_entry(session->enter(0));
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
  EXPECT_NE(errors[2].find("/dev/null/none"), std::string::npos) << errors[2];
}

TEST(ElasticCoordinatorTest, WithoutACheckpointNobodyReadsOne) {
  const std::vector<std::string> errors = errors_of([] { return std::nullopt; });
  EXPECT_EQ(errors, (std::vector<std::string>(3, "nothing")));
}

}  // namespace
}  // namespace cohort::train
