#pragma once

#include <optional>
#include <string>

/// Names of files and folders that are not complete yet: `.NAME.cohort-HOST-NAMESPACE-PID-START`, where the
/// namespace is that of process ids and of this boot. No LibTorch.
namespace cohort::checkpoint {

/// A name that belongs to this process alone, for a file or folder that becomes `name` when it is complete.
std::string temporary_name(const std::string& name);

/// Whether the process that made a name still runs. Of one on another host, or in another container, nothing
/// is known.
enum class Owner { kRuns, kEnded, kUnknown };

/// Parts of a temporary name.
struct TemporaryName {
  std::string name;  ///< what it was to become
  Owner owner = Owner::kUnknown;
};

/// Reads a temporary name; returns nothing if `file_name` is not one.
std::optional<TemporaryName> parse_temporary_name(const std::string& file_name);

}  // namespace cohort::checkpoint
