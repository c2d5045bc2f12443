#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "cohort/elastic/session.h"

/// The program of the tests' processes: an MLP with dropout and batch norm, SGD with momentum, and shares of different sizes.
namespace cohort::test {

struct MlpRun {
  std::shared_ptr<elastic::Session> session = nullptr;  ///< null: alone
  int virtual_ranks = 4;
  std::uint64_t total_steps = 60;
  int hidden = 64;
  std::string ledger = {};  ///< file; empty: none
};

/// Returns the bytes of parameters, buffers and momentum after all steps; empty where the run ended without this process.
std::string run_mlp(const MlpRun& run);

/// What a child does, by its environment: TEST_STEPS, TEST_FOLDER, TEST_PLANT, "no load" (it ignores the state that it is given),
/// and TEST_POINT, "hello:2": there it asks by
/// TEST_CONTROL_FD whether it may continue. Returns its status.
int run_mlp_child();

}  // namespace cohort::test
