#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <utility>

#include "cohort/elastic/session.h"

namespace cohort::test {

/// A session that does what another one does. A test may look at states, and change what is copied.
class WrappedSession : public elastic::Session {
 public:
  struct Listener {
    /// May change where the process is in the generation.
    std::function<void(elastic::GenerationInfo& info)> on_enter = nullptr;
    /// Before the process takes the state of another one.
    std::function<void(elastic::StateSnapshot& state)> on_load = nullptr;
    /// With the state that is committed.
    std::function<void(std::uint64_t steps, const elastic::StateSnapshot& state)> on_commit = nullptr;
  };

  WrappedSession(std::shared_ptr<elastic::Session> session, Listener listener)
      : session_(std::move(session)), listener_(std::move(listener)) {}

  int virtual_ranks() const override { return session_->virtual_ranks(); }
  void set_state(elastic::StateAccess state) override {
    save_ = state.save;
    session_->set_state({.save = state.save, .load = [this, load = state.load](const auto& snapshot) {
                           elastic::StateSnapshot changed = snapshot;
                           if (listener_.on_load) listener_.on_load(changed);
                           load(changed);
                         }});
  }
  elastic::GenerationInfo enter(std::uint64_t committed_steps) override {
    elastic::GenerationInfo info = session_->enter(committed_steps);
    if (listener_.on_enter) listener_.on_enter(info);
    return info;
  }
  bool must_enter() const override { return session_->must_enter(); }
  bool must_leave() const override { return session_->must_leave(); }
  std::shared_ptr<parallel::SliceExchange> exchange() const override { return session_->exchange(); }
  void begin_changes() override { session_->begin_changes(); }
  void commit(std::uint64_t steps) override {
    session_->commit(steps);
    if (listener_.on_commit) listener_.on_commit(steps, save_());
  }
  void set_stop_signal(int signal) override { session_->set_stop_signal(signal); }
  elastic::GenerationInfo finish() override { return session_->finish(); }

 private:
  const std::shared_ptr<elastic::Session> session_;
  const Listener listener_;
  std::function<elastic::StateSnapshot()> save_;
};

}  // namespace cohort::test
