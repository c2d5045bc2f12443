#include "simulated_agent.h"

#include <algorithm>

#include "cohort/base/error.h"

namespace cohort::test {

using membership::Generation;
using membership::StepMessage;

namespace {

int slice_begin(int slice, int num_processes) {
  return slice * kElements / num_processes;
}

}  // namespace

void SimulatedRun::Process::send(int process, StepMessage message) {
  if (!run_.options_.has_faults) return;  // only the agents are looked at
  const std::shared_ptr<Agent> agent = agent_.lock();
  int first = 0;
  const membership::MemberInfo* receiver = nullptr;
  for (const membership::MemberInfo& member : generation_.members) {
    if (process < first + member.num_processes) {
      receiver = &member;
      break;
    }
    first += member.num_processes;
  }
  const auto index = static_cast<std::size_t>(process - first);
  const int host = std::stoi(receiver->address.substr(1));
  const std::string to = receiver->incarnation;
  // A stream for each generation: its links are new.
  const std::string stream =
      base::concat(agent->incarnation, '/', index_, '>', to, '/', index, '@', message.generation);
  const auto deliver = [&run = run_, to, index, message] {
    const std::size_t number = std::stoul(to);
    if (number < run.agents_.size()) run.deliver(run.agents_[number], index, message);
  };
  const membership::MemberId own_id = [&] {
    for (const membership::MemberInfo& member : generation_.members) {
      if (member.incarnation == agent->incarnation) return member.id;
    }
    return membership::MemberId{0};
  }();
  const auto lost = [&run = run_, from = agent->incarnation, own = index_, own_id, to, index,
                     other = receiver->id, generation = message.generation] {
    run.link_lost(from, own, other, generation);
    run.link_lost(to, index, own_id, generation);
  };
  run_.world_.carry(agent->host, host, stream, deliver, lost);
}

void SimulatedRun::deliver(const std::shared_ptr<Agent>& agent, std::size_t index,
                           const StepMessage& message) {
  if (!agent->is_alive || index >= agent->processes.size()) return;
  Process& target = *agent->processes[index];
  if (!target.is_alive) return;
  if (target.stopped_until > world_.now()) {
    return on_process(agent, target, target.stopped_until,
                      [this, agent, index, message] { deliver(agent, index, message); });
  }
  StepMessage changed = message;
  if (options_.planted == Planted::kMixedSteps)
    changed.generation = std::max<std::uint64_t>(1, target.steps.generation());
  const bool is_early = changed.generation > target.steps.generation();
  if (options_.planted == Planted::kNoEarlyMessages && is_early) return;
  target.steps.on_message(std::move(changed));
}

void SimulatedRun::Process::copy_state(const std::string& state, std::uint64_t steps) {
  ++run_.counts.copies;
  if (run_.options_.planted == Planted::kNoStateCopy) return;
  state_ = numbers_of(state.substr(0, 8)).at(0);
  sums_ = state.substr(8);
  if (state_ != run_.expected_state(steps))
    run_.world_.fail("a state was copied that is not the one after its steps");
}

bool SimulatedRun::Process::compute(std::uint64_t step) {
  const std::shared_ptr<Agent> agent = agent_.lock();
  recovered = generation_.number;
  run_.report(agent);
  if (number_ == 0 && step > 0 && run_.options_.planted != Planted::kLateLedger)
    run_.write_ledger(step - 1, sums_);
  // No member has more than this generation begins with.
  for (const membership::MemberInfo& member : generation_.members) {
    const Agent* const other = run_.agent_of(member.incarnation);
    if (other == nullptr || !other->is_alive) continue;
    for (const auto& process : other->processes) {
      if (process->steps.generation() == generation_.number && process->steps.committed_steps() > step + 1) {
        run_.world_.fail("a process makes a step that another one is two steps ahead of");
      }
    }
  }
  if (step >= run_.total_steps_) {
    is_finished = true;
    run_.report(agent);
    return false;
  }
  ++computing_;
  const auto done = [this, weak = agent_, generation = generation_.number, step, number = computing_] {
    const std::shared_ptr<Agent> here = weak.lock();
    if (here == nullptr || !here->is_alive || !is_alive || number != computing_) return;
    steps.on_computed(generation, step);
  };
  run_.on_process(agent, *this, run_.world_.now() + run_.world_.between(80, 400), done);
  return true;
}

std::string SimulatedRun::Process::cover(std::uint64_t step, int slice) {
  const membership::VirtualBlock block = generation_.block(number_);
  std::vector<std::uint64_t> parts;
  const int size = generation_.num_processes();
  for (int element = slice_begin(slice, size); element < slice_begin(slice + 1, size); ++element) {
    std::uint64_t sum = 0;
    for (int rank = block.first; rank < block.end; ++rank) sum += run_.leaf(step, rank, element);
    parts.push_back(sum);
  }
  return bytes_of(parts);
}

std::string SimulatedRun::Process::add(std::uint64_t, const std::vector<std::string>& covers) {
  std::vector<std::uint64_t> sums = numbers_of(covers.at(0));
  for (std::size_t i = 1; i < covers.size(); ++i) {
    const std::vector<std::uint64_t> more = numbers_of(covers[i]);
    for (std::size_t k = 0; k < std::min(sums.size(), more.size()); ++k) sums[k] += more[k];
  }
  return bytes_of(sums);
}

void SimulatedRun::Process::apply(std::uint64_t step, const std::vector<std::string>& sums) {
  const std::shared_ptr<Agent> agent = agent_.lock();
  std::string all;
  for (const std::string& slice : sums) all += slice;
  std::uint64_t next = mix(state_, step);
  for (const std::uint64_t element : numbers_of(all)) next = mix(next, element);
  state_ = next ^ 1;  // half changed
  const auto done = [this, weak = agent_, step, next, all, generation = generation_.number] {
    const std::shared_ptr<Agent> here = weak.lock();
    if (here == nullptr || !here->is_alive || !is_alive) return;
    state_ = next;
    sums_ = all;
    run_.check_commit(*this, generation, step, next);
    if (run_.options_.planted == Planted::kLateLedger && number_ == 0) run_.write_ledger(step, all);
    steps.on_applied();
    run_.report(here);
  };
  run_.on_process(agent, *this, run_.world_.now() + run_.world_.between(1, 30), done);
}

void SimulatedRun::Process::on_entered(const Generation& generation) {
  const std::shared_ptr<Agent> agent = agent_.lock();
  generation_ = generation;
  for (const membership::MemberInfo& member : generation.members) {
    if (member.incarnation == agent->incarnation) {
      number_ = generation.first_process(member.id) + static_cast<int>(index_);
    }
  }
  ++computing_;  // what was under way is over
  is_finished = false;
  lost_links.clear();
  run_.give_up_stopped_of(generation);
  run_.report(agent);
}

void SimulatedRun::Process::on_left() {
  ++computing_;
  const std::shared_ptr<Agent> agent = agent_.lock();
  if (agent != nullptr) run_.report(agent);
}

void SimulatedRun::Process::on_state_lost() {
  const std::shared_ptr<Agent> agent = agent_.lock();
  for (const membership::MemberInfo& member : generation_.members) {
    const Agent* const other = run_.agent_of(member.incarnation);
    if (other == nullptr || !other->is_alive) continue;
    for (const auto& process : other->processes) {
      if (process->is_alive && process->steps.generation() == generation_.number &&
          process->steps.committed_steps() + 1 >= generation_.committed_steps) {
        run_.world_.fail("a state is said to be lost that a process has");
      }
    }
  }
  agent->report.is_state_lost = true;
  run_.report(agent);
}

}  // namespace cohort::test
