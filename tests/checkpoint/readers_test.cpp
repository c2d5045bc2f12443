// Processes that read checkpoints while their run saves others: none may find one damaged, missing or mixed.
#include <ATen/ATen.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <functional>

#include "cohort/checkpoint/run_checkpoints.h"
#include "cohort/core/error.h"
#include "cohort/core/log.h"
#include "tests/checkpoint/file_calls.h"
#include "tests/support/temp_dir.h"

namespace cohort::checkpoint {
namespace {

namespace fs = std::filesystem;

void save(const fs::path& folder, const std::string& name, int64_t value) {
  const TensorMap tensors{{"w", at::full({2000}, value, at::kLong)}};
  RunCheckpoints(folder, {.keep = 1}).save(name, {tensors, tensors, {{"value", value}}}, {.is_best = true});
}

int64_t value_of(const CheckpointContent& content) {
  const auto value = content.state.at("value").get<int64_t>();
  for (const TensorMap* tensors : {&content.model, &content.optimizer})
    EXPECT_TRUE(tensors->at(0).second.eq(value).all().item<bool>()) << value;
  return value;
}

int64_t value_of(const std::optional<LoadedCheckpoint>& loaded) {
  if (!loaded) throw DataError("test", "nothing was found");
  return value_of(loaded->content);
}

/// Calls `read` while a child saves: new names, or one name again and again.
void read_while_saving(bool new_names, const test::FileCallLimits& limits,
                       const std::function<int64_t(const fs::path&)>& read) {
  std::string log;
  core::set_log_sink([&](core::LogLevel, std::string_view line) { log += std::string(line) + "\n"; });
  const test::TempDir dir;
  save(dir.path(), "epoch_1", 1);
  const pid_t child = ::fork();
  if (child == 0) {
    test::set_file_call_limits(limits);
    for (int64_t value = 2; value <= 400; ++value)
      save(dir.path(), new_names ? "epoch_" + std::to_string(value) : "epoch_1", value);
    ::_exit(0);
  }
  int64_t newest = 0, reads = 0;
  int status = 0;
  while (::waitpid(child, &status, WNOHANG) == 0) {
    try {
      const int64_t value = read(dir.path());
      EXPECT_GE(value, newest);
      newest = value;
    } catch (const Error& error) {
      ADD_FAILURE() << "after " << reads << " reads: " << error.what();
    } catch (const fs::filesystem_error& error) {
      ADD_FAILURE() << "after " << reads << " reads: " << error.what();
    }
    ++reads;
    if (!::testing::Test::HasFailure()) continue;
    ::kill(child, SIGKILL);
    ::waitpid(child, &status, 0);
    break;
  }
  core::set_log_sink({});
  EXPECT_EQ(log, "");
  EXPECT_GT(newest, 1);
}

int64_t read_last(const fs::path& folder) {
  return value_of(RunCheckpoints(folder).find_and_load("last"));
}
int64_t read_best(const fs::path& folder) {
  return value_of(RunCheckpoints(folder).find_and_load("best"));
}
int64_t read_usable(const fs::path& folder) {
  return value_of(RunCheckpoints(folder).load_usable());
}

TEST(ReadersTest, NewNames) {
  for (const auto& read : {read_last, read_best, read_usable}) read_while_saving(true, {}, read);
}

TEST(ReadersTest, OneNameAgainAndAgain) {
  for (const auto& read : {read_last, read_best, read_usable}) read_while_saving(false, {}, read);
  read_while_saving(
      false, {}, [](const fs::path& folder) { return value_of(RunCheckpoints::load(folder / "epoch_1")); });
}

TEST(ReadersTest, OneNameAgainWhereNamesCannotBeExchanged) {
  for (const auto& read : {read_last, read_usable}) read_while_saving(false, {.can_exchange = false}, read);
}

}  // namespace
}  // namespace cohort::checkpoint
