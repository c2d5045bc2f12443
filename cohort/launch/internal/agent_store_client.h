#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "cohort/base/key_value_store.h"
#include "cohort/base/secret.h"
#include "cohort/base/threads/deadline.h"
#include "cohort/base/threads/serial_queue.h"

namespace cohort::launch {

using base::KeyValueStore;

struct AgentStoreClientOptions {
  int node = 0;
  int nnodes = 1;
  /// Between two looks at the store for words. From 100 nodes on longer in proportion: one store
  /// answers them all, and the ranks' rendezvous is there too. Signs come and go by keep_alive_interval
  /// alone.
  std::chrono::milliseconds interval{100};
  std::chrono::milliseconds keep_alive_interval = std::chrono::seconds(5);
  int keep_alive_max_attempt = 3;
  /// What words are signed with (SignedWords); without it everybody who writes to the store is believed.
  std::optional<base::Secret> secret = std::nullopt;
  /// The clock by which signs are given and missed.
  std::function<std::chrono::steady_clock::time_point()> now = std::chrono::steady_clock::now;
};

/// Looks at the store from a thread of its own, so that an agent that supervises ranks never waits for it.
///
/// Every keep_alive_interval of a session each agent says that it lives; one that does not,
/// keep_alive_max_attempt times, is lost. A sign says that the caller is alive: it answers each wake-up by
/// acknowledge(). Where the caller hangs, signs stay away, though the thread continues. That counts from
/// expect_signs(), or from its first sign: how long one is waited for until it comes is the rendezvous'
/// matter. Agents look at node 0, node 0 at all: what two others see of each other comes through it. Time in
/// which this process stood still itself (a signal, a suspended job or machine) counts as a few seconds at
/// most: the others may have stood still too. Threads: one caller at a time. Going, it writes what was
/// posted, and waits for that as long as it was told; a store that hangs is left behind with its thread.
class AgentStoreClient {
 public:
  /// How long its end waits for what was posted, until it is told otherwise.
  static constexpr std::chrono::milliseconds kLastWordsTime{400};
  AgentStoreClient(std::shared_ptr<KeyValueStore> kv_store, const AgentStoreClientOptions& options);
  ~AgentStoreClient();
  AgentStoreClient(const AgentStoreClient&) = delete;
  AgentStoreClient& operator=(const AgentStoreClient&) = delete;

  /// What is posted and read from now on is of this session (SignedWords); signs are given from now on.
  void begin_session(const std::string& session);
  /// That node has come: from now on it is lost where its signs stay away, also the first one.
  void expect_signs(int node);
  /// The others will find `value`; posts are written in order.
  void post(const std::string& key, const std::string& value);
  /// From now on looks for that key, until a word of this job is there.
  void watch(const std::string& key);
  /// Looks at once for all that is watched. Returns whether that was done before the deadline. Blocks.
  bool poll_now(base::Deadline deadline);
  /// What stands there, once it was seen.
  std::optional<std::string> received(const std::string& key) const;
  /// Keys under which something stood that no agent of this job has left, sorted. A warning has named each.
  std::vector<std::string> rejected() const;
  /// Who is lost, and why; empty as long as all are there. It is called every half keep_alive_interval at
  /// least.
  std::string lost() const;
  /// Whether that node's signs stay away; every node's where this one has lost the store, or it is silent.
  bool is_lost(int node) const;
  /// From now on its end waits as long for what was posted, less the time for which the store is silent.
  void set_last_words_time(std::chrono::milliseconds time);
  /// Between two rounds of its own; also what the caller is to look by.
  std::chrono::milliseconds round_time() const;
  /// Readable when something was received or lost, and once in each keep_alive_interval.
  int fd() const;
  /// Empties it: the caller continues.
  void acknowledge();
  /// Until the next acknowledge(), and until the deadline at most, signs continue without an answer: the
  /// caller has work to do.
  void busy_until(base::Deadline deadline);

 private:
  struct State;

  std::shared_ptr<State> state_;
  std::unique_ptr<base::SerialQueue> queue_;  // of the thread that asks the store
};

}  // namespace cohort::launch
