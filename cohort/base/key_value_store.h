#pragma once

#include <chrono>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "cohort/base/threads/deadline.h"

namespace cohort::base {

/// Where processes leave words for each other, each a key with a value that is written once, and count. No
/// LibTorch: it is a store of c10d's, or a map in tests.
class KeyValueStore {
 public:
  virtual ~KeyValueStore() = default;
  /// Leaves `value` under `key`, where every process sees it.
  virtual void set(const std::string& key, const std::string& value) = 0;
  /// Whether the key is there now; does not wait.
  virtual bool has(const std::string& key) = 0;
  virtual std::string get(const std::string& key) = 0;  ///< of a key that is there
  /// Adds to a count, 0 at first, and returns what it is then.
  virtual std::int64_t add(const std::string& key, std::int64_t value) = 0;

  // As one request where the store can, else by the ones above.

  /// Whether all of the keys are there now; does not wait.
  virtual bool has_all(const std::vector<std::string>& keys);
  /// Waits until all keys are there; returns whether they are. What came in the last moment may be missed.
  virtual bool wait(const std::vector<std::string>& keys, Deadline deadline);
  /// Of keys that are there.
  virtual std::vector<std::string> get_all(const std::vector<std::string>& keys);
  /// Takes a key away, also a count. Where the store cannot, it stays.
  virtual void remove(const std::string& /*key*/) {}
};

/// Asks again and again until all keys are there; returns whether they are.
bool poll_for(KeyValueStore& kv_store, const std::vector<std::string>& keys, Deadline deadline);

/// Waits until each of `size` ranks has set `prefix`/rank; returns those that have not when the deadline
/// passes. One request where all come in time.
std::vector<int> missing_ranks(KeyValueStore& kv_store, const std::string& prefix, int size,
                               Deadline deadline);

/// What all_gather_words() gives.
struct Words {
  std::vector<std::string> of_rank;  ///< empty where some are missing
  std::vector<int> missing;          ///< ranks whose word did not come, sorted
};

/// How much longer than rank 0 the others wait in all_gather_words() for what it has collected. Then they
/// look themselves who is missing.
inline constexpr std::chrono::milliseconds kCollectTime(150);

/// Waits until each of `size` ranks has left a word under `key`, and returns all of them, on each rank. Rank
/// 0 collects them, so that it takes 3 requests a rank, and 1 more. Blocks until the deadline, and
/// kCollectTime longer, at most.
Words all_gather_words(KeyValueStore& kv_store, const std::string& key, int rank, int size,
                       const std::string& word, Deadline deadline);

/// Takes away what this rank left there. Once all have returned from all_gather_words().
void remove_word(KeyValueStore& kv_store, const std::string& key, int rank);

/// A barrier of the ranks of a job, over their store. 2 requests a rank, and 2 for each 62 ranks.
class StoreBarrier {
 public:
  /// Ownership: refers to the store.
  StoreBarrier(KeyValueStore& kv_store, std::string key, int rank, int size)
      : kv_store_(kv_store), key_(std::move(key)), rank_(rank), size_(size) {}
  /// Says that this rank is here: once.
  void arrive();
  /// Waits until all are here, or one rank has released all; returns whether that is so. For a rank that has
  /// arrived.
  bool wait(Deadline deadline);
  /// Releases all ranks from wait(). For a rank that has not arrived, and never will.
  void release_all();
  /// Ranks that are not here now, sorted.
  std::vector<int> missing();
  /// Takes away what it left on the store. One rank calls it, when none waits any more.
  void remove();

 private:
  static constexpr int kBits = 62;  // of ranks in one count
  int num_words() const { return (size_ + kBits - 1) / kBits; }
  std::int64_t all_of(int word) const;
  std::string key_of(int word) const;

  KeyValueStore& kv_store_;
  const std::string key_;
  const int rank_, size_;
  bool is_released_ = false;
};

}  // namespace cohort::base
