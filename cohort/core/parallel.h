#pragma once

#include <c10/util/FunctionRef.h>

#include <cstdint>

namespace cohort::core {

/// Calls work(begin, end) for stretches of `grain` items that cover 0 .. count - 1 once, on the threads that
/// LibTorch computes with (at::set_num_threads), the caller's among them; returns when all are done. Idle
/// threads take the next stretch, so one slow stretch holds nobody up, and where stretches begin does not
/// depend on the number of threads. Inside another parallel region, and where LibTorch's OpenMP runtime is
/// not found, the caller does it all.
///
/// at::parallel_for is a template that runs on the caller alone in code compiled without OpenMP, as Cohort is
/// (a second runtime must not come in). LibTorch's thread-local state (gradient mode, autocast) is the
/// thread's own in `work`. Throws: what the lowest stretch that threw has thrown; all others still run.
void parallel_for(std::int64_t count, std::int64_t grain,
                  c10::function_ref<void(std::int64_t begin, std::int64_t end)> work);

}  // namespace cohort::core
