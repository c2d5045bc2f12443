#pragma once

#include <torch/arg.h>

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

namespace torch::nn {
class Module;
}

namespace cohort::script {

/// How a function is scripted.
struct ScriptOptions {
  /// What explain() and the log call it.
  TORCH_ARG(std::string, name) = "function";
  /// How many programs are kept, one for each set of guards; calls under further ones run eagerly.
  TORCH_ARG(std::int64_t, max_programs) = 8;
  /// A program whose forward has fewer operators is not replayed: the function itself is as fast, and runs.
  TORCH_ARG(std::int64_t, min_operators) = 2;
  /// Compares the program with the function at calls 3, 4, 8, 16, 32 and so on, as verify_every does: two
  /// equal recordings prove that the function repeats, and not that its replay is right.
  TORCH_ARG(bool, verify) = true;
  /// Runs one call in N as the function does and compares it with the program: operators, and bit by bit
  /// results, what is written to, and gradients. Such a call returns what the function does. Where they
  /// differ the log says so and the program ends. 0: never.
  TORCH_ARG(std::int64_t, verify_every) = 0;
  /// Backward hands gradients on, to hooks and to a Reducer that sends them, whenever so many bytes of them
  /// are final; 0: all at its end.
  TORCH_ARG(std::int64_t, gradient_chunk_bytes) = std::int64_t{1} << 20;
  /// Says in the log, once for each set of guards, what was recorded or why calls run eagerly.
  TORCH_ARG(bool, log) = false;
  /// Modules that the function uses: their training flags and parameters become guards. A module that is
  /// scripted itself need not be named.
  TORCH_ARG(std::vector<std::shared_ptr<torch::nn::Module>>, modules) = {};
};

}  // namespace cohort::script
