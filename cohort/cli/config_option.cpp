#include "cohort/cli/config_option.h"

#include <vector>

#include "cohort/core/error.h"

namespace cohort::cli {
void add_config_option(CLI::App& command, std::string& config, const std::string& help) {
  const auto take = [&config](const std::vector<std::string>& files) {
    if (files.size() > 1) {
      std::string all;
      for (const std::string& file : files) all += (all.empty() ? "" : ", ") + file;
      throw UsageError("cli.config", core::concat("--config is given ", files.size(), " times: ", all),
                       "one file, and key=value after it for what is to differ");
    }
    config = files.front();
  };
  command.add_option_function<std::vector<std::string>>("-c,--config", take, help)
      ->allow_extra_args(false)
      ->option_text("FILE");
}

}  // namespace cohort::cli
