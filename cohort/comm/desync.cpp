// A watch has two threads: one that waits for the signal, and one that speaks with the store. A rank that
// fails, and rank 0 on a signal, give the store's thread a question to ask; it answers other ranks between
// them. Always: nobody but this thread touches the store, and nobody waits for it without a deadline.
#include "cohort/comm/desync.h"

#include <atomic>
#include <exception>
#include <mutex>
#include <optional>

#include "cohort/base/error.h"
#include "cohort/base/exception_text.h"
#include "cohort/base/log.h"
#include "cohort/base/text/format_list.h"
#include "cohort/base/threads/deadline.h"
#include "cohort/base/threads/serial_queue.h"
#include "cohort/comm/internal/group_state.h"
#include "cohort/comm/internal/hang_detector.h"
#include "cohort/comm/internal/report.h"
#include "cohort/comm/internal/signal_thread.h"
#include "cohort/comm/internal/store_rounds.h"

namespace cohort::comm {

// Note [Two threads]: the one that waits for the signal never touches the store, so that a rank writes its
// own report even when the store does not answer. All that goes to the store goes through the other, one
// connection and one thread; who needs something of it waits with a deadline.
//
// `signals_` is the first thread, and knows no store. `rounds_` is of the second alone, which `store_queue_`
// runs. The mutex guards what a failing call, the signal's thread and the owner share.
class DesyncWatch::Watcher : public HangDetector, public std::enable_shared_from_this<Watcher> {
 public:
  Watcher(std::shared_ptr<GroupRegistry> registry, const c10::intrusive_ptr<c10d::Store>& store, int signal)
      : registry_(std::move(registry)),
        signals_(std::make_shared<SignalThread>(signal)),
        rounds_(registry_, store) {}

  // Before anybody else knows of it: who fails gives the queue something to do.
  void make_queue() {
    // Its functions hold the watcher, so that it can be left behind; the queue itself must not.
    store_queue_.emplace(base::SerialQueue::Options{
        .name = "desync",
        .spin = std::chrono::microseconds(0),
        .start = &block_all_signals,
        .idle =
            [watcher = weak_from_this()] {
              if (const auto self = watcher.lock()) self->serve([] {});
            },
        .idle_time = rounds_.poll_time(),
    });
  }

  void handle_signal() {
    signals_->start([self = shared_from_this()] { self->report_signal(); });
  }

  void stop() {
    registry_->set_hang_detector(nullptr);
    {
      const std::lock_guard lock(mutex_);
      stopping_ = true;  // nothing is given to the queue after this, but the last
    }
    signals_->stop();
    {
      const std::lock_guard lock(mutex_);
      const bool wait_for_all = !failed_ && !lost_ && std::uncaught_exceptions() == 0;
      enqueue("leave", [this, wait_for_all] { rounds_.leave(wait_for_all); });
    }
    const auto end_time = rounds_.end_time();
    if (!store_queue_->stop(end_time)) {
      base::log_warning(
          base::concat("the store of the job, or the rank that asked for a table, has not answered in ",
                       end_time.count(), " ms; the watch for desynchronisation is left behind"));
    }
  }

  void failed(const std::string& what) override {
    const std::lock_guard lock(mutex_);
    failed_ = true;
    if (lost_ || stopping_) return;
    table_ = enqueue("the table of a failure", [this, what] { rounds_.ask_after_failure(what); });
  }

  void wait_for_table(base::Deadline until) override {
    base::Future<void> table;
    {
      const std::lock_guard lock(mutex_);
      table = table_;
    }
    if (table.valid()) table.wait(until);
  }

 private:
  void report_signal() {
    base::log_warning(base::concat("signal ", signals_->number(), ":\n", report_of(*registry_)));
    if (registry_->rank != 0 || registry_->size == 1) return;
    const std::lock_guard lock(mutex_);
    if (stopping_) return;
    enqueue("the table of a signal", [this] {
      rounds_.ask(base::concat("signal ", signals_->number(), " on rank 0"), base::LogLevel::kWarning);
    });
  }

  // Has the store's thread run `job`, after it has looked who asks.
  template <typename Job>
  base::Future<void> enqueue(const char* what, Job job) {
    return store_queue_->submit(what, [self = shared_from_this(), job] { self->serve(job); });
  }

  template <typename Job>
  void serve(const Job& job) {
    if (lost_) return;
    try {
      rounds_.answer_questions();
      job();
    } catch (const std::exception& error) {  // the store went with the rank that kept it
      base::log_debug(base::concat("the watch for desynchronisation ends: ", base::message_of(error)));
      lost_ = true;
    }
  }

  const std::shared_ptr<GroupRegistry> registry_;
  const std::shared_ptr<SignalThread> signals_;  // shared with its thread, which may be left behind
  StoreRounds rounds_;                           // of the store's thread, but for its times
  std::mutex mutex_;                             // of the next three
  bool failed_ = false;
  bool stopping_ = false;
  base::Future<void> table_;       // of the last failure: those of earlier ones came before
  std::atomic<bool> lost_{false};  // the store: nothing is asked any more
  std::optional<base::SerialQueue> store_queue_;
};

DesyncWatch::DesyncWatch(std::shared_ptr<Watcher> watcher) : watcher_(std::move(watcher)) {}
DesyncWatch::DesyncWatch(DesyncWatch&&) noexcept = default;
DesyncWatch& DesyncWatch::operator=(DesyncWatch&& other) noexcept {
  std::swap(watcher_, other.watcher_);
  return *this;
}
DesyncWatch::~DesyncWatch() {
  if (watcher_ != nullptr) watcher_->stop();
}

DesyncWatch watch_for_desync(const Group& job, int signal) {
  GroupState& state = *job.shared_state();
  auto watcher = std::make_shared<DesyncWatch::Watcher>(state.registry, state.store, signal);
  watcher->make_queue();
  if (!state.registry->set_hang_detector(watcher)) {
    throw UsageError("comm.watch_for_desync", base::concat("group '", state.name, "' is watched already"));
  }
  watcher->handle_signal();
  return DesyncWatch(std::move(watcher));
}

std::string report() {
  base::TextList reports("\n");
  for (const auto& registry : all_group_registries()) {
    if (const std::string report = report_of(*registry); !report.empty()) reports.add(report);
  }
  return reports.empty() ? "this process is in no group" : reports.text();
}

}  // namespace cohort::comm
