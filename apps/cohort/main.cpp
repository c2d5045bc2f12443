#include "cohort/cli/cli.h"

int main(int argc, char** argv) {
  return cohort::cli::run(argc, argv);
}
