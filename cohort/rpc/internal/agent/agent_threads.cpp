// Which thread reads an answer, and which one runs a handler: waking a thread costs more than a short call.
//
// A thread that waits for an answer first reads for itself what comes from the worker (net::Peer::poll_until()).
//
// A function whose last runs were quick runs on the node's thread. Should it be long this time, nothing else is read
// meanwhile; so another thread takes the node's place: as the function begins to wait for a call of its own, or by a timer,
// and the function goes to the pool for its next runs. One handler at a time may be on the node's thread, or have begun
// there. With AgentOptions::num_threads of 1 none is: a program may count on one handler at a time.
#include "cohort/rpc/internal/agent/agent_state.h"

namespace cohort::rpc {
namespace {

using std::chrono::microseconds;

constexpr microseconds kPatience(1'000);  // until another thread takes the node's place

}  // namespace

base::WaitHelper AgentState::helper_of(const std::string& worker) {
  std::shared_ptr<net::Peer> peer;
  {
    const std::lock_guard lock(mutex_);
    const KnownWorker* const known = workers_.find_if_known(worker);
    if (known == nullptr) return nullptr;
    peer = known->peer;
  }
  return [self = weak_from_this(), peer](const std::function<bool()>& is_done) {
    if (peer != nullptr) peer->poll_until(is_done);
    if (is_done()) return;
    if (const auto state = self.lock()) state->node_->will_wait();
  };
}

bool AgentState::may_run_here(const std::string& function) const {
  if (options_.num_threads == 1 || threads_.is_on_node_thread() || !node_->is_own_thread()) return false;
  return threads_.is_quick(function);
}

void AgentState::run_here(const Job& job, Encoded arguments) {
  const auto replace = [self = weak_from_this()] {
    if (const auto state = self.lock()) state->node_->replace_thread();
  };
  const HandlerThreads::OnNodeThread runs(threads_);
  const Timers::Key timer = timers_->add(base::Deadline::Clock::now() + kPatience, replace);
  run(job, std::move(arguments));
  timers_->remove(timer);
}

void AgentState::run_on_pool(const Job& job, Encoded arguments, std::shared_ptr<void> credit) {
  try {
    pool_->submit("remote call", [self = shared_from_this(), job, arguments = std::move(arguments),
                                  credit = std::move(credit)]() mutable {
      credit.reset();
      self->run(job, std::move(arguments));
    });
  } catch (...) {  // no thread can be had
    threads_.on_dropped();
    fail_job(job, std::current_exception());
  }
}

}  // namespace cohort::rpc
