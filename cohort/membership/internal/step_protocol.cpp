// Recovery: each process says how many steps it has committed. The highest number wins, M, and the first
// process that has it sends its state to those that have not. Then all make step M, though some process may
// have committed it in a generation before and died: made again, it has the same bits.
//
// A process changes its state once it has all slices of the sum, and asks nobody. No process can have all
// slices unless all processes of the generation have computed the step, so none is two steps ahead of another
// one, and nothing is committed in a generation which a process has left for the next one, but the step that
// was under way. A planned change waits for the step that is under way: generation_change.h.
#include "cohort/membership/internal/step_protocol.h"

#include <utility>

namespace cohort::membership {

void StepProtocol::announce(const Generation& generation, std::optional<int> process) {
  if (change_.announce(generation, process)) enter_if_due();
}

void StepProtocol::enter_if_due() {
  const bool is_in_step = phase_ == Phase::kComputing || phase_ == Phase::kExchanging;
  if (!change_.has_next() || phase_ == Phase::kApplying) return;
  if (!is_in_step || change_.drops_step(committed_)) enter_next();
}

void StepProtocol::enter_next() {
  // While generation_ is still the one that it leaves.
  if (is_in()) send_to_all(StepMessage::Type::kGoodbye, committed_, "");
  change_.enter();
  covers_.clear();
  sums_.clear();
  has_added_ = false;
  if (!is_in()) {
    phase_ = Phase::kIdle;
    host_.on_left();
    return;
  }
  phase_ = Phase::kRecovering;
  recovery_ = Recovery(change_.generation());
  host_.on_entered(change_.generation());
  recovery_.on_hello(process(), committed_);
  send_to_all(StepMessage::Type::kHello, committed_, "");
  const std::vector<StepMessage> early = std::exchange(early_, {});
  for (const StepMessage& message : early) on_message(message);
  if (phase_ == Phase::kRecovering) recover();
}

StepMessage StepProtocol::message_of(StepMessage::Type type, std::uint64_t step, std::string payload) const {
  return {type, change_.generation().number, process(), step, std::move(payload)};
}

void StepProtocol::send_to_all(StepMessage::Type type, std::uint64_t step, const std::string& payload) {
  for (int to = 0; to < size(); ++to) {
    if (to != process()) host_.send(to, message_of(type, step, payload));
  }
}

void StepProtocol::on_message(StepMessage message) {
  using Type = StepMessage::Type;
  const std::uint64_t current = change_.generation().number;
  if (message.generation < current || (message.generation == current && !is_in())) return;
  if (message.generation > current) {
    if (message.type == Type::kHello) change_.on_hello(message.generation, message.from, message.step);
    early_.push_back(std::move(message));
    return enter_if_due();
  }
  switch (message.type) {
    case Type::kHello:
      recovery_.on_hello(message.from, message.step);
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
      change_.on_goodbye(message.from, message.step);
      enter_if_due();
      break;
  }
}

void StepProtocol::recover() {
  if (phase_ != Phase::kRecovering || !recovery_.has_all()) return;
  if (recovery_.is_state_lost()) {
    phase_ = Phase::kIdle;
    host_.on_state_lost();
    return;
  }
  const std::uint64_t newest = recovery_.newest();
  if (committed_ < newest) return;  // waits for the state
  if (recovery_.holders().front() == process()) {
    for (const int behind : recovery_.behind()) {
      host_.send(behind, message_of(StepMessage::Type::kState, newest, host_.state()));
    }
  }
  begin_step();
}

void StepProtocol::begin_step() {
  phase_ = Phase::kComputing;
  has_added_ = false;
  if (host_.compute(committed_)) return;
  phase_ = Phase::kIdle;
  enter_if_due();
}

void StepProtocol::on_computed(std::uint64_t generation, std::uint64_t step) {
  if (phase_ != Phase::kComputing || generation != change_.generation().number || step != committed_) return;
  phase_ = Phase::kExchanging;
  for (int to = 0; to < size(); ++to) {
    std::string cover = host_.cover(step, to);
    if (to == process()) {
      covers_[step][to] = std::move(cover);
    } else {
      host_.send(to, message_of(StepMessage::Type::kCover, step, std::move(cover)));
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
    sums_[step][process()] = sum;
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
  if (change_.has_next()) return enter_next();
  begin_step();
}

void StepProtocol::on_link_lost() {
  change_.on_link_lost(std::nullopt);
  enter_if_due();
}

}  // namespace cohort::membership
