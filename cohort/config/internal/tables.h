#pragma once

#include <string>
#include <vector>

#include "cohort/config/key.h"

/// The keys of each section, in the order in which they are written.
namespace cohort::config {

/// 2^53: every whole number up to here is a double.
inline constexpr double kMany = 9007199254740992.0;

inline bool is_not_empty(const std::string& text) {
  return !text.empty();
}

std::vector<ConfigKey> model_keys();
std::vector<ConfigKey> data_keys();
std::vector<ConfigKey> optim_keys();
std::vector<ConfigKey> schedule_keys();
std::vector<ConfigKey> train_keys();
std::vector<ConfigKey> distributed_keys();
std::vector<ConfigKey> comm_keys();
std::vector<ConfigKey> run_keys();

}  // namespace cohort::config
