#pragma once

#include <string_view>
#include <utility>
#include <vector>

#include "cohort/base/error.h"

namespace cohort::comm {

/// An error that says itself which ranks are missing, so that nobody need ask the store who they are.
class NamesRanks {
 public:
  explicit NamesRanks(std::vector<int> ranks) : ranks_(std::move(ranks)) {}
  virtual ~NamesRanks() = default;
  /// Those that have not come, or are gone; sorted.
  const std::vector<int>& ranks() const { return ranks_; }

 private:
  std::vector<int> ranks_;
};

/// A TimeoutError or PeerError that is one. Its words name the ranks too.
template <typename ErrorType>
class MissingRanks : public ErrorType, public NamesRanks {
 public:
  MissingRanks(std::vector<int> ranks, std::string_view where, std::string_view what,
               std::string_view hint = "")
      : ErrorType(where, what, hint), NamesRanks(std::move(ranks)) {}
};

}  // namespace cohort::comm
