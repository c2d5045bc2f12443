#pragma once

#include <optional>
#include <span>
#include <string>
#include <string_view>

/// "Did you mean": the nearest of the names that exist, for messages about one that does not.
namespace cohort::base {

/// Returns the number of letters to insert, remove, replace or swap with a neighbour to turn `a` into `b`,
/// upper and lower case being the same.
std::size_t edit_distance(std::string_view a, std::string_view b);

/// Returns the name that takes the fewest changes, the first of equals. There must be a name.
const std::string& least_changed_name(std::string_view name, std::span<const std::string> names);

/// Returns the nearest name, or nothing when there is none or none is near enough to be what was meant (more
/// than a third of the letters differ).
std::optional<std::string> nearest_name(std::string_view name, std::span<const std::string> names);

}  // namespace cohort::base
