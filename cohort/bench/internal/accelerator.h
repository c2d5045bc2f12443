#pragma once

/// Internal: the GPU that LibTorch uses, if it uses one.
namespace cohort::bench::detail {

/// Whether LibTorch's CUDA part is loaded and sees a GPU.
bool has_accelerator();

/// Work given to a GPU continues after the call that gave it has returned: waits for it. Nothing without one.
void wait_for_accelerator();

}  // namespace cohort::bench::detail
