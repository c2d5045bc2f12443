// points_launcher PROGRAM ARGUMENTS...: does what the program `cohort` does with these words. Where its agent
// reaches a point (cohort/base/internal/fault_points.h), the folder FOLDER says what becomes of it, for the
// host POINTS_HOST (tests/elastic/act_at_point.h).
#include <unistd.h>

#include <cstdlib>
#include <string>

#include "cohort/base/internal/fault_points.h"
#include "cohort/cli/cli.h"
#include "tests/elastic/act_at_point.h"

int main(int argc, char** argv) {
  const std::string folder = std::getenv("FOLDER"), host = std::getenv("POINTS_HOST");
  cohort::base::set_fault_hook(
      [&](const char* point) { cohort::test::act_at_point(folder, host, point, ::getpid()); });
  return cohort::cli::run(argc - 1, argv + 1);
}
