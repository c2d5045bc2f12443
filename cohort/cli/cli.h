#pragma once

namespace cohort::cli {

/// The program `cohort`. Returns its exit status: 0, 2 for the user's input, 1 for the rest, 128 + N when
/// signal N asked to stop. Errors are one message on stderr.
int run(int argc, char** argv);

}  // namespace cohort::cli
