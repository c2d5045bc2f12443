#pragma once

#include <functional>
#include <map>
#include <string>
#include <vector>

#include "cohort/launch/run_options.h"

/// The reading of what `cohort run` is asked for: torchrun's flags, words and PET_* variables. No LibTorch.
namespace cohort::launch {

/// Throws: UsageError for options that cannot be, or not together.
void check(const RunOptions& options);

/// Reads the value of --nproc-per-node: a number, cpu, gpu or auto. `num_gpus` counts GPUs when a word asks
/// for that. Throws: UsageError naming the flag, its value and what is expected.
int read_nproc_per_node(const std::string& text, const std::function<int()>& num_gpus);

/// Reads flags by name ("1" for a switch that is given), then what PET_NAME says of those that are not given.
/// `num_gpus` counts GPUs when a word asks for that.
/// Throws: UsageError naming the flag or variable, its value and what is expected.
RunOptions read_run_flags(
    const std::map<std::string, std::string>& given, std::vector<std::string> command,
    const std::function<int()>& num_gpus = [] { return 0; });

}  // namespace cohort::launch
