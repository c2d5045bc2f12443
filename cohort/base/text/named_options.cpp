// Each look for a name notes the name, whether the option is there or not. So the names that were asked for
// are all that the reader knows, and reject_unread() needs no list of them. Always: the notes are under a
// mutex, and a name once noted stays, so readers on several threads add up.
#include "cohort/base/text/named_options.h"

#include <algorithm>
#include <array>
#include <charconv>
#include <cmath>
#include <mutex>
#include <set>
#include <vector>

#include "cohort/base/error.h"
#include "cohort/base/text/format_list.h"
#include "cohort/base/text/nearest_name.h"

namespace cohort::base {

struct NamedOptions::Asked {
  std::mutex mutex;
  std::set<std::string> names;
  bool all = false;
};

NamedOptions::NamedOptions(Map values) : values_(std::move(values)), asked_(std::make_shared<Asked>()) {}

void NamedOptions::fail(const std::string& name, std::string_view expected) const {
  throw ConfigError(where_,
                    concat(owner_, ": option ", name, " is '", values_.at(name), "', expected ", expected));
}

NamedOptions::Map::const_iterator NamedOptions::find(const std::string& name) const {
  const std::lock_guard lock(asked_->mutex);
  asked_->names.insert(name);
  return values_.find(name);
}

NamedOptions::Map::const_iterator NamedOptions::begin() const {
  const std::lock_guard lock(asked_->mutex);
  // Whoever walks over all options has read each of them.
  asked_->all = true;
  return values_.begin();
}

std::string& NamedOptions::operator[](const std::string& name) {
  const std::lock_guard lock(asked_->mutex);
  asked_->names.insert(name);
  return values_[name];
}

const std::string& NamedOptions::at(const std::string& name) const {
  if (const auto found = find(name); found != end()) return found->second;
  std::vector<std::string> given;
  for (const auto& [other, value] : values_) given.push_back(other);
  const auto near = nearest_name(name, given);
  throw ConfigError(where_, concat(owner_, " needs option ", name),
                    near ? concat(name, " instead of ", *near) : "");
}

std::string NamedOptions::text(const std::string& name, std::string_view fallback) const {
  const auto found = find(name);
  return found == end() ? std::string(fallback) : found->second;
}

std::int64_t NamedOptions::integer(const std::string& name, std::int64_t fallback, std::int64_t least,
                                   std::int64_t most) const {
  const auto found = find(name);
  if (found == end()) return fallback;
  const std::string& text = found->second;
  std::int64_t value = 0;
  const auto [rest, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || rest != text.data() + text.size()) fail(name, "a whole number");
  if (value < least || value > most) {
    fail(name, most == std::numeric_limits<std::int64_t>::max() ? concat("at least ", least)
                                                                : concat(least, " to ", most));
  }
  return value;
}

double NamedOptions::number(const std::string& name, double fallback) const {
  const auto found = find(name);
  if (found == end()) return fallback;
  const std::string& text = found->second;
  double value = 0;
  // from_chars() also reads "nan" and "inf", which no option means.
  const auto [rest, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || rest != text.data() + text.size() || !std::isfinite(value))
    fail(name, "a number");
  return value;
}

bool NamedOptions::flag(const std::string& name, bool fallback) const {
  constexpr std::array<std::string_view, 4> kTrue = {"true", "yes", "on", "1"},
                                            kFalse = {"false", "no", "off", "0"};
  const auto found = find(name);
  if (found == end()) return fallback;
  if (std::ranges::find(kTrue, found->second) != kTrue.end()) return true;
  if (std::ranges::find(kFalse, found->second) == kFalse.end()) fail(name, "true or false");
  return false;
}

NamedOptions NamedOptions::handed_to(std::string where, std::string owner) const {
  // With notes of its own: what the one owner asks for, the other does not know.
  NamedOptions fresh(values_);
  fresh.where_ = std::move(where);
  fresh.owner_ = std::move(owner);
  return fresh;
}

void NamedOptions::reject_unread(std::initializer_list<std::string_view> ignored) const {
  const std::lock_guard lock(asked_->mutex);
  if (asked_->all) return;
  std::vector<std::string> known;
  // What was asked for, and is not another's, is what a hint may offer.
  for (const std::string& name : asked_->names) {
    if (std::ranges::find(ignored, name) == ignored.end()) known.push_back(name);
  }
  for (const auto& [name, value] : values_) {
    if (asked_->names.contains(name) || std::ranges::find(ignored, name) != ignored.end()) continue;
    const auto near = nearest_name(name, known);
    throw ConfigError(
        where_, concat(owner_, " has no option ", name),
        known.empty() ? "leaving it out" : concat(near ? *near + "; " : "", "its options are ", join(known)));
  }
}

}  // namespace cohort::base
