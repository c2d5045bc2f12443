#include "cohort/cli/internal/config_option.h"

#include <algorithm>
#include <array>
#include <string_view>

#include "cohort/base/error.h"
#include "cohort/base/text/format_list.h"
#include "cohort/config/renamed_keys.h"

namespace cohort::cli {
namespace {

/// Whether `override_text`, `key=value`, says where the data is, or that it needs no place.
bool names_data(const std::string& override_text) {
  constexpr std::array<std::string_view, 5> kKeys = {"data.path", "data.train", "data.type", "DATA_PATH",
                                                     "TRAIN_FILE"};
  const std::string_view key = std::string_view(override_text).substr(0, override_text.find('='));
  // An earlier name is an error of its own.
  return std::ranges::find(kKeys, key) != kKeys.end() || !config::renamed_to(key, "").empty();
}

}  // namespace

void add_config_option(CLI::App& command, std::string& config, const std::string& help) {
  // By hand, as CLI11 would take the last file without a word, and the user would train with half of the
  // settings.
  const auto take = [&config](const std::vector<std::string>& files) {
    if (files.size() > 1) {
      throw UsageError("cli.config",
                       base::concat("--config is given ", files.size(), " times: ", base::join(files)),
                       "one file, and key=value after it for what is to differ");
    }
    config = files.front();
  };
  command.add_option_function<std::vector<std::string>>("-c,--config", take, help)
      ->allow_extra_args(false)
      ->option_text("FILE");
}

config::Config load_config(const std::string& where, const std::string& config,
                           const std::vector<std::string>& overrides) {
  if (!config.empty()) return config::load_config(config, overrides);
  // All other keys have a default that trains. Without data the error would come late and speak of a folder
  // `data` that nobody named.
  if (std::ranges::none_of(overrides, names_data)) {
    throw UsageError(where, "neither a configuration nor data was given",
                     "--config FILE (RUN/config.yaml continues a run), or data.path=FOLDER with train/ and "
                     "val/ in it; every other key has a default");
  }
  return config::load_config_text("", "defaults", overrides);
}

}  // namespace cohort::cli
