#pragma once

#include <gtest/gtest.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <string>
#include <vector>

#include "cohort/cli/internal/commands.h"

namespace cohort::test {

/// Runs `cohort NAME WORDS`, of which `add` is known alone, without the rest of the program; returns what it
/// printed. Throws what the command throws.
inline std::string run_command(void (*add)(CLI::App&, cli::Context&), const std::string& name,
                               std::vector<std::string> words) {
  CLI::App app;
  cli::Context context;
  add(app, context);
  words.insert(words.begin(), name);
  std::reverse(words.begin(), words.end());  // as CLI11 takes them
  app.parse(words);
  testing::internal::CaptureStdout();
  try {
    EXPECT_EQ(context.action(), 0);
  } catch (...) {
    testing::internal::GetCapturedStdout();
    throw;
  }
  return testing::internal::GetCapturedStdout();
}

}  // namespace cohort::test
