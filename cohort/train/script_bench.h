#pragma once

#include <torch/arg.h>

#include <cstdint>
#include <optional>
#include <string>

#include "cohort/bench/compare.h"
#include "cohort/config/config.h"

/// What script mode gives on a run's model: `cohort bench script`.
namespace cohort::train {

/// How bench_script() measures.
struct ScriptBenchOptions {
  /// Of each measurement.
  TORCH_ARG(bench::TimeitOptions, timeit) = {};
};

/// What bench_script() found.
struct ScriptBench {
  std::string model;  ///< its name
  std::int64_t batch_size = 0;
  bench::Comparison step;     ///< forward, loss, backward and update: eager, then scripted
  bench::Comparison forward;  ///< of evaluation: forward, loss and accuracy
  bool same_bits = false;     ///< parameters and buffers after the same steps
  std::string explained;      ///< programs, and reasons to run eagerly
  /// Bytes of tensors made within a step, at most at one time; none where the device is not the CPU.
  std::optional<std::int64_t> eager_peak, scripted_peak;
};

/// Makes the task of `config` twice, trains both on the first batch of its training data, one with
/// ClassificationOptions::script, and measures them in turns. One process; nothing is written.
/// Throws: as make_dataset, make_model and make_optimizer; ConfigError for a model runner whose steps script
/// mode cannot record.
ScriptBench bench_script(config::Config config, const ScriptBenchOptions& options = {});

/// The text that `cohort bench script` prints.
std::string to_text(const ScriptBench& bench);

}  // namespace cohort::train
