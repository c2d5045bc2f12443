#include "cohort/comm/pending.h"

#include <torch/csrc/distributed/c10d/Work.hpp>

#include "cohort/base/exception_text.h"
#include "cohort/base/log.h"
#include "cohort/comm/internal/pending_state.h"

namespace cohort::comm {

Pending::Pending() = default;
Pending::Pending(std::shared_ptr<State> state) : state_(std::move(state)) {}
Pending::Pending(Pending&&) noexcept = default;
Pending& Pending::operator=(Pending&& other) noexcept {
  // Not reset: the other one's destructor waits for the call that this one held.
  std::swap(state_, other.state_);
  return *this;
}

Pending::~Pending() {
  if (state_ == nullptr) return;
  try {
    state_->finish();
  } catch (const std::exception& error) {
    base::log_warning(base::concat("nobody waited for a collective that failed: ", error.what()));
  }
}

void Pending::wait() {
  if (state_ == nullptr) return;
  // The state is taken out first: if finish() throws, the destructor does not call it again.
  const std::shared_ptr<State> state = std::move(state_);
  state->finish();
}

bool Pending::done() const {
  if (state_ == nullptr) return true;
  if (state_->beginning.valid() && !state_->beginning.ready()) return false;
  return state_->work == nullptr || state_->work->isCompleted();  // none: wait() throws at once
}

const c10::intrusive_ptr<c10d::Work>& Pending::work() const {
  static const c10::intrusive_ptr<c10d::Work> none;
  if (state_ == nullptr) return none;
  state_->wait_until_begun();
  return state_->work;
}

}  // namespace cohort::comm
