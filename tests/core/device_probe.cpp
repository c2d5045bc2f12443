// device_probe LIBRARY_FOLDER EARLY|LATE DEVICE: loads the CUDA part from a folder and prints what DEVICE
// becomes. With LATE, LibTorch has looked for GPUs before.
#include <ATen/Context.h>

#include <cstdio>
#include <exception>
#include <string_view>

#include "cohort/core/device.h"

int main(int argc, char** argv) {
  if (argc != 4) return 2;
  if (std::string_view(argv[2]) == "LATE") at::manual_seed(1);
  try {
    if (const std::string trouble = cohort::core::load_cuda(argv[1]); !trouble.empty()) {
      std::printf("trouble: %s\n", trouble.c_str());
      return 0;
    }
    const cohort::core::ResolvedDevice resolved = cohort::core::resolve_device(argv[3]);
    std::printf("%s (%s)\n", resolved.device.str().c_str(), resolved.reason.c_str());
  } catch (const std::exception& error) {
    std::printf("error: %s\n", error.what());
  }
}
