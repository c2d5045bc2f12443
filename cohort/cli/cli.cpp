#include "cohort/cli/cli.h"

#include <algorithm>
#include <cstdio>
#include <exception>

#include "cohort/base/env.h"
#include "cohort/base/error.h"
#include "cohort/base/exception_text.h"
#include "cohort/base/log.h"
#include "cohort/base/text/format_list.h"
#include "cohort/base/version.h"
#include "cohort/cli/internal/commands.h"
#include "cohort/launch/error_file.h"
#include "cohort/memory/allocator.h"

namespace cohort::cli {
namespace {

std::string join(int argc, char** argv) {
  return base::join(std::vector<std::string>(argv, argv + argc), " ");
}

}  // namespace

int run(int argc, char** argv) {
  // Before the first large allocation: memory that malloc holds already keeps its old place.
  memory::tune_allocator();
  CLI::App app{"Cohort: training that scales, in C++ on LibTorch.", "cohort"};
  app.set_version_flag("--version", base::concat("cohort ", base::version()));
  app.require_subcommand(1);
  app.footer(
      "Begin with:  cohort train --config configs/fashion-vgg.yaml --fast-dev-run\n"
      "What this machine can do:  cohort doctor");
  // Callbacks of commands keep a reference to it, and run inside parse(); it outlives both.
  Context context;
  context.program = argc > 0 ? argv[0] : "cohort";
  context.command_line = join(argc, argv);
  add_train(app, context);
  add_run(app, context);
  add_eval(app, context);
  add_predict(app, context);
  add_export(app, context);
  add_data(app, context);
  add_summary(app, context);
  add_pipeline(app, context);
  add_plan(app, context);
  add_bench(app, context);
  add_new(app, context);
  add_doctor(app, context);
  try {
    std::vector<std::string> words(argv + std::min(argc, 1), argv + argc);
    // CLI11 would take the options of the user's program for its own, so that program's words go first.
    context.rest = take_program(words);
    std::reverse(words.begin(), words.end());  // as CLI11 takes them
    app.parse(words);
    // After parsing, so that --help prints no warnings.
    for (const std::string& warning : base::unknown_cohort_variables()) base::log_warning(warning);
    return context.action ? context.action() : 0;
  } catch (const CLI::ParseError& error) {
    // --help and --version are ParseErrors as well, of exit code 0. Status 2 says the user's mistake, as for
    // a shell.
    return app.exit(error) == 0 ? 0 : 2;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "cohort: %s\n", base::message_of(error).c_str());
    // The launcher shows this message; without it the user would see only which rank ended.
    launch::record_error(base::message_of(error));
    return base::is_users_fault(error) ? 2 : 1;
  }
}

}  // namespace cohort::cli
