// Prints what is there, then what is missing and how to get it. A device or a disk that does not answer
// becomes a text, not an error. Numbers come from the modules that use them, so that the command cannot say
// one thing and a run do another. Status 0 also where something is missing, as Cohort trains without it.
#include <ATen/Context.h>
#include <ATen/Version.h>
#include <dlfcn.h>
#include <sys/statvfs.h>
#include <torch/version.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <exception>
#include <filesystem>
#include <string>

#include "cohort/base/cpu.h"
#include "cohort/base/error.h"
#include "cohort/base/text/format_list.h"
#include "cohort/base/version.h"
#include "cohort/cli/internal/commands.h"
#include "cohort/comm/backend.h"
#include "cohort/comm/group.h"
#include "cohort/core/device.h"
#include "cohort/memory/process_memory.h"

namespace cohort::cli {
namespace {

namespace fs = std::filesystem;

void line(const char* what, const std::string& value) {
  std::printf("  %-14s %s\n", what, value.c_str());
}

std::string gib(double bytes) {
  char text[32];
  std::snprintf(text, sizeof text, "%.1f GiB", bytes / (1024.0 * 1024.0 * 1024.0));
  return text;
}

// Three limits may hold at once: cores that are on line, the affinity mask, and the quota of a cgroup. A user
// of a container sees from this which of them binds.
std::string cores_text() {
  const base::CoreLimits limits = base::core_limits();
  const int usable = base::usable_cores();
  std::string text = base::concat(usable, " usable of ", limits.online);
  if (limits.affinity < limits.online) text += base::concat(", affinity ", limits.affinity);
  if (limits.quota) text += base::concat(", CPU quota ", *limits.quota, " (", limits.quota_source, ")");
  if (usable != limits.usable()) text += base::concat(", COHORT_CORES ", usable);
  return text;
}

std::string backends_text() {
  base::TextList names;
  for (const std::string& name : comm::backend_names()) {
    if (!comm::backend_type(name).is_for_tests) names.add(name);
  }
  return names.text();
}

std::string cuda_text() {
  try {
    // As train.device does: the device has to answer, not only to be listed.
    const at::Device device = core::resolve_device("cuda").device;
    return "yes (" + device.str() + " answers)";
  } catch (const std::exception& error) {
    return std::string("no: ") + error.what();
  }
}

std::string disk_text() {
  struct statvfs disk {};
  if (statvfs(".", &disk) != 0) return "unknown";
  // f_bavail, not f_bfree: blocks that root keeps for itself are of no use to a run. f_frsize is their unit.
  return gib(static_cast<double>(disk.f_bavail) * static_cast<double>(disk.f_frsize)) + " free in " +
         fs::current_path().string();
}

std::string openmp_text() {
  const char* threads = std::getenv("OMP_NUM_THREADS");
  return threads == nullptr ? "OMP_NUM_THREADS is not set (train.threads decides)"
                            : std::string("OMP_NUM_THREADS=") + threads;
}

bool writable_here() {
  // Run folders are made in runs/, which is made where it is missing. A folder takes new entries only where
  // it may be searched too (X_OK).
  return ::access(fs::exists("runs") ? "runs" : ".", W_OK | X_OK) == 0;
}

int doctor_command() {
  std::printf("Versions\n");
  line("cohort", std::string(base::version()));
  line("LibTorch", TORCH_VERSION);
  line("compiler", __VERSION__);
  std::printf("Machine\n");
  line("cores", cores_text());
  const memory::SystemMemory memory = memory::system_memory();
  line("memory", gib(static_cast<double>(memory.available_bytes)) + " available of " +
                     gib(static_cast<double>(memory.total_bytes)));
  line("disk", disk_text());
  line("OpenMP", openmp_text());
  std::printf("Devices and kernels\n");
  line("cpu", at::globalContext().hasMKLDNN() ? "yes, with oneDNN"
                                              : "yes, without oneDNN (convolutions will be slow)");
  line("instructions", at::get_cpu_capability());
  line("linear algebra", at::globalContext().hasMKL() ? "MKL" : "no MKL");
  line("cuda", cuda_text());
  std::printf("Ranks\n");
  line("backends", backends_text());
  std::printf("Files\n");
  line("JPEG, PNG", "built in");
  line("run folders", writable_here() ? "this folder can be written to"
                                      : "this folder cannot be written to; use run.dir=FOLDER");
  std::printf("What to get\n");
  bool complete = true;
  if (!core::cuda_is_built()) {
    complete = false;
    line("CUDA",
         "this LibTorch is a CPU build; for a GPU build against a CUDA wheel: ./quickstart --libtorch PATH");
  }
  // Only `command -v` asks for a program as the user's shell does. The text is constant, so nothing can be
  // injected.
  if (std::system("command -v tensorboard > /dev/null 2>&1") != 0) {
    complete = false;
    line("TensorBoard", "to see the event files: pip install tensorboard; tensorboard --logdir runs");
  }
  if (complete) line("nothing", "all is there");
  return 0;
}

}  // namespace

void add_doctor(CLI::App& app, Context& context) {
  CLI::App* command = app.add_subcommand(
      "doctor", "Say what this machine has, what Cohort can use of it, and how to get the rest");
  command->callback([&context] { context.action = [] { return doctor_command(); }; });
}

}  // namespace cohort::cli
