// A question is a numbered round on the store. The first rank to claim a round asks. Each rank that sees the
// question leaves its answer under its own number, and who asked logs the table. Ranks that fail soon after
// wait for that table instead of a table each. A rank that fails leaves a last answer too, since it may be
// gone when somebody asks. Always: a rank answers each round once, in order, and only the store's thread
// knows at which round it is.
#include "cohort/comm/desync.h"

#include <fcntl.h>
#include <pthread.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <exception>
#include <thread>

#include "cohort/base/error.h"
#include "cohort/base/exception_text.h"
#include "cohort/base/log.h"
#include "cohort/base/text/format_list.h"
#include "cohort/base/threads/deadline.h"
#include "cohort/base/threads/serial_queue.h"
#include "cohort/base/threads/wait.h"
#include "cohort/comm/internal/group_state.h"
#include "cohort/comm/internal/hang_detector.h"
#include "cohort/comm/internal/report.h"

namespace cohort::comm {
namespace {

using std::chrono::milliseconds;

constexpr milliseconds kPoll(250);         // how often a watch looks whether somebody asks
constexpr int kRanksThatLookOften = 1024;  // more look less often: one store answers them all
constexpr milliseconds kCollect(1500);     // how long the one who asks waits for answers
constexpr milliseconds kLeave(1000);       // how long rank 0 waits for the others to leave
constexpr milliseconds kReport(3000);      // how long the destructor waits for a report that is being written
constexpr milliseconds kAnswerSlack(500);  // for the store's own answers, where a wait is the sum of others
constexpr milliseconds kRepeat(10000);     // failures so soon after one table are of the same trouble

constexpr const char* kFailure = "rank ";  // how a question about a failure begins

// One for the process and never closed: a handler may still run on another thread when its watch ends.
int event() {
  static const int fd = ::eventfd(0, EFD_CLOEXEC);
  return fd;
}
std::atomic<bool> signal_taken{false};

void notify() {
  const std::uint64_t increment = 1;
  [[maybe_unused]] const ssize_t ignored = ::write(event(), &increment, sizeof(increment));
}

void on_signal(int) {
  const int saved = errno;
  notify();
  errno = saved;
}

void block_signals() {
  sigset_t all;
  ::sigfillset(&all);
  ::pthread_sigmask(SIG_BLOCK, &all, nullptr);
}

}  // namespace

// Note [Two threads]: the one that waits for the signal never touches the store, so that a rank writes its
// own report even when the store does not answer. All that goes to the store goes through the other, one
// connection and one thread; who needs something of it waits with a deadline.
class DesyncWatch::Watcher : public HangDetector, public std::enable_shared_from_this<Watcher> {
 public:
  Watcher(std::shared_ptr<GroupRegistry> registry, const c10::intrusive_ptr<c10d::Store>& store, int signal)
      : registry_(std::move(registry)),
        store_(store->clone()),
        signal_(signal),
        poll_(kPoll * std::max(1, registry_->size / kRanksThatLookOften)) {}

  // Before anybody else knows of it: who fails gives the queue something to do.
  void make_queue() {
    // Its functions hold the watcher, so that it can be left behind; the queue itself must not.
    store_queue_.emplace(base::SerialQueue::Options{
        .name = "desync",
        .spin = std::chrono::microseconds(0),
        .start = &block_signals,
        .idle =
            [watcher = weak_from_this()] {
              if (const auto self = watcher.lock()) self->serve([] {});
            },
        .idle_time = poll_,
    });
  }

  void handle_signal() {
    if (signal_ != 0) {
      if (signal_taken.exchange(true)) {
        throw UsageError("comm.watch_for_desync", "another watch of this process has a signal already",
                         "signal 0 for this one");
      }
      struct sigaction action {};
      action.sa_handler = &on_signal;
      action.sa_flags = SA_RESTART;
      ::sigemptyset(&action.sa_mask);
      if (event() < 0 || ::sigaction(signal_, &action, &before_) != 0) {
        signal_taken = false;
        throw UsageError("comm.watch_for_desync", base::concat("cannot handle signal ", signal_));
      }
      signals_ = std::thread([self = shared_from_this()] {
        self->wait_for_signals();
        self->signals_ended_ = true;
      });
    }
  }

  void stop() {
    registry_->set_hang_detector(nullptr);
    if (signals_.joinable()) {
      ::sigaction(signal_, &before_, nullptr);
      stopping_ = true;
      notify();
      // It may be writing a report that nobody reads.
      if (base::poll_until([this] { return signals_ended_.load(); }, base::Deadline(kReport))) {
        signals_.join();
      } else {
        signals_.detach();
      }
      signal_taken = false;
    }
    {
      const std::lock_guard lock(mutex_);
      const bool wait_for_others = !failed_ && !lost_ && std::uncaught_exceptions() == 0;
      stopping_ = true;  // nothing is given to the queue after this
      enqueue("leave", [this, wait_for_others] { leave(wait_for_others); });
    }
    if (!store_queue_->stop(end_time())) {
      base::log_warning(
          base::concat("the store of the job, or the rank that asked for a table, has not answered in ",
                       end_time().count(), " ms; the watch for desynchronisation is left behind"));
    }
  }

