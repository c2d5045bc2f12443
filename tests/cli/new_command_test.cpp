#include <gtest/gtest.h>

#include <filesystem>
#include <string>
#include <vector>

#include "cohort/base/error.h"
#include "cohort/cli/internal/commands.h"
#include "tests/support/temp_dir.h"
#include "tests/support/throws.h"

namespace cohort::cli {
namespace {

namespace fs = std::filesystem;
using test::message_contains;
using test::read_file;
using test::TempDir;

/// Runs `cohort new ARGUMENTS...` and returns what it printed.
std::string run_new(const std::vector<std::string>& arguments) {
  CLI::App app;
  Context context;
  add_new(app, context);
  std::vector<std::string> words(arguments.rbegin(), arguments.rend());  // as CLI11 takes them
  words.push_back("new");
  ::testing::internal::CaptureStdout();
  try {
    app.parse(words);
    EXPECT_EQ(context.action(), 0);
  } catch (...) {
    ::testing::internal::GetCapturedStdout();
    throw;
  }
  return ::testing::internal::GetCapturedStdout();
}

TEST(NewCommandTest, WritesAProjectOnce) {
  TempDir dir;
  const std::string folder = (dir / "mine").string();
  const std::string out = run_new({"operator", "half_of", "--dir", folder});
  for (const char* file : {"CMakeLists.txt", "half_of.h", "half_of.cpp", "half_of_test.cpp"}) {
    const std::string text = read_file(dir / "mine" / "half_of" / file);
    EXPECT_TRUE(message_contains(text, "half_of")) << file;
    EXPECT_EQ(text.find('@'), std::string::npos) << file;
    EXPECT_TRUE(message_contains(out, std::string("mine/half_of/") + file));
  }
  EXPECT_TRUE(
      message_contains(read_file(dir / "mine" / "half_of" / "CMakeLists.txt"), "find_package(Cohort 0."));
  EXPECT_FALSE(fs::exists(dir / "mine" / "half_of" / "half_of.cu"));
  COHORT_EXPECT_THROW_WITH(run_new({"operator", "half_of", "--dir", folder}), UsageError,
                           "mine/half_of is there already");
}

TEST(NewCommandTest, WritesAProjectThatTrainsWithWhatItRegisters) {
  TempDir dir;
  const std::string out = run_new({"project", "depth", "--dir", dir.path().string()});
  for (const char* file : {"CMakeLists.txt", "depth.cpp", "depth.yaml", "README.md"}) {
    const std::string text = read_file(dir / "depth" / file);
    EXPECT_TRUE(message_contains(text, "depth")) << file;
    EXPECT_EQ(text.find('@'), std::string::npos) << file;
    EXPECT_TRUE(message_contains(out, std::string("/depth/") + file));
  }
  for (const char* name : {"depth_data", "depth_net"}) {
    EXPECT_TRUE(message_contains(read_file(dir / "depth" / "depth.cpp"), name));
    EXPECT_TRUE(message_contains(read_file(dir / "depth" / "depth.yaml"), name));
  }
  EXPECT_TRUE(message_contains(out, "cohort train --load ./build/libdepth.so --config depth.yaml"));
  COHORT_EXPECT_THROW_WITH(run_new({"project", "depth", "--dir", dir.path().string()}), UsageError,
                           "/depth is there already");
  COHORT_EXPECT_THROW_WITH(run_new({"project", "2depth"}), UsageError, "got the name '2depth'");
}

TEST(NewCommandTest, AKernelForGpusStandsBesideWhereAskedFor) {
  TempDir dir;
  run_new({"operator", "on_gpu", "--cuda", "--dir", dir.path().string()});
  EXPECT_TRUE(message_contains(read_file(dir / "on_gpu" / "on_gpu.cu"), "__global__ void on_gpu_kernel"));
  EXPECT_TRUE(message_contains(read_file(dir / "on_gpu" / "on_gpu_cuda.cpp"),
                               "TORCH_LIBRARY_IMPL(on_gpu, CUDA, library)"));
}

TEST(NewCommandTest, RejectsNamesThatAreNone) {
  for (const char* name : {"Half", "2half", "half-of", "../half", "double", "at", "_half"}) {
    COHORT_EXPECT_THROW_WITH(run_new({"operator", name, "--dir", "/nowhere"}), UsageError,
                             std::string("[cli.new] got the name '") + name + "'");
  }
}

}  // namespace
}  // namespace cohort::cli
