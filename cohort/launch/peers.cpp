#include "cohort/launch/peers.h"

#include <fcntl.h>
#include <unistd.h>

#include <array>
#include <condition_variable>
#include <deque>
#include <map>
#include <mutex>
#include <set>
#include <thread>

#include "cohort/core/error.h"
#include "cohort/core/exception_text.h"
#include "cohort/launch/worker.h"

namespace cohort::launch {
namespace {

using core::concat;
using Clock = std::chrono::steady_clock;

long in_seconds(Clock::duration time) {
  return static_cast<long>(std::chrono::duration_cast<std::chrono::seconds>(time).count());
}

}  // namespace

struct Peers::State {
  std::shared_ptr<Board> board;
  PeersOptions options;
  Clock::duration patience;

  std::mutex mutex;
  std::condition_variable changed;
  std::deque<std::pair<std::string, std::string>> posts;  // the first is being written
  std::set<std::string> watched;                          // and not seen yet
  std::map<std::string, std::string> received;
  std::string lost;
  Clock::time_point last_round = Clock::now();
  bool stop = false;
  bool done = false;
  Pipe wake = make_pipe();
  std::thread thread;

  // Of the thread alone.
  struct Sign {
    std::int64_t count = -1;
    Clock::time_point seen = Clock::now();
  };
  std::map<int, Sign> signs;
  Clock::time_point next_sign = Clock::now();

  void write_posts();
  void read_watched();
  void give_and_read_signs();
  void lose(const std::string& why);
  void ring() { write_all(wake.write.get(), "."); }
};

void Peers::State::lose(const std::string& why) {
  const std::lock_guard lock(mutex);
  if (lost.empty()) lost = why;
  ring();
}

void Peers::State::write_posts() {
  for (;;) {
    std::pair<std::string, std::string> post;
    {
      const std::lock_guard lock(mutex);
      if (posts.empty()) return;
      post = posts.front();
    }
    board->set(post.first, post.second);
    const std::lock_guard lock(mutex);
    posts.pop_front();
  }
}

void Peers::State::read_watched() {
  std::set<std::string> keys;
  {
    const std::lock_guard lock(mutex);
    keys = watched;
  }
  for (const std::string& key : keys) {
    if (!board->has(key)) continue;
    std::string value = board->get(key);
    const std::lock_guard lock(mutex);
    received.emplace(key, std::move(value));
    watched.erase(key);
    ring();
  }
}

void Peers::State::give_and_read_signs() {
  const auto now = Clock::now();
  if (now < next_sign) return;
  next_sign = now + options.keep_alive_interval;
  const auto key = [](int node) { return concat("alive/", node); };
  board->add(key(options.node), 1);
  const int last = options.node == 0 ? options.nnodes - 1 : 0;
  for (int node = 0; node <= last; ++node) {
    if (node == options.node) continue;
    Sign& sign = signs[node];
    const std::int64_t count = board->add(key(node), 0);
    if (count != sign.count) sign = {count, now};
    if (now - sign.seen > patience) {
      lose(concat("node ", node, " has given no sign for ", in_seconds(now - sign.seen), " s"));
    }
  }
}

void Peers::look(const std::shared_ptr<State>& state) {
  bool stop = false;
  try {
    while (!stop) {
      {
        std::unique_lock lock(state->mutex);
        state->changed.wait_for(lock, state->options.interval,
                                [&] { return state->stop || !state->posts.empty(); });
        stop = state->stop;
      }
      state->write_posts();
      state->give_and_read_signs();
      state->read_watched();
      const std::lock_guard lock(state->mutex);
      state->last_round = Clock::now();
    }
  } catch (const std::exception& error) {
    state->lose(concat("the store that node 0 keeps is gone: ", core::message_of(error)));
  }
  const std::lock_guard lock(state->mutex);
  state->done = true;
  state->changed.notify_all();
}

Peers::Peers(std::shared_ptr<Board> board, const PeersOptions& options) : state_(std::make_shared<State>()) {
  state_->board = std::move(board);
  state_->options = options;
  ::fcntl(state_->wake.write.get(), F_SETFL, O_NONBLOCK);  // a bell that was not heard need not ring again
  state_->patience = options.keep_alive_interval * options.keep_alive_max_attempt;
  state_->thread = std::thread([state = state_] { look(state); });
}

Peers::~Peers() {
  std::thread thread = std::move(state_->thread);
  std::unique_lock lock(state_->mutex);
  state_->stop = true;
  state_->changed.notify_all();
  const bool done = state_->changed.wait_for(lock, state_->patience, [&] { return state_->done; });
  lock.unlock();
  if (done) {
    thread.join();
  } else {
    thread.detach();
  }
}

void Peers::post(const std::string& key, const std::string& value) {
  const std::lock_guard lock(state_->mutex);
  state_->posts.emplace_back(key, value);
  state_->changed.notify_all();
}

void Peers::watch(const std::string& key) {
  const std::lock_guard lock(state_->mutex);
  if (state_->received.count(key) == 0) state_->watched.insert(key);
}

std::optional<std::string> Peers::received(const std::string& key) const {
  const std::lock_guard lock(state_->mutex);
  const auto at = state_->received.find(key);
  return at == state_->received.end() ? std::nullopt : std::optional(at->second);
}

std::string Peers::lost() const {
  const std::lock_guard lock(state_->mutex);
  const auto silent = Clock::now() - state_->last_round;
  if (!state_->lost.empty() || state_->done || silent <= state_->patience) return state_->lost;
  return concat("the store that node 0 keeps has not answered for ", in_seconds(silent), " s");
}

int Peers::fd() const {
  return state_->wake.read.get();
}

void Peers::news() {
  std::array<char, 64> buffer{};
  while (::read(state_->wake.read.get(), buffer.data(), buffer.size()) > 0) {
  }
}

}  // namespace cohort::launch
