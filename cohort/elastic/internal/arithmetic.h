#pragma once

#include <string>

namespace cohort::elastic {

/// What decides, beside the numbers, which bits an operator has: it adds in the order of its threads and
/// vectors.
struct Arithmetic {
  int threads = 1;
  std::string instructions;  ///< as at::get_cpu_capability() names them

  /// Of the calling thread.
  static Arithmetic of_thread();
  std::string to_text() const;
  /// Throws: CommError.
  static Arithmetic parse(const std::string& text);

  bool operator==(const Arithmetic&) const = default;
};

/// The calling thread computes as `process`, "process 3", from here on: with as many threads, which it logs.
/// Throws: UsageError where its processor has other instructions.
void compute_as(const Arithmetic& other, const std::string& process);

}  // namespace cohort::elastic
