// Recovery: each process says how many steps it has committed. The highest number wins, M, and the first process that has it
// sends its state to those that have not. Then all make step M, though some process may have committed it in a
// generation before and died: made again, it has the same bits.
//
// A process changes its state once it has all slices of the sum, and asks nobody. No process can have all slices unless all
// processes of the generation have computed the step, so none is two steps ahead of another one, and nothing is committed in a
// generation which a process has left for the next one, but the step that was under way.
//
// A planned change waits for the step that is under way. A process learns by the other's hello that this step will not be
// finished: the other one has entered the next generation without it.
#include "cohort/membership/step_protocol.h"

#include <algorithm>
#include <utility>

namespace cohort::membership {

void StepProtocol::announce(const Generation& generation, std::optional<int> process) {
  const std::uint64_t newest = next_ ? next_->generation.number : generation_.number;
  if (generation.number < newest || (generation.number == newest && process.has_value())) return;
  const bool was_finishing = next_ ? next_->may_finish_step : true;
  const bool is_next = generation.number <= newest + 1;
  next_ = Next{generation, process,
               is_in_ && generation.is_planned && is_next && was_finishing && !has_lost_link_};
  const bool is_in_step = phase_ == Phase::kComputing || phase_ == Phase::kExchanging;
  if (phase_ == Phase::kApplying || (is_in_step && next_->may_finish_step)) {
    // Others may have entered before this process heard of it.
    const std::vector<StepMessage> early = std::exchange(early_, {});
    for (const StepMessage& message : early) on_message(message);
    return;
  }
  enter_next();
}

void StepProtocol::enter_next() {
  const Next next = *std::exchange(next_, std::nullopt);
  if (is_in_ && !next.process) send_to_all(StepMessage::Type::kGoodbye, committed_, "");
  generation_ = next.generation;
  is_in_ = next.process.has_value();
  hellos_.clear();
  covers_.clear();
  sums_.clear();
  has_added_ = has_lost_link_ = false;
  if (!is_in_) {
    phase_ = Phase::kIdle;
    host_.on_left();
    return;
  }
  process_ = *next.process;
  phase_ = Phase::kRecovering;
  host_.on_entered(generation_);
  hellos_[process_] = committed_;
  send_to_all(StepMessage::Type::kHello, committed_, "");
  const std::vector<StepMessage> early = std::exchange(early_, {});
  for (const StepMessage& message : early) on_message(message);
  if (phase_ == Phase::kRecovering) recover();
}

StepMessage StepProtocol::message_of(StepMessage::Type type, std::uint64_t step, std::string payload) const {
  return {type, generation_.number, process_, step, std::move(payload)};
}

void StepProtocol::send_to_all(StepMessage::Type type, std::uint64_t step, const std::string& payload) {
  for (int process = 0; process < size(); ++process) {
    if (process != process_) host_.send(process, message_of(type, step, payload));
  }
}

void StepProtocol::on_message(StepMessage message) {
  using Type = StepMessage::Type;
  const std::uint64_t current = generation_.number;
  if (message.generation < current || (message.generation == current && !is_in_)) return;
  if (message.generation > current) {
    const bool ends_step = next_ && next_->generation.number == message.generation &&
                           message.type == Type::kHello && message.step <= committed_ &&
                           phase_ != Phase::kApplying;
    early_.push_back(std::move(message));
    if (ends_step) enter_next();
    return;
  }
  switch (message.type) {
    case Type::kHello:
      hellos_[message.from] = message.step;
      recover();
      break;
    case Type::kState:
      if (phase_ != Phase::kRecovering) break;
      host_.copy_state(message.payload, message.step);
      committed_ = message.step;
      begin_step();
      break;
    case Type::kCover:
      covers_[message.step][message.from] = std::move(message.payload);
      exchange();
      break;
    case Type::kSum:
      sums_[message.step][message.from] = std::move(message.payload);
      exchange();
      break;
    case Type::kGoodbye:
      // All that it sent has come. The step under way can be finished if the sender has finished it.
      has_lost_link_ = true;
      if (message.step <= committed_) on_link_lost();
      break;
  }
}

void StepProtocol::recover() {
  if (phase_ != Phase::kRecovering || hellos_.size() < static_cast<std::size_t>(size())) return;
  std::uint64_t newest = 0;
  for (const auto& [process, steps] : hellos_) newest = std::max(newest, steps);
  if (newest + 1 < generation_.committed_steps) {
    phase_ = Phase::kIdle;
    host_.on_state_lost();
    return;
  }
  if (committed_ < newest) return;  // waits for the state
  const auto source =
      std::find_if(hellos_.begin(), hellos_.end(), [&](const auto& hello) { return hello.second == newest; });
  if (source->first == process_) {
    for (const auto& [process, steps] : hellos_) {
      if (steps < newest) host_.send(process, message_of(StepMessage::Type::kState, newest, host_.state()));
    }
  }
  begin_step();
}

void StepProtocol::begin_step() {
  phase_ = Phase::kComputing;
  has_added_ = false;
  host_.compute(committed_);
}

void StepProtocol::on_computed(std::uint64_t generation, std::uint64_t step) {
  if (phase_ != Phase::kComputing || generation != generation_.number || step != committed_) return;
  phase_ = Phase::kExchanging;
  for (int process = 0; process < size(); ++process) {
    std::string cover = host_.cover(step, process);
    if (process == process_) {
      covers_[step][process_] = std::move(cover);
    } else {
      host_.send(process, message_of(StepMessage::Type::kCover, step, std::move(cover)));
    }
  }
  exchange();
}

void StepProtocol::exchange() {
  if (phase_ != Phase::kExchanging) return;
  const auto num_processes = static_cast<std::size_t>(size());
  const std::uint64_t step = committed_;
  const auto values = [](const std::map<int, std::string>& parts) {
    std::vector<std::string> list;
    for (const auto& [process, part] : parts) list.push_back(part);
    return list;
  };
  if (!has_added_ && covers_[step].size() == num_processes) {
    has_added_ = true;
    const std::string sum = host_.add(step, values(covers_[step]));
    sums_[step][process_] = sum;
    send_to_all(StepMessage::Type::kSum, step, sum);
  }
  if (sums_[step].size() < num_processes) return;
  phase_ = Phase::kApplying;
  host_.apply(step, values(sums_[step]));
}

void StepProtocol::on_applied() {
  if (phase_ != Phase::kApplying) return;
  covers_.erase(committed_);
  sums_.erase(committed_);
  ++committed_;
  phase_ = Phase::kRecovering;  // until the next step begins
  if (next_) return enter_next();
  begin_step();
}

void StepProtocol::on_link_lost() {
  has_lost_link_ = true;
  if (next_ && phase_ != Phase::kApplying) enter_next();
}

}  // namespace cohort::membership
