#pragma once

#include <chrono>
#include <functional>
#include <map>
#include <set>
#include <string>

#include "cohort/membership/internal/observations.h"

namespace cohort::membership {

/// Which agents one agent hears, by incarnation. Threads: one at a time.
class HeardAgents {
 public:
  /// `silence`: how long one that is listened to may say nothing.
  explicit HeardAgents(std::chrono::milliseconds silence) : silence_(silence) {}

  void on_message(const std::string& incarnation, Time now);
  void on_death(const std::string& incarnation) { dead_.insert(incarnation); }
  bool is_dead(const std::string& incarnation) const { return dead_.contains(incarnation); }
  /// When it has said something last; Time() where it has not, or long ago.
  Time last_heard(const std::string& incarnation) const {
    const auto heard = heard_.find(incarnation);
    return heard == heard_.end() ? Time() : heard->second;
  }
  /// Its port is closed. Returns since when; a message of it ends that.
  Time on_closed_port(const std::string& incarnation, Time now);

  /// From now on, where it was not before, the agent owes a sign of life.
  void listen_to(const std::string& incarnation, Time now) { listening_.emplace(incarnation, now); }
  /// The others owe none any more.
  void listen_only_to(const std::set<std::string>& incarnations);
  /// Dead, or silent for too long since it owed a sign.
  bool is_unheard(const std::string& incarnation, Time now) const;

  /// This process itself was stopped: the others get all of `silence` again.
  void on_gap(Time now);
  /// Drops what is known of those that ended, or have said nothing for long.
  void forget(Time now, const std::function<bool(const std::string& incarnation)>& has_place);

 private:
  const std::chrono::milliseconds silence_;
  std::map<std::string, Time> heard_;
  std::map<std::string, Time> listening_;     // since when
  std::map<std::string, Time> closed_since_;  // of those that are not heard
  std::set<std::string> dead_;
};

}  // namespace cohort::membership
