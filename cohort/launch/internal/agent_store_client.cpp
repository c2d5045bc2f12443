// One thread asks the store. It writes what is posted; when nothing is, it goes round: it gives its sign,
// reads the signs of other nodes, and then the keys that are watched. The agent sees only the records under
// the mutex. Always: the thread holds no mutex while it asks the store, so a store that hangs never makes the
// agent wait. Thread and object share the records, so the thread can be left behind. The time without a sign
// is a sum of bounded steps, since a long step shows that this process stood still itself.
#include "cohort/launch/internal/agent_store_client.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <map>
#include <mutex>
#include <set>
#include <utility>

#include "cohort/base/error.h"
#include "cohort/base/exception_text.h"
#include "cohort/base/log.h"
#include "cohort/base/threads/serial_queue.h"
#include "cohort/launch/internal/signed_words.h"
#include "cohort/launch/worker.h"

namespace cohort::launch {
namespace {

using base::concat;
using Clock = std::chrono::steady_clock;

// With more nodes each of them asks less often, so that the requests at the store do not grow with the job.
constexpr int kNodesPerInterval = 50;

long in_seconds(Clock::duration time) {
  return static_cast<long>(std::chrono::duration_cast<std::chrono::seconds>(time).count());
}

// Measures how long a peer has been silent, by steps of one who polls. A step long after the one before says
// that he stood still himself, so no step counts for more than `most`.
class SilenceTimer {
 public:
  void advance(Clock::time_point now, Clock::duration max_step) {
    if (last_) time_ += std::min(now - *last_, max_step);
    last_ = now;
  }
  void restart(Clock::time_point now) { *this = SilenceTimer(now); }
  Clock::duration time() const { return time_; }

  SilenceTimer() = default;
  explicit SilenceTimer(Clock::time_point now) : last_(now) {}

 private:
  std::optional<Clock::time_point> last_;
  Clock::duration time_{0};
};

// The intervals of the thread.
struct Intervals {
  explicit Intervals(const AgentStoreClientOptions& options)
      : word_round(options.interval * std::max(1, options.nnodes / kNodesPerInterval)),
        round(std::max(std::chrono::milliseconds(1), std::min(word_round, options.keep_alive_interval / 2))),
        max_silence(options.keep_alive_interval * options.keep_alive_max_attempt),
        max_step(max_silence / 2) {}

  std::chrono::milliseconds word_round;  // between two looks for words
  std::chrono::milliseconds round;       // between two rounds of the thread
  Clock::duration max_silence;           // of one who lives
  Clock::duration max_step;              // of a SilenceTimer
};

// The words of the agents, signed and read.
struct WordRecords {
  explicit WordRecords(const std::optional<base::Secret>& secret) : signer(secret) {}

  SignedWords signer;
  std::set<std::string> watched;  // and not seen yet
  std::map<std::string, std::string> received;
  std::set<std::string> rejected;
};

// The nodes of the job.
struct NodeRecords {
  std::set<int> expected;    // those whose signs are missed from now on
  std::set<int> lost_nodes;  // those whose signs stay away
  std::string lost;          // why the job is over: the first reason
};

// Whether the caller's loop runs: only then a sign is given for it.
class CallerActivity {
 public:
  void acknowledge() {
    has_answered_ = true;
    busy_until_ = base::Deadline(Clock::duration::zero());
  }
  void busy_until(base::Deadline deadline) { busy_until_ = deadline; }
  // Whether the caller has answered since the last call of this, or has said that it is busy.
  bool take() { return std::exchange(has_answered_, false) || !busy_until_.expired(); }

 private:
  bool has_answered_ = true;
  base::Deadline busy_until_{Clock::duration::zero()};
};

// How long the store has not answered the request that is under way.
class StoreSilence {
 public:
  // False: the store is gone, and is asked no more.
  bool begin_request(Clock::time_point now) {
    if (is_gone_) return false;
    is_asking_ = true;
    timer_.restart(now);
    return true;
  }
  void end_request() { is_asking_ = false; }
  void set_gone() { is_gone_ = true; }
  bool is_gone() const { return is_gone_; }
  Clock::duration time(Clock::time_point now, Clock::duration max_step) {
    if (is_gone_ || !is_asking_) return Clock::duration::zero();
    timer_.advance(now, max_step);
    return timer_.time();
  }