  void failed(const std::string& what) override {
    const std::lock_guard lock(mutex_);
    failed_ = true;
    if (lost_ || stopping_) return;
    table_ = enqueue("the table of a failure", [this, what] { after_failure(what); });
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
  using Clock = base::Deadline::Clock;

  // For the thread that speaks with the store: another rank's table may be waited for, and then the others.
  milliseconds end_time() const { return table_time() + kLeave + kAnswerSlack; }
  milliseconds table_time() const { return kCollect + poll_ + kPoll; }

  void wait_for_signals() {
    block_signals();
    std::uint64_t count = 0;
    while (::read(event(), &count, sizeof(count)) > 0 || errno == EINTR) {
      if (stopping_) return;
      base::log_warning(base::concat("signal ", signal_, ":\n", report_of(*registry_)));
      if (registry_->rank != 0 || registry_->size == 1) continue;
      const std::lock_guard lock(mutex_);
      if (stopping_) return;
      enqueue("the table of a signal",
              [this] { ask(base::concat("signal ", signal_, " on rank 0"), base::LogLevel::kWarning); });
    }
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
      answer_those_who_asked();
      job();
    } catch (const std::exception& error) {  // the store went with the rank that kept it
      base::log_debug(base::concat("the watch for desynchronisation ends: ", base::message_of(error)));
      lost_ = true;
    }
  }

  std::string key(const char* what, std::int64_t round, int rank = -1) const {
    return base::concat("desync/", what, "/", round, rank < 0 ? "" : "/" + std::to_string(rank));
  }

  void answer_those_who_asked() {
    while (store_->check({key("asked", round_)})) {
      store_->set(key("answer", round_, registry_->rank), write_answers(answers_of(*registry_)));
      if (store_->get_to_str(key("asked", round_)).starts_with(kFailure)) failure_asked_ = Clock::now();
      ++round_;
    }
  }

  void after_failure(const std::string& what) {
    if (lost_) return;
    // For those who ask later: this process may be gone by then.
    store_->set(base::concat("desync/last/", registry_->rank), write_answers(answers_of(*registry_)));
    answer_those_who_asked();
    if (Clock::now() - failure_asked_ < kRepeat) return wait_for_table_of(round_ - 1);
    ask(base::concat(kFailure, registry_->rank, ": ", what), base::LogLevel::kError);
  }

  // This process may keep the store that the one who asks needs, and that one may have begun a moment later.
  // Calls that fail together wait for one table, and once.
  void wait_for_table_of(std::int64_t round) {
    if (round <= awaited_round_) return;
    awaited_round_ = round;
    base::poll_until([&] { return store_->check({key("table", round)}); }, base::Deadline(table_time()));
  }

  // Of ranks that ask at once, one gets to. Between looking who asked and this, nobody may look again: who
  // lost would ask the next question.
  void ask(const std::string& why, base::LogLevel level) {
    const std::int64_t round = round_;
    if (store_->add(key("claim", round), 1) != 1) return wait_for_table_of(round);
    store_->set(key("asked", round), why);
    ++round_;
    if (why.starts_with(kFailure)) failure_asked_ = Clock::now();
    std::vector<std::optional<std::vector<Answer>>> answers(static_cast<std::size_t>(registry_->size));
    answers[static_cast<std::size_t>(registry_->rank)] = answers_of(*registry_);
    const auto have_all = [&] {
      bool all = true;
      for (int rank = 0; rank < registry_->size; ++rank) {
        auto& answer = answers[static_cast<std::size_t>(rank)];
        if (!answer) answer = fetch(key("answer", round, rank));
        if (!answer) answer = fetch(base::concat("desync/last/", rank));
        all = all && answer.has_value();
      }
      return all;
    };
    base::poll_until(have_all, base::Deadline(kCollect + poll_ - kPoll));
    base::log(level, base::concat("what the ranks were doing (", why, "):\n", join_answers(answers)));
    store_->set(key("table", round), "1");
  }

  std::optional<std::vector<Answer>> fetch(const std::string& name) {
    if (!store_->check({name})) return std::nullopt;
    return read_answers(store_->get_to_str(name));
  }

  // The store often goes with rank 0, and LibTorch writes pages about a connection that breaks.
  void leave(bool wait_for_others) {
    if (lost_) return;
    store_->add("desync/left", 1);
    if (registry_->rank != 0 || !wait_for_others) return;
    base::poll_until([this] { return store_->add("desync/left", 0) % registry_->size == 0; },
                     base::Deadline(kLeave));
  }

  const std::shared_ptr<GroupRegistry> registry_;
  const c10::intrusive_ptr<c10d::Store> store_;
  const int signal_;
  const milliseconds poll_;
  struct sigaction before_ {};
  std::thread signals_;
  std::mutex mutex_;
  bool failed_ = false;       // under mutex_, as is the next
  base::Future<void> table_;  // of the last failure: those of earlier ones came before
  std::atomic<bool> stopping_{false}, lost_{false}, signals_ended_{false};
  std::optional<base::SerialQueue> store_queue_;  // of the thread that speaks with the store
  std::int64_t round_ = 0;                        // of questions; that thread alone, as below
  std::int64_t awaited_round_ = -1;               // the last one whose table was waited for
  Clock::time_point failure_asked_ = Clock::now() - 2 * kRepeat;
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
