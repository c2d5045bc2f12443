#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "cohort/core/deadline.h"

namespace cohort::core {

/// Where processes leave words for each other, each a key with a value that is written once, and count. No
/// LibTorch: it is a store of c10d's, or a map in tests.
class Board {
 public:
  virtual ~Board() = default;
  virtual void set(const std::string& key, const std::string& value) = 0;
  virtual bool has(const std::string& key) = 0;
  virtual std::string get(const std::string& key) = 0;  ///< of a key that is there
  /// Adds to a count, 0 at first, and returns what it is then.
  virtual std::int64_t add(const std::string& key, std::int64_t value) = 0;
};

/// Waits until each of `size` ranks has set `prefix`/rank; returns those that have not when the deadline
/// passes.
std::vector<int> missing_ranks(Board& board, const std::string& prefix, int size, Deadline deadline);

}  // namespace cohort::core
