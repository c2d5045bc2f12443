#include "cohort/membership/internal/heard_agents.h"

#include <algorithm>

namespace cohort::membership {

void HeardAgents::on_message(const std::string& incarnation, Time now) {
  heard_[incarnation] = now;
  dead_.erase(incarnation);
  closed_since_.erase(incarnation);
}

Time HeardAgents::on_closed_port(const std::string& incarnation, Time now) {
  return closed_since_.emplace(incarnation, now).first->second;
}

void HeardAgents::listen_only_to(const std::set<std::string>& incarnations) {
  std::erase_if(listening_, [&](const auto& entry) { return !incarnations.contains(entry.first); });
}

bool HeardAgents::is_unheard(const std::string& incarnation, Time now) const {
  if (is_dead(incarnation)) return true;
  const auto since = listening_.find(incarnation);
  if (since == listening_.end()) return false;
  const auto heard = heard_.find(incarnation);
  const Time last = heard == heard_.end() ? since->second : std::max(since->second, heard->second);
  return now - last > silence_;
}

void HeardAgents::on_gap(Time now) {
  for (auto& [incarnation, since] : listening_) since = now;
  closed_since_.clear();
}

void HeardAgents::forget(Time now, const std::function<bool(const std::string& incarnation)>& has_place) {
  std::erase_if(heard_, [&](const auto& entry) { return now - entry.second > 100 * silence_; });
  std::erase_if(dead_, [&](const std::string& incarnation) { return !has_place(incarnation); });
}

}  // namespace cohort::membership
