#pragma once

#include <cstdint>
#include <functional>
#include <mutex>
#include <string>
#include <utility>

/// Where the record of a run is kept.
namespace cohort::membership {

/// What a store tells.
struct StoreAnswer {
  enum class Type : std::uint8_t {
    kRecord,    ///< to read(), and after each change: the record as it was a moment ago
    kSwapped,   ///< the compare-and-swap was made; `revision` is the new one
    kConflict,  ///< it was not made: the record is this one
    kUnknown,   ///< the store did not answer: the compare-and-swap was made, or not, or will be
  };
  Type type = Type::kUnknown;
  std::uint64_t revision = 0;  ///< 0: there is no record
  std::string text;            ///< the record; of kSwapped the one that was written; empty for kUnknown
};

/// One text with a revision, which all agents of a run see change in the same order. Threads: any.
class RecordStore {
 public:
  /// Called on any thread, by one at a time. Must not wait.
  using Listener = std::function<void(const StoreAnswer&)>;

  virtual ~RecordStore() = default;
  /// From now on the listener gets each change, or the newest of several. Before any other call, once.
  virtual void watch(Listener listener) = 0;
  /// Asks for the record. Does not wait.
  virtual void read() = 0;
  /// Writes `text` if the revision is still `expected` (0: there is no record). One at a time. Does not wait.
  virtual void compare_and_swap(std::uint64_t expected, std::string text) = 0;
};

/// The store within the agent at the rendezvous endpoint, which alone uses it: answers at once.
class MemoryStore : public RecordStore {
 public:
  void watch(Listener listener) override { listener_ = std::move(listener); }
  void read() override;
  void compare_and_swap(std::uint64_t expected, std::string text) override;

 private:
  std::mutex mutex_;
  Listener listener_;
  std::uint64_t revision_ = 0;
  std::string text_;
};

}  // namespace cohort::membership
