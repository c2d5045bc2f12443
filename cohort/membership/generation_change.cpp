// A planned change waits for the step that is under way, as all its processes are there, also those that
// leave. A process learns by another one's hello or goodbye that the step will not be finished: the other one
// was in this generation, and has entered the next one without the step. A process that is new to the run
// says hello too, and means nothing by it. One that leaves gets no hello, so whoever enters says goodbye
// first.
#include "cohort/membership/generation_change.h"

#include <algorithm>

namespace cohort::membership {
namespace {

const MemberInfo* member_of(const Generation& generation, int process) {
  for (const MemberInfo& member : generation.members) {
    if (process < member.num_processes) return process < 0 ? nullptr : &member;
    process -= member.num_processes;
  }
  return nullptr;
}

}  // namespace

bool GenerationChange::announce(const Generation& generation, std::optional<int> process) {
  if (generation.number < newest() || (generation.number == newest() && process.has_value())) return false;
  const bool knows_to_be_out = !(next_ ? next_->process : process_).has_value();
  if (generation.number == newest() && knows_to_be_out) return false;
  const bool was_finishing = next_ ? next_->may_finish_step : true;
  const bool is_next = generation.number <= newest() + 1;
  // One that leaves has no process in the generation without it. One that has none in a generation that it
  // knows was given up.
  const bool is_planned = generation.is_planned && (process.has_value() || generation.number > newest());
  const bool may_finish = is_planned && is_next && was_finishing && !has_lost_link_;
  next_ = Next{generation, process, may_finish};
  return true;
}

void GenerationChange::on_hello(std::uint64_t generation, int from, std::uint64_t steps) {
  if (generation > generation_.number) hellos_[{generation, from}] = steps;
}

void GenerationChange::on_goodbye(int from, std::uint64_t steps) {
  goodbyes_[from] = steps;
}

void GenerationChange::on_link_lost(std::optional<int> process) {
  // Of one that has said goodbye all has come.
  if (!process || !goodbyes_.contains(*process)) has_lost_link_ = true;
}

bool GenerationChange::was_here(int process_of_next) const {
  const MemberInfo* const member = member_of(next_->generation, process_of_next);
  if (member == nullptr) return false;
  const MemberInfo* const here = generation_.find(member->id);
  return here != nullptr && here->incarnation == member->incarnation;
}

bool GenerationChange::drops_step(std::uint64_t committed) const {
  if (!next_) return false;
  if (!next_->may_finish_step || has_lost_link_) return true;
  for (const auto& [from, steps] : goodbyes_) {
    if (steps <= committed) return true;
  }
  return std::ranges::any_of(hellos_, [&](const auto& hello) {
    const auto& [generation, from] = hello.first;
    return generation == next_->generation.number && hello.second <= committed && was_here(from);
  });
}

void GenerationChange::enter() {
  generation_ = std::move(next_->generation);
  process_ = next_->process;
  next_.reset();
  has_lost_link_ = false;
  goodbyes_.clear();
  std::erase_if(hellos_, [&](const auto& hello) { return hello.first.first <= generation_.number; });
}

std::vector<int> Recovery::missing() const {
  std::vector<int> processes;
  for (int process = 0; process < num_processes_; ++process) {
    if (!hellos_.contains(process)) processes.push_back(process);
  }
  return processes;
}

std::uint64_t Recovery::newest() const {
  std::uint64_t newest = 0;
  for (const auto& [process, steps] : hellos_) newest = std::max(newest, steps.value_or(0));
  return newest;
}

bool Recovery::is_state_lost() const {
  const bool has_any =
      std::ranges::any_of(hellos_, [](const auto& hello) { return hello.second.has_value(); });
  return !has_any || newest() + 1 < committed_steps_;
}

bool Recovery::has_newest(int process) const {
  const auto found = hellos_.find(process);
  return found != hellos_.end() && found->second && *found->second == newest();
}

std::vector<int> Recovery::list(bool has_state) const {
  std::vector<int> processes;
  for (const auto& [process, steps] : hellos_) {
    if (has_newest(process) == has_state) processes.push_back(process);
  }
  return processes;
}

}  // namespace cohort::membership
