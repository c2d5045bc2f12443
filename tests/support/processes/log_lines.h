#pragma once

#include <cstddef>
#include <mutex>
#include <string>
#include <string_view>
#include <vector>

#include "cohort/base/log.h"
#include "tests/support/comes_true.h"

namespace cohort::test {

/// The lines that are logged while it lives.
class LogLines {
 public:
  LogLines() {
    base::set_log_sink([this](base::LogLevel, std::string_view line) {
      const std::lock_guard lock(mutex_);
      lines_.emplace_back(line);
    });
  }
  ~LogLines() { base::set_log_sink(nullptr); }
  std::size_t count(const std::string& part) const {
    const std::lock_guard lock(mutex_);
    std::size_t count = 0;
    for (const std::string& line : lines_) count += line.find(part) != std::string::npos ? 1 : 0;
    return count;
  }
  bool come_to_have(const std::string& part) const {
    return comes_true([&] { return count(part) > 0; });
  }
  std::string text() const {
    const std::lock_guard lock(mutex_);
    std::string text;
    for (const std::string& line : lines_) text += line + "\n";
    return text;
  }

 private:
  mutable std::mutex mutex_;
  std::vector<std::string> lines_;
};

}  // namespace cohort::test
