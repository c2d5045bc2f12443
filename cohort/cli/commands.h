#pragma once

#include <CLI/CLI.hpp>
#include <functional>
#include <string>

/// One function per command: adds it to `app` and sets `action` when it was chosen. An action returns the
/// exit status.
namespace cohort::cli {

struct Context {
  std::string program;  ///< as it was called
  std::string command_line;
  std::function<int()> action;
};

void add_train(CLI::App& app, Context& context);
void add_eval(CLI::App& app, Context& context);
void add_data(CLI::App& app, Context& context);
void add_summary(CLI::App& app, Context& context);
void add_doctor(CLI::App& app, Context& context);

}  // namespace cohort::cli
