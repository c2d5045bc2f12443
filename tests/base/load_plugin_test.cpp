#include "cohort/base/load_plugin.h"

#include <gtest/gtest.h>

#include <exception>
#include <filesystem>

#include "cohort/base/error.h"
#include "tests/support/temp_dir.h"
#include "tests/support/throws.h"

namespace cohort::base {
namespace {

// What a library registers, and one that throws: tests/cli/program_test.cpp, which has libraries to load.
TEST(LoadPluginTest, ALibraryIsLoadedAndMayBeLoadedAgain) {
  const std::terminate_handler before = std::get_terminate();
  for (int i = 0; i < 2; ++i) EXPECT_NO_THROW(load_plugin("libm.so.6"));
  EXPECT_EQ(std::get_terminate(), before);
}

TEST(LoadPluginTest, ALibraryThatCannotBeLoadedIsRejectedSayingWhy) {
  const test::TempDir dir;
  const std::terminate_handler before = std::get_terminate();
  const auto broken = dir / "broken.so";
  test::write_file(broken, "this is no library");
  COHORT_EXPECT_THROW_WITH(load_plugin(broken), UsageError,
                           concat("[base.load_plugin] cannot load ", broken.string(), ": "));
  COHORT_EXPECT_THROW_WITH(load_plugin("missing.so"), UsageError, "missing.so: cannot open shared object");
  COHORT_EXPECT_THROW_WITH(load_plugin("missing.so"), UsageError, "with a slash in it");
  COHORT_EXPECT_THROW_WITH(load_plugin(dir / "missing.so"), UsageError,
                           "missing.so: there is no such file. Try: ");
  COHORT_EXPECT_THROW_WITH(load_plugin("./missing.so"), UsageError,
                           concat("relative paths count from ", std::filesystem::current_path().string()));
  EXPECT_EQ(std::get_terminate(), before);
}

}  // namespace
}  // namespace cohort::base
