// `cohort new ...` and nothing else of the program: it builds without LibTorch, so that what it writes can be
// compiled early in a build.
#include <exception>
#include <iostream>

#include "cohort/cli/internal/commands.h"

int main(int argc, char** argv) {
  CLI::App app;
  cohort::cli::Context context;
  cohort::cli::add_new(app, context);
  try {
    app.parse(argc, argv);
    return context.action();
  } catch (const std::exception& error) {
    std::cerr << error.what() << "\n";
    return 2;
  }
}
