#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

/// Typed reads of environment variables, and the list of those that Cohort itself reads.
///
///     const int world = base::env_int("WORLD_SIZE", 1, 1 << 20).value_or(1);
///
/// A variable that is unset or empty is absent. One that is set but is not what was asked for is an error
/// that names the variable and its value, never a silent default. Threads: any, as long as nobody calls
/// setenv() meanwhile.
namespace cohort::base {

/// Returns the value, or nothing when the variable is unset or empty.
std::optional<std::string> env_string(const std::string& name);

/// Returns a whole number within [low, high]. Throws: ConfigError.
std::optional<std::int64_t> env_int(const std::string& name, std::int64_t low = INT64_MIN,
                                    std::int64_t high = INT64_MAX);

/// Returns a finite number. Throws: ConfigError.
std::optional<double> env_double(const std::string& name);

/// Returns true for 1, true, yes, on and false for 0, false, no, off, in any case. Throws: ConfigError.
std::optional<bool> env_bool(const std::string& name);

/// Returns one of `choices`, as it is written there. Throws: ConfigError, listing them.
std::optional<std::string> env_choice(const std::string& name, std::span<const std::string> choices);

/// A variable that Cohort reads.
struct EnvVariable {
  std::string name;     ///< with its prefix: COHORT_LOG
  std::string meaning;  ///< what it sets, and its default: for a table that a person reads
};

/// Returns every variable whose name starts with COHORT_ that some part of Cohort reads, sorted by name.
std::span<const EnvVariable> cohort_variables();

/// Returns a sentence for each variable in the environment that starts with COHORT_ and that nothing reads,
/// naming the nearest that is: a misspelt variable is otherwise ignored without a word. The program logs
/// them.
std::vector<std::string> unknown_cohort_variables();

}  // namespace cohort::base
