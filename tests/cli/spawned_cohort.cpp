// The program `cohort`, on two ranks that spawn() starts.
#include <cstdio>
#include <exception>
#include <stdexcept>

#include "cohort/cli/cli.h"
#include "cohort/launch/spawn.h"

int main(int argc, char** argv) {
  try {
    cohort::launch::spawn(
        [&](int) {
          if (cohort::cli::run(argc, argv) != 0) throw std::runtime_error("cohort failed");
        },
        2);
    return 0;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
  }
}
