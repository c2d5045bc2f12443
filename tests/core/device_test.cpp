#include "cohort/core/device.h"

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <gtest/gtest.h>

#include <cstdio>

#include "cohort/base/error.h"
#include "cohort/core/torch_compat.h"
#include "tests/support/environment.h"
#include "tests/support/temp_dir.h"
#include "tests/support/throws.h"

namespace cohort::core {
namespace {

using test::ScopedEnv;

// What the probe prints for a device, in a process of its own.
std::string probe(const std::string& folder, const std::string& when, const std::string& device) {
  const std::string command =
      std::string("'") + COHORT_DEVICE_PROBE + "' '" + folder + "' " + when + " '" + device + "'";
  FILE* pipe = ::popen(command.c_str(), "r");
  if (pipe == nullptr) throw std::runtime_error("cannot run " + command);
  std::string output;
  char buffer[512];
  while (std::fgets(buffer, sizeof buffer, pipe) != nullptr) output += buffer;
  if (::pclose(pipe) != 0) throw std::runtime_error("failed: " + command + "\n" + output);
  return output;
}

TEST(DeviceTest, CpuIsTheCpu) {
  EXPECT_EQ(resolve_device("cpu").device, at::kCPU);
}

TEST(DeviceTest, UnknownDevicesAreRejected) {
  for (const char* name : {"gpu", "cuda:x", "cuda:-1", "cpu:0", "cuda:0/a", "", "Auto"}) {
    COHORT_EXPECT_THROW_WITH(resolve_device(name), UsageError, std::string("device \"") + name + "\"");
    COHORT_EXPECT_THROW_WITH(resolve_device(name), UsageError, "Try: auto, cpu, cuda or cuda:K");
  }
}

TEST(DeviceTest, CpuBuildOfLibTorchSaysSo) {
  const test::TempDir dir;  // as the folder of a CPU build: no libtorch_cuda.so in it
  EXPECT_EQ(load_cuda(dir.path()),
            "this LibTorch is a CPU build (" + (dir / "libtorch_cuda.so").string() + " is not there)");
  EXPECT_TRUE(std::filesystem::exists(libtorch_folder() / "libtorch_cpu.so"));
}

TEST(DeviceTest, AutoAlwaysGivesADeviceAndSaysWhy) {
  const ResolvedDevice resolved = resolve_device("auto");
  EXPECT_EQ(resolved.reason.find(resolved.device.is_cpu() ? "cpu, because " : "cuda:0, because "), 0u)
      << resolved.reason;
}

TEST(DeviceTest, GpuThatCannotBeUsedIsAnErrorAndNeverTheCpu) {
  if (!resolve_device("auto").device.is_cpu()) return;  // here one can
  COHORT_EXPECT_THROW_WITH(resolve_device("cuda:0"), UsageError, "device cuda:0 cannot be used: ");
  COHORT_EXPECT_THROW_WITH(device_of(base::Placement::parse("cuda:1")), UsageError,
                           "device cuda:1 cannot be used: ");
}

TEST(DeviceTest, BrokenCudaPartIsSaidWithTheLoadersWords) {
  const test::TempDir dir;
  test::write_file(dir / "libtorch_cuda.so", "not a library");
  const std::string trouble = load_cuda(dir.path());
  EXPECT_NE(trouble.find("does not load"), std::string::npos) << trouble;
  EXPECT_NE(trouble.find("file too short"), std::string::npos) << trouble;
}

TEST(DeviceTest, GpusAreUsedWhenTheCudaPartReportsThem) {
  EXPECT_EQ(probe(COHORT_FAKE_CUDA_FOLDER, "EARLY", "cuda:1"), "cuda:1 (as asked)\n");
  EXPECT_EQ(probe(COHORT_FAKE_CUDA_FOLDER, "EARLY", "cuda"), "cuda:0 (as asked)\n");
  EXPECT_EQ(probe(COHORT_FAKE_CUDA_FOLDER, "EARLY", "auto"),
            "cuda:0 (cuda:0, because 2 GPU(s) are visible)\n");
  EXPECT_EQ(probe(COHORT_FAKE_CUDA_FOLDER, "EARLY", "cpu"), "cpu (as asked)\n");
}

TEST(DeviceTest, GpuThatIsNotThereIsRejectedWithThoseThatAre) {
  const std::string output = probe(COHORT_FAKE_CUDA_FOLDER, "EARLY", "cuda:5");
  EXPECT_NE(output.find("error: [core.device] device cuda:5: got GPU 5, expected 0 to 1"), std::string::npos)
      << output;
}

TEST(DeviceTest, CudaBuildWithoutAGpuSaysSo) {
  const ScopedEnv env("FAKE_GPUS", "0");
  EXPECT_EQ(probe(COHORT_FAKE_CUDA_FOLDER, "EARLY", "auto"),
            "cpu (cpu, because no GPU is visible (driver or CUDA_VISIBLE_DEVICES))\n");
}

TEST(DeviceTest, CudaPartThatComesTooLateIsAnErrorThatSaysWhatToDo) {
  const std::string output = probe(COHORT_FAKE_CUDA_FOLDER, "LATE", "cuda:0");
  EXPECT_NE(output.find("had already looked for GPUs"), std::string::npos) << output;
  EXPECT_NE(output.find("call resolve_device first in main"), std::string::npos) << output;
}

TEST(ThreadsTest, ThreadsAboveTheUsableCoresAreRejectedUnlessAllowed) {
  const ScopedEnv cores("COHORT_CORES", "2");
  const int before = at::get_num_threads();
  COHORT_EXPECT_THROW_WITH(set_intra_op_threads(3), UsageError,
                           "got 3 threads for 2 usable core(s), where they would be far slower. Try: 2, or "
                           "COHORT_CORES=3 when");
  COHORT_EXPECT_THROW_WITH(set_intra_op_threads(-1), UsageError, "got -1 threads");
  EXPECT_EQ(at::get_num_threads(), before);
  EXPECT_EQ(set_intra_op_threads(2), 2);
  EXPECT_EQ(at::get_num_threads(), 2);
  EXPECT_EQ(set_intra_op_threads(3, true), 3);
  EXPECT_EQ(at::get_num_threads(), 3);
  set_intra_op_threads(before, true);
}

TEST(ThreadsTest, ZeroMeansTheUsersVariableElseTheUsableCores) {
  const ScopedEnv cores("COHORT_CORES", "2");
  const int before = at::get_num_threads();
  {
    const ScopedEnv threads("OMP_NUM_THREADS", std::nullopt);
    EXPECT_EQ(set_intra_op_threads(), 2);
  }
  {
    const ScopedEnv threads("OMP_NUM_THREADS", "1");
    EXPECT_EQ(set_intra_op_threads(), 1);
  }
  set_intra_op_threads(before, true);
}

TEST(ReseedTest, DrawsAreAFunctionOfSeedStepAndRank) {
  const auto draw = [](std::uint64_t seed, std::uint64_t step, std::uint64_t rank) {
    reseed_generators(seed, step, rank);
    return at::rand({16});
  };
  const at::Tensor first = draw(1, 2, 3);
  at::rand({5});
  EXPECT_TRUE(at::equal(draw(1, 2, 3), first));
  EXPECT_FALSE(at::equal(draw(2, 2, 3), first));
  EXPECT_FALSE(at::equal(draw(1, 3, 3), first));
  EXPECT_FALSE(at::equal(draw(1, 2, 4), first));
}

TEST(TorchCompatTest, VersionComparesMajorThenMinor) {
  EXPECT_TRUE(COHORT_TORCH_AT_LEAST(1, 99));
  EXPECT_TRUE(COHORT_TORCH_AT_LEAST(TORCH_VERSION_MAJOR, TORCH_VERSION_MINOR));
  EXPECT_FALSE(COHORT_TORCH_AT_LEAST(TORCH_VERSION_MAJOR, TORCH_VERSION_MINOR + 1));
  EXPECT_FALSE(COHORT_TORCH_AT_LEAST(TORCH_VERSION_MAJOR + 1, 0));
}

}  // namespace
}  // namespace cohort::core
