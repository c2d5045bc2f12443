#pragma once

#include <cstddef>
#include <string_view>

#include "cohort/base/error.h"
#include "cohort/base/text/format_list.h"

namespace cohort::base {

/// A name that a setting may have, and what the name stands for. A setting that others may add to has a
/// Registry instead.
template <typename Value>
struct Choice {
  const char* name;
  Value value;
};

/// Returns what `name` stands for; null: it is none of them.
template <typename Value, std::size_t kCount>
const Value* find_choice(std::string_view name, const Choice<Value> (&choices)[kCount]) {
  for (const Choice<Value>& choice : choices) {
    if (name == choice.name) return &choice.value;
  }
  return nullptr;
}

/// Returns what `name` stands for. `where` is the operation and `what` the setting, for the message.
///
///     constexpr base::Choice<int> kLevels[] = {{"low", 1}, {"high", 9}};
///     const int level = base::choose<ConfigError>("zip.open", "zip.level", "high", kLevels);
///
/// Throws: E for any other name, listing all.
template <typename E, typename Value, std::size_t kCount>
const Value& choose(std::string_view where, std::string_view what, std::string_view name,
                    const Choice<Value> (&choices)[kCount]) {
  if (const Value* const value = find_choice(name, choices)) return *value;
  TextList names;
  for (const Choice<Value>& choice : choices) names.add(choice.name);
  throw E(where, concat(what, ": got '", name, "', expected one of ", names.text()));
}

}  // namespace cohort::base
