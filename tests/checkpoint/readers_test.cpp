// Processes that read checkpoints while their run saves others: none may find one damaged, missing or mixed.
#include <ATen/ATen.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <functional>

#include "cohort/base/error.h"
#include "cohort/base/log.h"
#include "cohort/checkpoint/run_checkpoints.h"
#include "tests/checkpoint/file_calls.h"
#include "tests/support/temp_dir.h"

namespace cohort::checkpoint {
namespace {

namespace fs = std::filesystem;

void save(const fs::path& folder, const std::string& name, int64_t value, bool is_best = true) {
  const TensorMap tensors{{"w", at::full({2000}, value, at::kLong)}};
  RunCheckpoints(folder, {.keep = 1})
      .save(name, {tensors, tensors, {{"value", value}}}, {.is_best = is_best});
}

/// How a run saves, from value 1 on.
using Saves = std::function<void(const fs::path&, int64_t value)>;

void save_new_name(const fs::path& folder, int64_t value) {
  save(folder, "epoch_" + std::to_string(value), value);
}
void save_one_name(const fs::path& folder, int64_t value) {
  save(folder, "latest", value);
}
void save_two_names(const fs::path& folder, int64_t value) {
  const bool is_best = value % 2 == 1;
  save(folder, is_best ? "best_model" : "latest", value, is_best);
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

/// Calls `read` while a child saves.
void read_while_saving(const Saves& saves, const test::FileCallLimits& limits,
                       const std::function<int64_t(const fs::path&)>& read) {
  std::string log;
  base::set_log_sink([&](base::LogLevel, std::string_view line) { log += std::string(line) + "\n"; });
  const test::TempDir dir;
  saves(dir.path(), 1);
  std::array<int, 2> seen{};  // a pipe: the reader may be slow to begin
  ASSERT_EQ(::pipe(seen.data()), 0);
  const pid_t child = ::fork();
  if (child == 0) {
    ::close(seen[1]);
    test::set_file_call_limits(limits);
    for (int64_t value = 2; value <= 400; ++value) {
      saves(dir.path(), value);
      char byte = 0;
      if (value == 3 && ::read(seen[0], &byte, 1) < 0) ::_exit(1);
    }
    ::_exit(0);
  }
  ::close(seen[0]);
  int64_t newest = 0, reads = 0;
  int status = 0;
  while (::waitpid(child, &status, WNOHANG) == 0) {
    try {
      const int64_t value = read(dir.path());
      EXPECT_GE(value, newest);
      if (value > 1 && newest <= 1) {
        EXPECT_EQ(::write(seen[1], "", 1), 1);
      }
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
  ::close(seen[1]);
  base::set_log_sink({});
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
  for (const auto& read : {read_last, read_best, read_usable}) read_while_saving(save_new_name, {}, read);
}

TEST(ReadersTest, OneNameAgainAndAgain) {
  for (const auto& read : {read_last, read_best, read_usable}) read_while_saving(save_one_name, {}, read);
  read_while_saving(save_one_name, {},
                    [](const fs::path& folder) { return value_of(RunCheckpoints::load(folder / "latest")); });
}

TEST(ReadersTest, OneNameAgainWhereNamesCannotBeExchanged) {
  for (const auto& read : {read_last, read_usable})
    read_while_saving(save_one_name, {.can_exchange = false}, read);
}

TEST(ReadersTest, TheBestWhoseNameIsSavedInTurnWithAnother) {
  for (const bool can_exchange : {true, false})
    read_while_saving(save_two_names, {.can_exchange = can_exchange}, read_best);
}

}  // namespace
}  // namespace cohort::checkpoint
