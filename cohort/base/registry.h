#pragma once

#include <map>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "cohort/base/error.h"
#include "cohort/base/text/format_list.h"
#include "cohort/base/text/nearest_name.h"

namespace cohort::base {

/// Which names of a registry are listed.
enum class RegistryNames {
  kWithThing,  ///< those that get() takes
  kAll,        ///< also the reserved ones
};

/// Things by name: Cohort's own, those that a program adds, and those that a shared library adds while it
/// loads. Threads: any. Keep it for ever (`static auto* r = new Registry<...>`): libraries are unloaded in
/// any order at exit.
template <typename Thing>
class Registry {
 public:
  /// `kind` is what a thing is called in messages, "model"; `where` is the operation in them,
  /// "models.registry". `reserved`: names without a thing, which are taken. Who reads a name gives these a
  /// meaning, such as "auto".
  Registry(std::string kind, std::string where, std::map<std::string, Thing> built_in,
           const std::vector<std::string>& reserved = {})
      : kind_(std::move(kind)), where_(std::move(where)) {
    for (auto& [name, thing] : built_in) entries_[name] = {std::move(thing), "Cohort", ""};
    for (const std::string& name : reserved) entries_[name] = {Thing(), "Cohort", "", true};
  }

  /// Adds a thing; `by` says who does, for messages. Throws: UsageError if the name is taken or empty.
  void add(const std::string& name, Thing thing, const std::string& by) {
    if (name.empty()) throw UsageError(where_, concat("the name of the ", kind_, " is empty"));
    const std::lock_guard lock(mutex_);
    const auto [found, added] = entries_.try_emplace(name);
    if (!added) {
      throw UsageError(where_,
                       concat("the ", kind_, " '", name, "' is registered already, by ", found->second.by),
                       "another name");
    }
    found->second = {std::move(thing), by, ""};
  }

  /// The same while a library loads, when nothing can catch: a name that is taken stays with the first, and
  /// get() throws, naming both. Returns whether the name was free.
  bool add_at_load(const char* name, Thing thing, const char* file, int line) noexcept {
    const std::lock_guard lock(mutex_);
    const auto [found, added] = entries_.try_emplace(name);
    const std::string by = concat(file, ":", line);
    if (added) {
      found->second = {std::move(thing), by, ""};
    } else {
      found->second.conflict = by;
    }
    return added;
  }

  /// Throws: UsageError for an unknown name, naming the nearest and all, or for one that was registered
  /// twice. `listed`: the names in the message.
  Thing get(const std::string& name, RegistryNames listed = RegistryNames::kWithThing) const {
    check(name);
    if (std::optional<Thing> thing = find(name)) return *std::move(thing);
    const std::vector<std::string> known = names(listed);
    const auto near = nearest_name(name, known);
    throw UsageError(where_, concat("there is no ", kind_, " '", name, "'"),
                     concat(near ? *near + "; " : "", "the ", kind_, "s are ", join(known),
                            "; one of your own needs --load LIB.so"));
  }

  /// Returns the thing, or nothing for an unknown name.
  std::optional<Thing> find(const std::string& name) const {
    const std::lock_guard lock(mutex_);
    const auto found = entries_.find(name);
    const bool is_there = found != entries_.end() && !found->second.is_reserved;
    return is_there ? std::optional(found->second.thing) : std::nullopt;
  }

  /// Throws: UsageError if `name` was registered twice, or is reserved and was registered, naming who did.
  void check(const std::string& name) const {
    const std::lock_guard lock(mutex_);
    const auto found = entries_.find(name);
    if (found == entries_.end() || found->second.conflict.empty()) return;
    throw UsageError(where_,
                     concat("the ", kind_, " '", name, "' was registered twice: by ", found->second.by,
                            " and by ", found->second.conflict),
                     "another name for one of them");
  }

  /// The names, sorted.
  std::vector<std::string> names(RegistryNames listed = RegistryNames::kWithThing) const {
    const std::lock_guard lock(mutex_);
    std::vector<std::string> result;
    for (const auto& [name, entry] : entries_) {
      if (!entry.is_reserved || listed == RegistryNames::kAll) result.push_back(name);
    }
    return result;
  }

 private:
  struct Registration {
    Thing thing;
    std::string by;
    std::string conflict;      // who registered the name again
    bool is_reserved = false;  // without a thing
  };

  std::string kind_;
  std::string where_;
  mutable std::mutex mutex_;
  std::map<std::string, Registration> entries_;
};

}  // namespace cohort::base

#define COHORT_JOIN_(a, b) a##b
#define COHORT_JOIN(a, b) COHORT_JOIN_(a, b)
/// Calls `cohort::function(name, thing, file, line)` while a program or a library loads, at namespace scope.
/// A library must not be unloaded while what it registered is known.
#define COHORT_REGISTER_AT_LOAD(function, name, ...)                                \
  [[maybe_unused]] static const bool COHORT_JOIN(cohort_registered_, __COUNTER__) = \
      ::cohort::function(name, __VA_ARGS__, __FILE__, __LINE__)
