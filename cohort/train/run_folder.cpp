// A folder is chosen from run.dir, or by the run's name and its start in UTC, by which the newest is found.
// It is looked at again under its lock, as another process may have finished a run there in between. A start
// that wrote nothing to an empty folder takes its lock's file away, and the folder if it made it. Each start
// has a folder of its own under starts, so a later start overwrites nothing.
#include "cohort/train/run_folder.h"

#include <sys/utsname.h>
#include <torch/version.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <ctime>
#include <fstream>
#include <nlohmann/json.hpp>
#include <optional>
#include <regex>
#include <tuple>
#include <vector>

#include "cohort/base/cpu.h"
#include "cohort/base/error.h"
#include "cohort/base/files/atomic_file.h"
#include "cohort/base/files/file_lock.h"
#include "cohort/base/version.h"

namespace cohort::train {
namespace fs = std::filesystem;
namespace {

/// In UTC: an hour that daylight saving repeats would sort a run before an older one.
std::string timestamp(const char* format) {
  const std::time_t now = std::time(nullptr);
  std::tm utc{};
  gmtime_r(&now, &utc);
  char text[64];
  std::strftime(text, sizeof text, format, &utc);
  return text;
}

bool holds_run(const fs::path& folder) {
  const fs::path checkpoints = folder / "checkpoints";
  std::error_code ignored;
  const auto rows = fs::file_size(folder / "metrics.jsonl", ignored);  // empty after a start that failed
  return (!ignored && rows > 0) ||
         (fs::is_directory(checkpoints, ignored) && !fs::is_empty(checkpoints, ignored));
}

/// Returns when a run called `name` began: date, time, and the number among those of one second. Nothing
/// where `folder` is not NAME-DATE-TIME or NAME-DATE-TIME-NUMBER.
std::optional<std::tuple<std::string, std::string, int>> began(const std::string& folder,
                                                               const std::string& name) {
  static const std::regex kSuffix("-([0-9]{8})-([0-9]{6})(?:-([0-9]{1,6}))?");
  std::smatch found;
  if (!folder.starts_with(name)) return std::nullopt;
  const std::string suffix = folder.substr(name.size());
  if (!std::regex_match(suffix, found, kSuffix)) return std::nullopt;
  return std::tuple(found.str(1), found.str(2), found[3].matched ? std::stoi(found.str(3)) : 1);
}

/// Returns the newest of runs/NAME-DATE-TIME, or nothing.
fs::path newest_run(const std::string& name) {
  std::error_code ignored;
  fs::path newest;
  decltype(began(name, name)) newest_began;
  for (const auto& entry : fs::directory_iterator("runs", ignored)) {
    const auto entry_began = began(entry.path().filename().string(), name);
    if (entry_began <= newest_began || !holds_run(entry.path())) continue;
    newest = entry.path();
    newest_began = entry_began;
  }
  return newest;
}

/// A folder, and whether choose() made it.
struct Chosen {
  fs::path path;
  bool is_made = false;
};

Chosen fresh_folder(const std::string& name) {
  const std::string base = name + "-" + timestamp("%Y%m%d-%H%M%S");
  fs::create_directories("runs");
  for (int attempt = 1;; ++attempt) {
    const fs::path path = fs::path("runs") / (attempt == 1 ? base : base + "-" + std::to_string(attempt));
    if (fs::create_directory(path)) return {path, true};
  }
}

/// Returns whether `start` is of the start `origin` of an elastic run: another process of it may have died
/// meanwhile.
bool is_of_start(const fs::path& start, const std::string& origin) {
  std::ifstream file(start / "run.json");
  const nlohmann::json run = nlohmann::json::parse(file, nullptr, false);
  return run.is_object() && run.contains("origin") && run["origin"] == origin;
}

/// Makes the folder `starts`/0001, or the one after the newest, unless that is of the same start. A run that
/// an older version began has none: what it left in `run` becomes the first.
fs::path next_start(const fs::path& starts, const fs::path& run, const std::string& origin) {
  const auto folder_of = [&](int number) {
    const std::string digits = std::to_string(number);
    return starts / (std::string(4 - std::min<std::size_t>(4, digits.size()), '0') + digits);
  };
  if (!fs::exists(starts) && fs::exists(run / "config.yaml")) {
    fs::create_directories(folder_of(1));
    for (const char* file : {"config.yaml", "run.json"}) {
      if (fs::exists(run / file)) fs::copy_file(run / file, folder_of(1) / file);
    }
  }
  int number = 1;
  while (fs::exists(folder_of(number))) ++number;
  if (!origin.empty() && number > 1 && is_of_start(folder_of(number - 1), origin))
    return folder_of(number - 1);
  fs::create_directories(folder_of(number));
  return folder_of(number);
}

Chosen choose(const config::RunConfig& run, const std::string& name) {
  const std::string& resume = run.resume;
  if (!run.dir.empty()) {
    if (resume.empty() && holds_run(run.dir)) {
      throw ConfigError("train.run_folder", base::concat(run.dir, " already holds a run"),
                        "--resume auto to continue it, or another run.dir");
    }
    return {run.dir};
  }
  if (resume.empty()) return fresh_folder(name);
  if (resume == "auto" || resume == "last" || resume == "best") {
    const fs::path newest = newest_run(name);
    if (!newest.empty()) return {newest};
    if (resume == "auto") return fresh_folder(name);
    throw ConfigError("train.run_folder",
                      base::concat("--resume ", resume, ": there is no run runs/", name, "-*"),
                      "run.dir=FOLDER, or --resume auto, which starts afresh when there is none");
  }
  // A checkpoint by path resumes in its own run: FOLDER/checkpoints/NAME. So does FOLDER.
  const fs::path checkpoint = fs::weakly_canonical(resume);
  if (fs::is_directory(checkpoint / "checkpoints")) return {checkpoint};
  if (checkpoint.parent_path().filename() == "checkpoints") return {checkpoint.parent_path().parent_path()};
  return fresh_folder(name);
}

}  // namespace

RunFolder::RunFolder(fs::path path) : path_(std::move(path)) {}
RunFolder::~RunFolder() {
  if (lock_ == nullptr || !was_empty_) return;
  // What was made for a run that never began: data or model were not to be had.
  std::error_code ignored;
  for (const auto& entry : fs::directory_iterator(path_, ignored)) {
    if (entry.path().filename() != ".lock") return;
  }
  fs::remove(path_ / ".lock", ignored);
  if (is_made_) fs::remove(path_, ignored);
}

fs::path run_folder_of(const fs::path& config) {
  const fs::path file = fs::weakly_canonical(config);
  fs::path folder = file.parent_path();
  if (folder.parent_path().filename() == "starts") folder = folder.parent_path().parent_path();
  // A project may have a config.yaml, and a folder called checkpoints, of its own.
  std::error_code ignored;
  const bool is_of_run = file.filename() == "config.yaml" &&
                         fs::exists(file.parent_path() / "run.json", ignored) && holds_run(folder);
  return is_of_run ? folder : fs::path();
}

RunFolder::RunFolder(RunFolder&&) noexcept = default;

RunFolder RunFolder::open(const config::RunConfig& run, const std::string& name) {
  try {
    const Chosen chosen = choose(run, name);
    RunFolder folder(chosen.path);
    folder.is_made_ = fs::create_directories(folder.path_) || chosen.is_made;
    folder.was_empty_ = fs::is_empty(folder.path_);
    folder.lock_ = std::make_unique<base::FileLock>(folder.path_ / ".lock");
    // Another process may have finished a run here between the look and the lock.
    if (run.resume.empty() && holds_run(folder.path_)) {
      throw ConfigError("train.run_folder", base::concat(folder.path_.string(), " already holds a run"),
                        "--resume auto to continue it, or another run.dir");
    }
    return folder;
  } catch (const fs::filesystem_error& error) {
    throw SystemError("train.run_folder", error.what(), "a run.dir that this user can write to");
  }
}

RunFolder RunFolder::join(const config::RunConfig& run) {
  if (run.dir.empty()) {
    throw ConfigError(
        "train.run_folder",
        "distributed.elastic is true and run.dir is empty: processes that come later would not find "
        "the run",
        "run.dir=runs/NAME");
  }
  try {
    RunFolder folder(run.dir);
    fs::create_directories(folder.path_);
    // Another process may be about to write where this one finds nothing, so nothing is ever taken away.
    folder.lock_ = std::make_unique<base::FileLock>(folder.path_ / ".lock", base::FileLock::Mode::kShared);
    return folder;
  } catch (const fs::filesystem_error& error) {
    throw SystemError("train.run_folder", error.what(), "a run.dir that this user can write to");
  }
}

void RunFolder::describe(config::Config config, const std::string& command, int world_size,
                         const std::string& origin) const {
  // How this process began, not what the run is: the file must not resume by itself.
  config.run.resume.clear();
  utsname machine{};
  uname(&machine);
  nlohmann::json run = {
      {"command", command},
      {"started", timestamp("%Y-%m-%dT%H:%M:%S%z")},
      {"cohort", base::version()},
      {"libtorch", TORCH_VERSION},
      {"compiler", __VERSION__},
      {"machine",
       {{"host", machine.nodename},
        {"system", std::string(machine.sysname) + " " + machine.release},
        {"arch", machine.machine},
        {"cores", base::usable_cores()}}},
      {"process", getpid()},
      {"world_size", world_size},
  };
  if (!origin.empty()) run["origin"] = origin;
  // The command may name files whose names are not UTF-8.
  const std::string text = run.dump(2, ' ', false, nlohmann::json::error_handler_t::replace) + "\n";
  try {
    for (const fs::path& folder : {next_start(path_ / "starts", path_, origin), path_}) {
      base::write_file_atomically(folder / "config.yaml", dump_config(config));
      base::write_file_atomically(folder / "run.json", text);
    }
  } catch (const fs::filesystem_error& error) {
    throw SystemError("train.run_folder", error.what(), "a run.dir that this user can write to");
  }
}

}  // namespace cohort::train
