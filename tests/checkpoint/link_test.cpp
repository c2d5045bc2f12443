#include "cohort/checkpoint/link.h"

#include <gtest/gtest.h>

#include "cohort/base/error.h"
#include "tests/support/temp_dir.h"
#include "tests/support/throws.h"

namespace cohort::checkpoint {
namespace {

namespace fs = std::filesystem;
using test::read_file;
using test::TempDir;
using test::write_file;

TEST(LinkTest, PointsAndPointsElsewhere) {
  const TempDir dir;
  EXPECT_FALSE(follow_link(dir / "last"));
  point_link(dir / "last", "a", dir / ".tmp");
  EXPECT_EQ(follow_link(dir / "last"), dir / "a");
  point_link(dir / "last", "b", dir / ".tmp");
  EXPECT_EQ(follow_link(dir / "last"), dir / "b");
  EXPECT_FALSE(fs::exists(fs::symlink_status(dir / ".tmp")));
}

TEST(LinkTest, AFileThatHoldsANameIsALink) {
  const TempDir dir;
  write_file(dir / "last", "epoch_1\n");
  EXPECT_EQ(follow_link(dir / "last"), dir / "epoch_1");
  point_link(dir / "last", "b", dir / ".tmp");
  EXPECT_EQ(follow_link(dir / "last"), dir / "b");
}

TEST(LinkTest, OtherFilesAreNoLinksAndStay) {
  const TempDir dir;
  for (const std::string& text :
       {std::string(), std::string("\n"), std::string("name"), std::string("a\nb\n"), std::string("../a\n"),
        std::string(".hidden\n"), std::string(300, 'a') + "\n"}) {
    write_file(dir / "last", text);
    EXPECT_FALSE(follow_link(dir / "last")) << text;
    COHORT_EXPECT_THROW_WITH(point_link(dir / "last", "a", dir / ".tmp"), SystemError, "cannot replace link");
    EXPECT_EQ(read_file(dir / "last"), text);
  }
  fs::remove(dir / "last");
  fs::create_directory(dir / "last");
  COHORT_EXPECT_THROW_WITH(point_link(dir / "last", "a", dir / ".tmp"), SystemError, "cannot replace link");
}

TEST(LinkTest, FolderThatIsNotThereIsNamed) {
  const TempDir dir;
  COHORT_EXPECT_THROW_WITH(point_link(dir / "no" / "last", "a", dir / "no" / ".tmp"), SystemError,
                           "cannot create link " + (dir / "no" / ".tmp").string());
}

}  // namespace
}  // namespace cohort::checkpoint
