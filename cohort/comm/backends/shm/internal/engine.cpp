// Collectives are coroutines in a queue, of which only the first advances; messages advance beside them. A
// thread that finds the progress lock free takes it: it advances what it can, spins for some microseconds,
// and then sleeps. Always: at most one thread holds the lock, and it alone touches tasks, so it advances them
// without the mutex. Where nothing moved after a sleep it looks for dead peers and for deadlines that have
// passed. Any failure ends all operations: the ranks may be at different rounds by then, so nothing that
// comes later could be trusted.
#include "cohort/comm/backends/shm/internal/engine.h"

#include <sched.h>

#include "cohort/base/error.h"
#include "cohort/base/exception_text.h"
#include "cohort/base/log.h"
#include "cohort/base/text/format_list.h"
#include "cohort/base/threads/wait.h"
#include "cohort/comm/internal/missing_ranks.h"

namespace cohort::comm::shm {
namespace {

using Clock = std::chrono::steady_clock;
using std::chrono::microseconds;
using std::chrono::milliseconds;

constexpr microseconds kSpin(50);  // each rank has a core: as long as two rounds of a large chunk
constexpr int kShortSpins = 64;    // ranks share cores: about a microsecond
constexpr int kYields = 4;
constexpr milliseconds kLook(100);  // between looks at who is gone
constexpr int kLastLooks = 16;      // for a rank to name that has not come in time

void pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

long to_ms(Clock::duration duration) {
  return static_cast<long>(std::chrono::duration_cast<milliseconds>(duration).count());
}

std::string not_come(const std::vector<int>& ranks) {
  return base::format_list("rank", ranks) + (ranks.size() == 1 ? " has" : " have") + " not come";
}

// Keeps what a peer that hangs may still write to until the process ends. A list refers to it, so that a leak
// checker does not report it.
void keep_for_ever(std::shared_ptr<void> memory) {
  static std::mutex mutex;
  static auto& kept = *new std::vector<std::shared_ptr<void>>;
  const std::lock_guard lock(mutex);
  kept.push_back(std::move(memory));
}

}  // namespace

Engine::Engine(std::unique_ptr<Communicator> ranks)
    : ranks_(std::move(ranks)), messages_(*ranks_), thread_([this] { run(); }) {}

// A callback may hold the last reference: the progress thread cannot wait for its own end.
std::shared_ptr<Engine> Engine::make(std::unique_ptr<Communicator> ranks) {
  return {new Engine(std::move(ranks)), [](Engine* engine) {
            if (engine->thread_.get_id() == std::this_thread::get_id()) {
              std::thread([engine] { delete engine; }).detach();
            } else {
              delete engine;
            }
          }};
}

Engine::~Engine() {
  {
    const std::lock_guard lock(mutex_);
    stopped_ = true;
  }
  stop_.store(true);
  wake_progress_thread();
  ranks_->wake(ranks_->rank());
  thread_.join();
  if (is_idle()) return;
  fail_all(std::make_exception_ptr(CommError("comm.shm", "the group was closed before it was over")),
           "the group was closed");
  unlock_progress();
}

// Who asks for the lock by `stop_` is first.
bool Engine::can_lock_progress() const {
  return !is_progress_locked_ && !stop_.load();
}

bool Engine::try_lock_progress() {
  const std::lock_guard lock(mutex_);
  if (!can_lock_progress()) return false;
  is_progress_locked_ = true;
  return true;
}

void Engine::unlock_progress() {
  const std::vector<std::function<void()>> callbacks = std::move(callbacks_);
  callbacks_.clear();
  {
    const std::lock_guard lock(mutex_);
    is_progress_locked_ = false;
    if (waiting_ > 0) changed_.notify_all();
    if (is_progress_wanted_) wake_progress_thread();
  }
  for (const auto& callback : callbacks) callback();
}

void Engine::begin(const std::shared_ptr<Operation>& operation) {
  {
    const std::lock_guard lock(mutex_);
    if (!broken_.empty()) throw CommError("comm.shm", "the group failed before: " + broken_);
    begun_.push_back(operation);
    any_begun_.store(true);
  }
  bool is_left_to_wait = false;
  if (try_lock_progress()) {
    advance_all();
    // That it has begun means that those before it are over.
    is_left_to_wait =
        operation->over.load() || (operation->make == nullptr && operation->rounds == Rounds::kOne);
    unlock_progress();
  }
  if (!is_left_to_wait) request_progress();
}

void Engine::request_progress() {
  {
    const std::lock_guard lock(mutex_);
    is_progress_wanted_ = true;
  }
  wake_progress_thread();
  ranks_->wake(ranks_->rank());  // its holder may sleep
}

void Engine::wake_progress_thread() {
  ranks_->ask(std::uint64_t{1} << ranks_->rank());
}

// Those that have begun what this rank waits for, and left the rest to wait().
void Engine::ask_others() {
  if (collectives_.empty()) return;
  Operation& first = *collectives_.front();
  const std::uint64_t ranks_to_ask = first.task.can_be_asked();
  if (ranks_to_ask == 0) return;
  if (!first.asked_at) first.asked_at = Clock::now();
  ranks_->ask(ranks_to_ask);
}

// They have begun in time what this rank waits for, and may compute: their threads get this long to continue
// it, whenever its deadline was.
bool Engine::others_were_asked_just_now() const {
  if (collectives_.empty()) return false;
  const Operation& first = *collectives_.front();
  return first.task.can_be_asked() != 0 && first.asked_at && Clock::now() - *first.asked_at < kLook;
}

void Engine::when_over(Operation& operation, std::function<void()> body) {
  {
    const std::lock_guard lock(mutex_);
    if (!operation.over.load()) {
      operation.when_over = std::move(body);
      body = nullptr;
    }
  }
  if (body) {
    body();
  } else {
    request_progress();
  }
}

void Engine::wait(Operation& operation, base::Deadline deadline) {
  // The operation's own end says more than that of a wait, and the lock's holder checks it.
  if (!deadline.is_never() && operation.deadline.end() - milliseconds(50) <= deadline.end()) {
    deadline = base::Deadline::never();
  }
  while (!operation.over.load(std::memory_order_acquire)) {
    const bool is_last = deadline.expired();
    if (try_lock_progress()) {
      progress_until([&] { return operation.over.load(std::memory_order_acquire) || deadline.expired(); });
      if (is_last) advance_all();  // what came before the deadline, unseen
      unlock_progress();
    } else {
      std::unique_lock lock(mutex_);
      ++waiting_;
      const auto ready = [&] { return operation.over.load() || can_lock_progress(); };
      const bool is_ready = base::wait(changed_, lock, ready, deadline);
      --waiting_;
      if (is_ready) continue;  // where it is not over, the lock was released, and nobody has looked since
    }
    if (is_last && !operation.over.load()) {
      throw TimeoutError("comm.shm", base::concat(name_of(operation), " is not over after ",
                                                  to_ms(operation.deadline.elapsed()), " ms"));
    }
  }
  if (operation.error) std::rethrow_exception(operation.error);
}

bool Engine::test(Operation& operation) {
  if (!operation.over.load() && try_lock_progress()) {
    if (!advance_all()) {
      ask_others();
      look_for_faults();
    }
    unlock_progress();
  }
  return operation.over.load(std::memory_order_acquire);
}

void Engine::cancel(const std::string& why) {
  {
    std::unique_lock lock(mutex_);
    ++waiting_;
    // The holder sees `stop_` and releases the lock, and nobody else takes it; but one who cancels too
    // resets it.
    const auto is_unlocked = [this] {
      if (!is_progress_locked_) return true;
      stop_.store(true);
      ranks_->wake(ranks_->rank());
      return false;
    };
    base::wait(changed_, lock, is_unlocked, base::Deadline::never());
    --waiting_;
    is_progress_locked_ = true;
    stop_.store(false);
  }
  fail_all(std::make_exception_ptr(CommError("comm.shm", why)), why);
  unlock_progress();
}

std::string Engine::name_of(const Operation& operation) const {
  return base::concat(operation.call, " ", operation.number, " of rank ", ranks_->rank(), "/",
                      ranks_->size());
}

// Whether anything moved.
bool Engine::advance_all() {
  bool moved = false;
  // Sequentially consistent: begin() stores it and then looks who sleeps; who goes to sleep says so and then
  // reads it. One of the two must see what the other stored.
  if (any_begun_.load()) {
    const std::lock_guard lock(mutex_);
    for (auto& operation : begun_) {
      if (operation->is_message) {
        running_messages_.push_back(std::move(operation));
      } else {
        collectives_.push_back(std::move(operation));
      }
    }
    begun_.clear();
    any_begun_.store(false);
    moved = true;
  }
  while (!collectives_.empty() && advance(*collectives_.front())) {
    if (collectives_.empty()) return true;  // all failed
    const auto done = std::move(collectives_.front());
    collectives_.pop_front();
    finish(*done, nullptr);
    moved = true;
  }
  for (auto at = running_messages_.begin(); at != running_messages_.end();) {
    if (!advance(**at)) {
      if (running_messages_.empty()) return true;
      ++at;
      continue;
    }
    if (running_messages_.empty()) return true;
    const auto done = std::move(*at);
    at = running_messages_.erase(at);
    finish(*done, nullptr);
    moved = true;
  }
  return moved;
}

// Whether it is over; after a failure everything is.
bool Engine::advance(Operation& operation) {
  try {
    if (operation.make) {
      operation.task = operation.make();
      operation.make = nullptr;
    }
    return operation.task.advance();
  } catch (const std::exception& error) {
    fail_all(std::current_exception(), name_of(operation) + ": " + base::message_of(error));
    return true;
  }
}

void Engine::finish(Operation& operation, std::exception_ptr error) {
  operation.task = Task();
  operation.keep = nullptr;
  operation.error = std::move(error);
  const std::lock_guard lock(mutex_);
  operation.over.store(true, std::memory_order_release);
  if (operation.when_over) callbacks_.push_back(std::move(operation.when_over));
  if (waiting_ > 0) changed_.notify_all();
}

bool Engine::is_idle() const {
  return collectives_.empty() && running_messages_.empty() && !any_begun_.load();
}

// Rounds no longer agree between the ranks, or a message is cut: nothing after this can be trusted.
void Engine::fail_all(const std::exception_ptr& error, const std::string& why) {
  const bool is_memory_ours = ranks_->give_up(why);
  std::deque<std::shared_ptr<Operation>> all;
  {
    const std::lock_guard lock(mutex_);
    if (broken_.empty()) broken_ = why;
    all.swap(begun_);
    any_begun_.store(false);
  }
  for (auto& operation : collectives_) all.push_back(std::move(operation));
  for (auto& operation : running_messages_) all.push_back(std::move(operation));
  collectives_.clear();
  running_messages_.clear();
  if (!is_memory_ours) {
    base::log_warning(base::concat("comm.shm: a rank hangs as it writes to the tensors of a call of rank ",
                                   ranks_->rank(), ", which failed: their memory is not used again"));
    for (const auto& operation : all) keep_for_ever(operation->keep);
  }
  for (const auto& operation : all) finish(*operation, error);
}

// The operation whose deadline has passed, whether it has begun or not.
Operation* Engine::first_late() const {
  if (!others_were_asked_just_now()) {
    for (const auto& operation : collectives_) {
      if (operation->deadline.expired()) return operation.get();
    }
  }
  for (const auto& message : running_messages_) {
    if (message->deadline.expired()) return message.get();
  }
  return nullptr;
}

// A rank that dies says nothing, so every now and then somebody must look; one that gives up wakes the
// others.
void Engine::look_for_faults() {
  const auto now = Clock::now();
  if (now - looked_ >= kLook || ranks_->did_any_give_up()) {
    looked_ = now;
    std::vector<Operation*> running;
    if (!collectives_.empty()) running.push_back(collectives_.front().get());
    for (const auto& message : running_messages_) running.push_back(message.get());
    for (Operation* const operation : running) {
      const auto gone = ranks_->why_gone(operation->task.waits_for());
      if (!gone) continue;
      // What it did before it went may be all that was needed.
      if (advance_all() || is_idle()) return;
      const std::string what = name_of(*operation) + ": " + gone->why;
      return fail_all(std::make_exception_ptr(MissingRanks<PeerError>({gone->rank}, "comm.shm", what)), what);
    }
  }
  const Operation* const late = first_late();
  if (late == nullptr) return;
  const bool is_behind = late->make != nullptr && !collectives_.empty();
  const Operation& awaited = is_behind ? *collectives_.front() : *late;
  std::vector<int> missing;
  for (int look = 0; missing.empty() && look < kLastLooks; ++look) {  // of a round each
    // What came while this thread stood still may be all that was needed. Else nothing has ended.
    if (advance_all() || is_idle()) return;
    ask_others();  // the call may have come to its next round: they get their time, unless they had it before
    if (first_late() != late) return;
    missing = ranks_of(awaited.task.waits_for());
  }
  std::string what =
      base::concat(name_of(*late), ": timed out after ", to_ms(late->deadline.elapsed()), " ms: ");
  if (is_behind) what += base::concat("it comes after ", name_of(awaited), ", for which ");
  what += missing.empty() ? "it is under way, and no rank is waited for" : not_come(missing);
  fail_all(std::make_exception_ptr(MissingRanks<TimeoutError>(missing, "comm.shm", what)), what);
}

template <typename Until>
void Engine::progress_until(const Until& until) {
  const auto over = [&] { return until() || !callbacks_.empty() || stop_.load(); };
  while (!over()) {
    if (advance_all() || spin()) continue;
    // This is asked last of all: only now does nothing that comes go by unseen.
    ranks_->sleep(sleep_time(), [&] {
      if (advance_all() || over()) return true;
      ask_others();
      return false;
    });
    if (!over() && !advance_all()) look_for_faults();
  }
}

// In the hope that it is a matter of microseconds. Whether something moved.
bool Engine::spin() {
  const bool long_spin = ranks_->has_core_each();
  const auto since = Clock::now();
  for (int i = 1; long_spin || i < kShortSpins; ++i) {
    pause();
    if (advance_all()) return true;
    if (long_spin && i % 16 == 0 && Clock::now() - since > kSpin) return false;
  }
  for (int i = 0; i < kYields; ++i) {
    ::sched_yield();
    if (advance_all()) return true;
  }
  return false;
}

std::chrono::nanoseconds Engine::sleep_time() const {
  auto left = std::chrono::nanoseconds(kLook);
  const auto shorten = [&left](const Operation& operation) {
    left = std::min<std::chrono::nanoseconds>(left, operation.deadline.remaining());
  };
  for (const auto& collective : collectives_) shorten(*collective);
  for (const auto& message : running_messages_) shorten(*message);
  return std::max<std::chrono::nanoseconds>(left, microseconds(100));
}

void Engine::run() {
  for (std::uint32_t heard = 0;;) {  // a peer may have asked before this thread began
    bool is_mine = false;
    const std::uint32_t asked = ranks_->times_asked();
    {
      const std::lock_guard lock(mutex_);
      if (stopped_) return;
      if (asked != heard) is_progress_wanted_ = true;
      heard = asked;
      is_mine = is_progress_wanted_ && can_lock_progress();
      if (is_mine) {
        is_progress_wanted_ = false;
        is_progress_locked_ = true;
      }
    }
    if (!is_mine) {
      ranks_->sleep_until_asked(asked);
      continue;
    }
    progress_until([this] { return is_idle(); });
    if (!is_idle()) {
      const std::lock_guard lock(mutex_);
      is_progress_wanted_ = true;  // it left for a callback, or for cancel()
    }
    unlock_progress();
  }
}

}  // namespace cohort::comm::shm
