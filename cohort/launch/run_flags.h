#pragma once

#include <span>
#include <string>

/// The flags of `cohort run`.
namespace cohort::launch {

/// A flag of `cohort run`, without its dashes; underscores are as good as dashes in it.
struct RunFlag {
  std::string name;     ///< as on the command line, with dashes between the words
  char letter = 0;      ///< the short form, or 0
  std::string value;    ///< what stands after it in the help; empty: a switch
  std::string meaning;  ///< for the help; empty: not shown, it is rejected
  std::string instead;  ///< why it is rejected, and what to use
};

/// Returns every flag that is read and every flag of torchrun's that is rejected.
std::span<const RunFlag> run_flags();

/// Returns the flag of that name, or nullptr.
const RunFlag* find_run_flag(const std::string& name);

}  // namespace cohort::launch
