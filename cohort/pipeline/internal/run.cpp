// A run is what the threads of the placements share: plan, channels, deadline, and the first failure. Later
// failures are dropped, since they follow from the first: closing the channels wakes all threads that wait.
// Each thread notes the action that it is in, so a timeout can name who computes.
#include "cohort/pipeline/internal/run.h"

#include <algorithm>
#include <utility>

#include "cohort/base/text/format_list.h"

namespace cohort::pipeline {
namespace {

using base::concat;

}  // namespace

std::vector<int> Setup::passing(int stage) const {
  std::vector<int> result;
  for (std::size_t i = 0; i < skips.size(); ++i) {
    if (skips[i].from <= stage && skips[i].to > stage) result.push_back(static_cast<int>(i));
  }
  return result;
}

Batch::Batch(const Setup& setup, int num_micro_batches) {
  const auto count = static_cast<std::size_t>(num_micro_batches);
  held.resize(setup.stages.size());
  for (auto& each : held) each.resize(count);
  outputs.resize(count);
  output_gradients.resize(count);
  input_gradients.resize(count);
  losses.resize(count);
}

Run::Run(std::shared_ptr<const Setup> setup, std::shared_ptr<Batch> batch, Plan of,
         std::chrono::milliseconds within, const base::Deadline& until)
    : plan(std::move(of)),
      timeout(within),
      deadline(until),
      setup_(std::move(setup)),
      batch_(std::move(batch)),
      placements_(plan.actions.size()) {}

void Run::fail(std::exception_ptr error) {
  {
    const std::lock_guard lock(mutex_);
    // The first one: what follows it says that a channel was closed.
    if (error_ == nullptr) error_ = std::move(error);
    failed_.store(true, std::memory_order_release);
  }
  // Without the lock, since each channel takes its own.
  for (const auto& [edge, channel] : channels) channel->close();
  if (serialized) serialized->close();
}

void Run::throw_if_failed() const {
  const std::lock_guard lock(mutex_);
  // With the lock, so fail() has not begun, or has set its error.
  if (failed()) throw ChannelClosed();
}

void Run::time_out() {
  fail(std::make_exception_ptr(
      TimeoutError("pipeline.step", concat("waited ", timeout.count(), " ms for a step: ", who_computes()),
                   "wait_for_late_stages(), then zero_grad(), then step(); or a longer timeout where that is "
                   "slow and not stuck")));
}

std::exception_ptr Run::error() const {
  const std::lock_guard lock(mutex_);
  return error_;
}

std::string Run::who_computes() const {
  base::TextList text("; ");
  std::string handing_over;
  for (std::size_t placement = 0; placement < placements_.size(); ++placement) {
    const int current = placements_[placement].current.load(std::memory_order_acquire);
    // It has not begun, or has come to its end.
    if (current < 0) continue;
    const Action& action = plan.actions[placement][static_cast<std::size_t>(current)];
    if (!action.computes()) {
      const bool is_before =
          action.kind == ActionKind::kReceiveActivation || action.kind == ActionKind::kSendGradient;
      const int peer = setup_->placement_of(action.stage + (is_before ? -1 : 1));
      handing_over +=
          concat("; ", setup_->placements[placement], " is ", name_of(action.kind), " of micro-batch ",
                 action.micro_batch, ", peer: ", setup_->placements[static_cast<std::size_t>(peer)]);
      continue;
    }
    text.add("stage ", action.stage, " (", setup_->stages[static_cast<std::size_t>(action.stage)].name(),
             ") on ", setup_->placements[placement], " is in the ", name_of(action.kind), " of micro-batch ",
             action.micro_batch);
  }
  return text.empty() ? concat("no stage computes", handing_over) : text.text();
}

RunTimes Run::take_times() {
  RunTimes times;
  for (OfPlacement& own : placements_) {
    for (const TimedAction& timed : own.times) times.time = std::max(times.time, timed.end);
    times.actions.push_back(std::move(own.times));
    times.peak_live.push_back(own.peak_live);
  }
  return times;
}

}  // namespace cohort::pipeline
