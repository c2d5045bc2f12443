// The regions of fake agents. A commit word can be read while its process lives, so the agents know who has
// the state: where no process has it that is ready, a dead one's region goes to another process, which is
// waited for.
#include <algorithm>

#include "cohort/base/error.h"
#include "cohort/base/files/memory_file.h"
#include "cohort/elastic/internal/region_file.h"
#include "fake_agents.h"

namespace cohort::test {

using base::concat;
using std::chrono::milliseconds;

void FakeAgents::give_region(Child& child, Child* before) {
  child.region = before == nullptr ? base::make_memory_file("region of a test") : std::move(before->region);
  if (before != nullptr) {
    ++counts.heirs;
    const elastic::CommitWord word = elastic::read_commit_word(child.region);
    child.has_inherited = word.phase == elastic::CommitWord::Phase::kCommitted && word.steps > 0;
    tell(concat("process ", child.pid, " gets the region of process ", before->pid));
  }
  try {
    child.link.send_file(child.region, base::Deadline(milliseconds(0)));
    send_order(child);          // with which the child takes it
  } catch (const CommError&) {  // it has died
  }
}

// Mostly at a point where the region has the state.
bool FakeAgents::may_lose_last(const Child& child) {
  if (!options_.loses_last || !child.is_member) return false;
  const elastic::CommitWord word = elastic::read_commit_word(child.region);
  return word.phase == elastic::CommitWord::Phase::kCommitted || pick(8) == 0;
}

// By its region, whether it lives or not.
bool FakeAgents::holds_state(const Child& child) const {
  const elastic::CommitWord word = elastic::read_commit_word(child.region);
  return word.phase == elastic::CommitWord::Phase::kCommitted && word.steps + 1 >= committed_;
}

// Processes get the regions of dead ones that have the state. Returns whether there are any.
bool FakeAgents::find_heirs() {
  bool has_any = false;
  for (std::size_t i = 0; i < children_.size(); ++i) {
    Child& dead = *children_[i];
    if (!dead.has_ended || !holds_state(dead)) continue;
    has_any = true;
    Child* heir = nullptr;
    for (Child* const child : living()) {
      const bool is_unused = !child->region.is_open() && child->status.entered == 0 && !child->is_killed;
      if (is_unused && !child->is_member && pick(2) == 0) heir = child;
    }
    if (heir == nullptr) heir = &start();
    give_region(*heir, &dead);
  }
  return has_any;
}

// Whether one of those that are ready has the state. Else, where a dead one has left it, another one gets it,
// and is waited for.
bool FakeAgents::is_state_there(const std::vector<Child*>& ready) {
  if (std::ranges::any_of(ready, [&](const Child* child) { return holds_state(*child); })) return true;
  const auto list = living();
  const auto will_be_ready = [&](const Child* child) { return !child->is_killed && holds_state(*child); };
  if (std::ranges::any_of(list, will_be_ready)) return false;
  if (find_heirs()) return false;
  // One that changes its state has it soon, unless it is killed, or copies it from one that is.
  const bool is_unsure = std::ranges::any_of(ready, [](const Child* child) {
    return elastic::read_commit_word(child->region).phase == elastic::CommitWord::Phase::kChanging;
  });
  const bool may_come =
      std::ranges::any_of(list, [](const Child* child) { return child->is_killed || child->is_stopped; });
  if (!is_unsure && !may_come) failure_ = kStateLost;
  return is_unsure;
}

std::string FakeAgents::find_forgotten() const {
  std::string found;
  for (const auto& child : children_) {
    if (!child->has_inherited || child->status.entered == 0) continue;
    if (output_of(*child).find("steps of the process before it") == std::string::npos) {
      found += concat("process ", child->pid, " has forgotten what lay in its region; ");
    }
  }
  return found;
}

}  // namespace cohort::test
