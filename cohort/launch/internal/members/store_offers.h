#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <string>
#include <utility>

namespace cohort::launch {

/// A key-value store that this agent serves.
struct ServedStore {
  std::string address;         ///< "host:port"
  std::shared_ptr<void> keep;  ///< ends the store when it goes
};

/// The stores that this agent serves for ranks that start anew with each generation. Always: the one on offer
/// has had no ranks. Ranks of the generation before may still be on their way out, so its store lives on as
/// long as the next one. Threads: one caller. Not for users of the library.
class StoreOffers {
 public:
  using Make = std::function<ServedStore()>;

  explicit StoreOffers(Make make) : make_(std::move(make)), offered_(make_()) {}

  /// Of the store on offer.
  const std::string& address() const { return offered_.address; }
  /// The newest generation has this store. Returns whether another one is on offer now. A generation that was
  /// not seen may have had the one that was.
  bool note_generation(std::uint64_t number, const std::string& address) {
    const std::uint64_t before = std::exchange(generation_, number);
    if (number == before || (address != offered_.address && number == before + 1)) return false;
    ServedStore next = make_();
    used_.push_back(std::exchange(offered_, std::move(next)));
    if (used_.size() > kKept) used_.pop_front();
    return true;
  }

 private:
  static constexpr std::size_t kKept = 2;

  const Make make_;
  ServedStore offered_;
  std::uint64_t generation_ = 0;
  std::deque<ServedStore> used_;
};

}  // namespace cohort::launch
