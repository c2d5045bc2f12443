#include "cohort/membership/internal/agent_views.h"

#include <algorithm>
#include <iterator>
#include <set>
#include <string_view>
#include <utility>
#include <vector>

#include "cohort/membership/internal/lost_state.h"

namespace cohort::membership {
namespace {

enum class PlaceKind : std::uint8_t { kWaiting, kWaitingHolder, kSpare };
using Place = std::pair<std::string_view, PlaceKind>;  // by incarnation

std::set<Place> places_of(const RendezvousRecord& record) {
  std::set<Place> places;
  for (const MemberInfo& agent : record.waiting) {
    places.emplace(agent.incarnation,
                   is_in(record.holders, agent.id) ? PlaceKind::kWaitingHolder : PlaceKind::kWaiting);
  }
  for (const MemberInfo& agent : record.spares) places.emplace(agent.incarnation, PlaceKind::kSpare);
  return places;
}

}  // namespace

void note_places(AgentViews& views, const RendezvousRecord& before, const RendezvousRecord& next,
                 std::uint64_t revision) {
  std::vector<Place> changed;
  std::ranges::set_symmetric_difference(places_of(before), places_of(next), std::back_inserter(changed));
  for (const auto& place : changed) {
    const auto view = views.find(std::string(place.first));
    if (view != views.end()) view->second.place_revision = revision;
  }
}

void note_deaths(AgentViews& views, const RendezvousRecord& record, const HeardAgents& heard) {
  for (const auto* const list : {&record.generation.members, &record.waiting, &record.spares}) {
    for (const MemberInfo& agent : *list) {
      if (!heard.is_dead(agent.incarnation)) continue;
      AgentView& view = views[agent.incarnation];
      view.address = agent.address;
      view.last_heard = std::max(view.last_heard, heard.last_heard(agent.incarnation));
      view.is_dead = true;
    }
  }
}

}  // namespace cohort::membership