 private:
  bool is_asking_ = false, is_gone_ = false;
  SilenceTimer timer_;  // as the caller looks
};

// The signs of life that were given and read.
struct SignRecords {
  struct Sign {
    std::string word;
    std::optional<SilenceTimer> silence;  // nothing: the node has not come yet
  };
  std::map<int, Sign> of_node;
  std::int64_t num_given = 0;
  Clock::time_point next = Clock::time_point::min();
};

}  // namespace

struct AgentStoreClient::State {
  explicit State(std::shared_ptr<KeyValueStore> of, const AgentStoreClientOptions& given)
      : kv_store(std::move(of)), options(given), intervals(given), words(given.secret) {}

  const std::shared_ptr<KeyValueStore> kv_store;
  const AgentStoreClientOptions options;
  const Intervals intervals;
  const Pipe wake = make_pipe();

  std::mutex mutex;  // of what follows
  WordRecords words;
  NodeRecords nodes;
  CallerActivity caller;
  StoreSilence store_silence;
  std::chrono::milliseconds last_words_time = kLastWordsTime;

  // Of the thread alone.
  SignRecords signs;
  Clock::time_point next_poll = Clock::time_point::min();

  template <typename Request>
  void ask(const Request& request);
  void go_round();
  std::optional<std::string> read(const std::string& key);
  void read_watched();
  void give_and_read_signs();
  void mark_lost(const std::string& why);
  Clock::duration silence();
  void wake_caller() { write_all(wake.write.get(), "."); }
};

// Of the store; under the mutex.
Clock::duration AgentStoreClient::State::silence() {
  return store_silence.time(options.now(), intervals.max_step);
}

void AgentStoreClient::State::mark_lost(const std::string& why) {
  const std::lock_guard lock(mutex);
  if (nodes.lost.empty()) nodes.lost = why;
  wake_caller();
}

// The word under `key`, where an agent of this job has left one.
std::optional<std::string> AgentStoreClient::State::read(const std::string& key) {
  if (!kv_store->has(key)) return std::nullopt;
  const std::string found = kv_store->get(key);
  std::unique_lock lock(mutex);
  auto word = words.signer.open(key, found);
  // Once for each key: the next round finds the same word.
  if (!word && words.rejected.insert(key).second) {
    lock.unlock();  // the agent does not wait for a log that nobody reads
    base::log_warning(concat("[launch.run] a word under '", key,
                             "' was not left by an agent of this job and is ignored: another secret, or "
                             "somebody else writes to the port"));
  }
  return word;
}

void AgentStoreClient::State::read_watched() {
  // A copy: the agent may add keys while the store is asked.
  std::set<std::string> keys;
  {
    const std::lock_guard lock(mutex);
    keys = words.watched;
  }
  for (const std::string& key : keys) {
    std::optional<std::string> word = read(key);
    if (!word) continue;
    const std::lock_guard lock(mutex);
    words.received.emplace(key, std::move(*word));
    words.watched.erase(key);
    wake_caller();
  }
}

void AgentStoreClient::State::give_and_read_signs() {
  const auto now = options.now();
  if (now < signs.next) return;
  const auto key = [](int node) { return concat("alive/", node); };
  std::string own_sign;
  {
    const std::lock_guard lock(mutex);
    if (!words.signer.is_in_session()) return;
    for (const int node : nodes.expected) {
      if (!signs.of_node[node].silence) signs.of_node[node].silence.emplace(now);
    }
    // A sign stands for the agent, and not for this thread alone. So the agent must have answered the last
    // wake-up, or have said that it is busy.
    if (caller.take()) {
      own_sign = words.signer.sign(key(options.node), std::to_string(++signs.num_given));
    }
  }
  signs.next = now + options.keep_alive_interval;
  if (!own_sign.empty()) kv_store->set(key(options.node), own_sign);
  wake_caller();  // for the next sign
  // Node 0 reads the signs of all nodes. The others read that of node 0 alone, which decides for all.
  const int last = options.node == 0 ? options.nnodes - 1 : 0;
  for (int node = 0; node <= last; ++node) {
    if (node == options.node) continue;
    SignRecords::Sign& sign = signs.of_node[node];
    const std::string word = read(key(node)).value_or("");
    if (!word.empty() && word != sign.word) sign = {word, SilenceTimer(now)};
    if (!sign.silence) continue;
    sign.silence->advance(now, intervals.max_step);
    if (sign.silence->time() > intervals.max_silence) {
      {
        const std::lock_guard lock(mutex);
        nodes.lost_nodes.insert(node);
      }
      mark_lost(concat("node ", node, " has given no sign for ", in_seconds(sign.silence->time()), " s"));
    }
  }
}

// All that asks the store goes through this.
template <typename Request>
void AgentStoreClient::State::ask(const Request& request) {
  {
    const std::lock_guard lock(mutex);
    if (!store_silence.begin_request(options.now())) return;
  }
  try {
    request();
  } catch (const std::exception& error) {
    mark_lost(concat("the store that node 0 keeps is gone: ", base::message_of(error)));
    const std::lock_guard lock(mutex);
    store_silence.set_gone();
    wake_caller();
  }
  const std::lock_guard lock(mutex);
  store_silence.end_request();
}

void AgentStoreClient::State::go_round() {
  give_and_read_signs();
  const auto now = options.now();
  if (now < next_poll) return;
  next_poll = now + intervals.word_round;
  read_watched();
}

AgentStoreClient::AgentStoreClient(std::shared_ptr<KeyValueStore> kv_store,
                                   const AgentStoreClientOptions& options)
    : state_(std::make_shared<State>(std::move(kv_store), options)) {
  ::fcntl(state_->wake.write.get(), F_SETFL, O_NONBLOCK);  // one unread wake-up is enough
  queue_ = std::make_unique<base::SerialQueue>(base::SerialQueue::Options{
      .name = "agent",
      .spin = std::chrono::microseconds(0),
      .idle = [state = state_] { state->ask([&] { state->go_round(); }); },
      .idle_time = state_->intervals.round,
  });
}

AgentStoreClient::~AgentStoreClient() {
  std::unique_lock lock(state_->mutex);
  // A store that has been silent is not given all that time once more.
  const auto patience =
      std::max<Clock::duration>(kLastWordsTime, state_->last_words_time - state_->silence());
  lock.unlock();
  queue_->stop(std::chrono::ceil<std::chrono::milliseconds>(patience));
}

void AgentStoreClient::begin_session(const std::string& session) {
  const std::lock_guard lock(state_->mutex);
  state_->words.signer.begin_session(session);
}

void AgentStoreClient::expect_signs(int node) {
  const std::lock_guard lock(state_->mutex);
  state_->nodes.expected.insert(node);
}

void AgentStoreClient::post(const std::string& key, const std::string& value) {
  const std::lock_guard lock(state_->mutex);  // signed in the order in which they are written
  queue_->submit("post", [state = state_, key, word = state_->words.signer.sign(key, value)] {
    state->ask([&] {
      state->kv_store->set(key, word);
      state->go_round();
    });
  });
}

void AgentStoreClient::watch(const std::string& key) {
  const std::lock_guard lock(state_->mutex);
  if (state_->words.received.count(key) == 0) state_->words.watched.insert(key);
}

bool AgentStoreClient::poll_now(base::Deadline deadline) {
  const auto polled = queue_->submit("poll", [state = state_] {
    state->ask([&] {
      state->next_poll = Clock::time_point::min();
      state->go_round();
    });
  });
  if (!polled.wait(deadline)) return false;
  const std::lock_guard lock(state_->mutex);
  return !state_->store_silence.is_gone();
}

std::optional<std::string> AgentStoreClient::received(const std::string& key) const {
  const std::lock_guard lock(state_->mutex);
  const auto at = state_->words.received.find(key);
  return at == state_->words.received.end() ? std::nullopt : std::optional(at->second);
}

std::vector<std::string> AgentStoreClient::rejected() const {
  const std::lock_guard lock(state_->mutex);
  return {state_->words.rejected.begin(), state_->words.rejected.end()};
}

std::string AgentStoreClient::lost() const {
  const std::lock_guard lock(state_->mutex);
  if (!state_->nodes.lost.empty()) return state_->nodes.lost;
  // The thread may hang in its request, so the caller itself measures how long.
  const Clock::duration silent = state_->silence();
  if (silent <= state_->intervals.max_silence) return "";
  return concat("the store that node 0 keeps has not answered for ", in_seconds(silent), " s");
}

bool AgentStoreClient::is_lost(int node) const {
  const std::lock_guard lock(state_->mutex);
  return state_->store_silence.is_gone() || state_->silence() > state_->intervals.max_silence ||
         state_->nodes.lost_nodes.contains(node);
}

void AgentStoreClient::set_last_words_time(std::chrono::milliseconds time) {
  const std::lock_guard lock(state_->mutex);
  state_->last_words_time = time;
}

std::chrono::milliseconds AgentStoreClient::round_time() const {
  return state_->intervals.round;
}

int AgentStoreClient::fd() const {
  return state_->wake.read.get();
}

void AgentStoreClient::acknowledge() {
  std::array<char, 64> buffer{};
  while (::read(state_->wake.read.get(), buffer.data(), buffer.size()) > 0) {
  }
  const std::lock_guard lock(state_->mutex);
  state_->caller.acknowledge();
}

void AgentStoreClient::busy_until(base::Deadline deadline) {
  const std::lock_guard lock(state_->mutex);
  state_->caller.busy_until(deadline);
}

}  // namespace cohort::launch
