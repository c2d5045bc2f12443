// What a save that fails leaves, and one while a file system fails for a moment.
#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include "cohort/base/error.h"
#include "cohort/checkpoint/internal/temporary_name.h"
#include "cohort/checkpoint/link.h"
#include "cohort/checkpoint/run_checkpoints.h"
#include "tests/checkpoint/file_calls.h"
#include "tests/support/temp_dir.h"

namespace cohort::checkpoint {
namespace {

namespace fs = std::filesystem;

class FailedSaveTest : public testing::Test {
 protected:
  void TearDown() override { test::set_file_call_limits({}); }

  void save(const std::string& name, int64_t value, bool is_best) {
    const TensorMap tensors{{"w", at::full({3}, value, at::kLong)}};
    checkpoints.save(name, {tensors, {}, {{"value", value}}}, {.is_best = is_best});
  }
  int64_t value_of(const std::string& name) const {
    return RunCheckpoints::load(dir / name).state.at("value").get<int64_t>();
  }
  /// Nothing can be renamed to the temporary name of `name` while it is there.
  fs::path block(const std::string& name) const {
    const fs::path path = dir / temporary_name(name);
    test::write_file(path / "in the way", "");
    return path;
  }
  std::size_t entries() const {
    return static_cast<std::size_t>(
        std::distance(fs::directory_iterator(dir.path()), fs::directory_iterator()));
  }

  const test::TempDir dir;
  RunCheckpoints checkpoints{dir.path(), {.keep = 1}};
};

TEST_F(FailedSaveTest, WhereLastCannotMoveWhatWasReplacedHasItsNameAgain) {
  save("first", 1, true);
  save("second", 2, false);
  const std::size_t before = entries();
  for (const bool can_exchange : {true, false}) {
    for (const std::string name : {"first", "second", "third"}) {
      SCOPED_TRACE(name + (can_exchange ? ", exchanged" : ", renamed"));
      test::set_file_call_limits({.can_exchange = can_exchange});
      const fs::path blocked = block("last");
      EXPECT_THROW(save(name, 7, name == "third"), SystemError);
      fs::remove_all(blocked);
      fs::remove_all(dir / "third");  // complete, and of no history
      EXPECT_EQ(value_of("first"), 1);
      EXPECT_EQ(value_of("second"), 2);
      EXPECT_EQ(follow_link(dir / "last"), dir / "second");
      EXPECT_EQ(follow_link(dir / "best"), dir / "first");
      EXPECT_EQ(entries(), before);
    }
  }
}

TEST_F(FailedSaveTest, WhereTheBestCannotBeReplacedItsLinkStays) {
  save("best_model", 1, true);
  test::set_file_call_limits({.can_exchange = false});
  const fs::path blocked = block("best_model~old");
  EXPECT_THROW(save("best_model", 2, false), SystemError);
  fs::remove_all(blocked);
  EXPECT_EQ(value_of("best_model"), 1);
  EXPECT_EQ(follow_link(dir / "best"), dir / "best_model");
}

TEST_F(FailedSaveTest, ABestThatCannotBeLookedAtForAMomentStaysTheBest) {
  save("first", 1, true);
  save("second", 2, false);
  const fs::path first = dir / "first", away = dir / "elsewhere" / "first";
  fs::create_directory(away.parent_path());
  fs::rename(first, away);
  fs::create_symlink("first", first);  // ELOOP
  save("third", 3, false);
  fs::remove(first);
  fs::rename(away, first);
  save("fourth", 4, false);
  EXPECT_EQ(checkpoints.find("best"), first);
  EXPECT_EQ(follow_link(dir / "best"), first);
  EXPECT_EQ(value_of("first"), 1);
}

}  // namespace
}  // namespace cohort::checkpoint
