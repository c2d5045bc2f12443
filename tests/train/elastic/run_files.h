#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <filesystem>
#include <map>
#include <nlohmann/json.hpp>
#include <set>
#include <sstream>
#include <string>

#include "cohort/checkpoint/manifest.h"
#include "tests/support/temp_dir.h"

/// What an elastic run leaves, for tests that compare it with that of an undisturbed one.
namespace cohort::test {

/// Returns the files of a run's folder by name, and where links point, without what tells of times.
inline std::map<std::string, std::string> run_files(const std::filesystem::path& folder) {
  std::map<std::string, std::string> files;
  for (const auto& entry : std::filesystem::recursive_directory_iterator(folder)) {
    const std::string name = entry.path().lexically_relative(folder).string();
    if (entry.is_symlink()) {
      files[name] = std::filesystem::read_symlink(entry.path()).string();
    } else if (entry.path().extension() == ".safetensors" || name == "ledger.csv") {
      files[name] = read_file(entry.path());
    } else if (entry.path().filename() == "state.json") {
      nlohmann::json run = checkpoint::read_manifest(entry.path().parent_path()).state.at("run");
      for (const char* key : {"epoch_seconds", "wait_seconds"}) run.erase(key);
      files[name] = run.dump();
    }
  }
  std::istringstream rows(read_file(folder / "metrics.jsonl"));
  for (std::string line; std::getline(rows, line);) {
    nlohmann::json row = nlohmann::json::parse(line);
    for (const char* key : {"samples_per_second", "data_wait", "seconds"}) row.erase(key);
    files["metrics.jsonl"] += row.dump() + "\n";
  }
  return files;
}

/// Returns what is wrong with a ledger of `steps` steps: each has one line, and each sample is there once an
/// epoch. Empty: nothing.
inline std::string ledger_fault(const std::string& ledger, std::int64_t steps, std::int64_t num_samples) {
  std::istringstream lines(ledger);
  std::string line;
  std::getline(lines, line);
  if (line != "step,epoch,samples") return "the head is " + line;
  std::map<std::string, std::multiset<std::int64_t>> samples;
  std::int64_t step = 0;
  while (std::getline(lines, line)) {
    const std::size_t first = line.find(','), second = line.find(',', first + 1);
    if (line.substr(0, first) != std::to_string(++step))
      return "line " + line + " stands at step " + std::to_string(step);
    std::string list = line.substr(second + 1);
    std::ranges::replace(list, '|', ' ');
    std::istringstream indices(list);
    for (std::int64_t index = 0; indices >> index;) {
      samples[line.substr(first + 1, second - first - 1)].insert(index);
    }
  }
  if (step != steps) return "there are " + std::to_string(step) + " steps";
  std::multiset<std::int64_t> all;
  for (std::int64_t i = 0; i < num_samples; ++i) all.insert(i);
  for (const auto& [epoch, found] : samples) {
    if (found != all) return "epoch " + epoch + " has other samples";
  }
  return "";
}

}  // namespace cohort::test
