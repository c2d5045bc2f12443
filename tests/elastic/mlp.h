#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>

#include "cohort/elastic/session.h"

namespace cohort::test {

/// A run of an MLP with dropout and batch norm, SGD with momentum, and shares of different sizes.
struct MlpRun {
  std::shared_ptr<elastic::Session> session = nullptr;  ///< null: alone
  int virtual_ranks = 4;
  std::uint64_t total_steps = 60;
  int hidden = 64;
  std::int64_t bucket_bytes = 8'192;
  std::function<void(const elastic::GenerationInfo& info)> on_enter = {};
  /// As elastic::RunOptions::on_commit. `bytes` returns those of the state after so many steps.
  std::function<void(std::uint64_t steps, const std::function<std::string()>& bytes)> on_commit = {};
  std::function<void(std::uint64_t step)> before_step = {};
};

/// Returns the bytes of parameters, buffers and momentum after all steps; empty where the run ended without
/// this process. TEST_INITIAL_SEED: of the first parameters; TEST_PLANT, "no load" (it ignores the state that
/// it is given), "reject" (the first state that it is given is an error), "memory is written again" (of a
/// step that has ended) or "slow" (process 1 takes twice as long in its first 80 steps).
std::string run_mlp(const MlpRun& run);

}  // namespace cohort::test
