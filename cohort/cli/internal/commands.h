#pragma once

#include <CLI/CLI.hpp>
#include <functional>
#include <string>
#include <vector>

#include "cohort/launch/run_options.h"

/// One function per command: adds it to `app` and sets `action` when it was chosen. An action returns the
/// exit status.
namespace cohort::cli {

struct Context {
  std::string program;  ///< as it was called
  std::string command_line;
  std::vector<std::string> rest;  ///< of `cohort run`: the program and its arguments
  std::function<int()> action;
};

/// Makes an option take one value each time, and be given any number of times.
inline CLI::Option* repeatable(CLI::Option* option, const std::string& value_name) {
  return option->expected(1)
      ->allow_extra_args(false)
      ->take_all()
      ->type_name(value_name)
      ->description(option->get_description() + "; may be given several times");
}

void add_train(CLI::App& app, Context& context);
/// Cuts the program off `words`, which begin with `run`, and returns it: what stands after `--`, or from the
/// first word on that is no option. Throws: UsageError for an option that is not known.
std::vector<std::string> take_program(std::vector<std::string>& words);
void add_run(CLI::App& app, Context& context);
/// Runs a job as the program `cohort` does: on a process whose children are all its own. Returns the exit
/// status.
int start_job(launch::RunOptions options);
/// Returns how many GPUs this process sees.
int num_gpus();
void add_eval(CLI::App& app, Context& context);
void add_predict(CLI::App& app, Context& context);
void add_export(CLI::App& app, Context& context);
void add_data(CLI::App& app, Context& context);
void add_summary(CLI::App& app, Context& context);
void add_new(CLI::App& app, Context& context);
void add_pipeline(CLI::App& app, Context& context);
void add_bench(CLI::App& app, Context& context);
void add_plan(CLI::App& app, Context& context);
void add_doctor(CLI::App& app, Context& context);

}  // namespace cohort::cli
