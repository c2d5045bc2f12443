#pragma once

#include <chrono>
#include <memory>
#include <string>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <vector>

#include "cohort/base/threads/deadline.h"

namespace cohort::comm {

/// What a store that is asked at a deadline may take to answer: beyond it it is silent.
inline constexpr std::chrono::milliseconds kAnswerTime(500);
/// LibTorch adds timeouts to its clock, where longer ones overflow; 24 days.
inline constexpr std::chrono::milliseconds kLongestTime(2147483647);
/// How long after the deadline of a call its last requests may take: its error comes within half a second.
inline constexpr std::chrono::milliseconds kLastAnswerTime(400);

/// Until when what this thread asks of a DeadlineStore may take, while it lives; within another, the sooner
/// one holds.
class StoreDeadline {
 public:
  explicit StoreDeadline(base::Deadline deadline);
  ~StoreDeadline();
  StoreDeadline(const StoreDeadline&) = delete;
  StoreDeadline& operator=(const StoreDeadline&) = delete;
  /// Of the calling thread; never where none lives.
  static base::Deadline current();

 private:
  base::Deadline before_;
};

/// A store whose requests end. LibTorch's waits for an answer without a limit, and for ever where the host
/// that keeps it has gone silent. Here requests run on a thread of the store's own, and the one who asks
/// waits for it until its deadline: that of a StoreDeadline, and at most the store's timeout. A store that
/// was silent once is not asked again: every later request fails at once. It is silent when it has not
/// answered a request within kAnswerTime, and within the store's timeout where the request waits for a key.
/// Ownership: shares `store`; the thread, and what it hangs in, is left behind where the store is silent.
/// Threads: any; one request at a time, the others wait until their deadline.
/// Throws: TimeoutError, where the store is silent or another thread's request takes too long; what the store
/// throws.
class DeadlineStore : public c10d::Store {
 public:
  /// How it waits for keys: in a request that waits, or by asking again and again, for a store whose own
  /// waits do not end in time (FileStore counts whole seconds).
  enum class Waiting : std::uint8_t { kInTheStore, kByAsking };

  /// `name`: what is silent, for errors.
  DeadlineStore(c10::intrusive_ptr<c10d::Store> store, std::string name,
                Waiting waiting = Waiting::kInTheStore);
  ~DeadlineStore() override;
  DeadlineStore(const DeadlineStore&) = delete;
  DeadlineStore& operator=(const DeadlineStore&) = delete;

  using Store::compareSet;
  using Store::set;
  c10::intrusive_ptr<c10d::Store> clone() override;
  void set(const std::string& key, const std::vector<std::uint8_t>& value) override;
  std::vector<std::uint8_t> compareSet(const std::string& key, const std::vector<std::uint8_t>& expected,
                                       const std::vector<std::uint8_t>& value) override;
  std::vector<std::uint8_t> get(const std::string& key) override;
  std::int64_t add(const std::string& key, std::int64_t value) override;
  bool deleteKey(const std::string& key) override;
  bool check(const std::vector<std::string>& keys) override;
  std::int64_t getNumKeys() override;
  void wait(const std::vector<std::string>& keys) override;
  void wait(const std::vector<std::string>& keys, const std::chrono::milliseconds& timeout) override;
  const std::chrono::milliseconds& getTimeout() const noexcept override;
  void setTimeout(const std::chrono::milliseconds& timeout) override;
  void append(const std::string& key, const std::vector<std::uint8_t>& value) override;
  std::vector<std::vector<std::uint8_t>> multiGet(const std::vector<std::string>& keys) override;
  void multiSet(const std::vector<std::string>& keys,
                const std::vector<std::vector<std::uint8_t>>& values) override;
  bool hasExtendedApi() const override;
  void queuePush(const std::string& key, const std::vector<std::uint8_t>& value) override;
  std::vector<std::uint8_t> queuePop(const std::string& key, bool block) override;
  std::int64_t queueLen(const std::string& key) override;
  std::vector<std::string> listKeys() override;

 private:
  struct Worker;
  // Whether a request may wait for a key.
  enum class Waits : std::uint8_t { kNo, kForKey };
  template <typename Body>
  auto ask(const char* what, Body body, Waits waits = Waits::kNo);
  template <typename Body>
  auto ask(const char* what, std::chrono::milliseconds most, Body body, Waits waits);

  std::shared_ptr<Worker> worker_;
  const Waiting waiting_;
};

}  // namespace cohort::comm
