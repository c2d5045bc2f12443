#pragma once

#include <gtest/gtest.h>

#include <filesystem>
#include <map>
#include <string>
#include <vector>

#include "cohort/base/log.h"
#include "cohort/train/run.h"
#include "tests/support/temp_dir.h"

/// `cohort train` within the process: a perceptron on made-up images, 3 epochs of 5 steps in some
/// milliseconds.
namespace cohort::test {

/// What the library says while this object lives.
class Logged {
 public:
  Logged() {
    base::set_log_sink([this](base::LogLevel, std::string_view line) { text_ += std::string(line) + "\n"; });
  }
  ~Logged() { base::set_log_sink({}); }
  const std::string& text() const { return text_; }

 private:
  std::string text_;
};

class SmallRun {
 public:
  std::filesystem::path path() const { return dir_ / "run"; }
  std::filesystem::path root() const { return dir_.path(); }

  config::Config config(const std::vector<std::string>& overrides = {}) const {
    std::vector<std::string> all = {"run.dir=" + path().string()};
    all.insert(all.end(), overrides.begin(), overrides.end());
    return config::load_config_text(R"(
model: {name: mlp, num_classes: 4, options: {hidden: "8"}}
data: {type: synthetic, synthetic_train: 20, synthetic_val: 12, image_size: 4, color: gray, workers: 0, mean: [0.4], std: [0.3]}
optim: {lr: 0.05}
train: {epochs: 3, batch_size: 4, threads: 1, device: cpu, memory_format: contiguous}
run: {progress: off, tensorboard: false, log_every: 2, keep: 0}
)",
                                    "small.yaml", all);
  }

  train::RunResult start(const std::vector<std::string>& overrides = {}) const {
    return train::run_training(config(overrides), "test");
  }
  train::RunResult resume(std::vector<std::string> overrides = {}) const {
    overrides.emplace_back("run.resume=auto");
    return start(overrides);
  }

  /// Every file of the run by name, and where links point.
  std::map<std::string, std::string> files() const {
    std::map<std::string, std::string> result;
    for (const auto& entry : std::filesystem::recursive_directory_iterator(path())) {
      const std::string name = entry.path().lexically_relative(path()).string();
      if (entry.is_symlink()) {
        result[name] = "-> " + std::filesystem::read_symlink(entry.path()).string();
      } else {
        result[name] = entry.is_regular_file() && name != ".lock" ? read_file(entry.path()) : "";
      }
    }
    return result;
  }
  std::string model() const { return read_file(path() / "checkpoints" / "last" / "model.safetensors"); }

 private:
  TempDir dir_;
};

}  // namespace cohort::test
