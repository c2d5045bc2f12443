#pragma once

#include <chrono>
#include <cstdint>
#include <string>
#include <torch/csrc/distributed/c10d/Types.hpp>
#include <vector>

/// What calls of a group are told, and what is counted of them.
namespace cohort::comm {

using c10d::ReduceOp;

/// What one call of a group may say about itself.
struct CallOptions {
  /// From the call to the end of wait(); 0 is the group's.
  std::chrono::milliseconds timeout{0};
};

/// Which collectives are compared between the ranks before the backend sees them. A call comes back at once;
/// a thread of the group's compares it with the other ranks' and then begins it, in the order of calls. Where
/// a rank called something else wait() throws, on every rank.
enum class ConsistencyCheck {
  kFirst,   ///< those of the first 10 steps; the first 1,000 where nobody calls step_done()
  kAlways,  ///< all
  kOff,     ///< none: what differs then is a timeout, or numbers that mean nothing
};

/// Calls of one kind that are over.
struct CallCounters {
  std::int64_t calls = 0;               ///< that have ended, also with an error
  std::int64_t bytes = 0;               ///< on this rank, the larger of what goes in and what comes out
  std::chrono::nanoseconds waiting{0};  ///< the caller was held, in wait() or by the comparison
  std::chrono::nanoseconds total{0};    ///< from the call to the end of wait()
};

/// Backends that this build can make.
std::vector<std::string> backend_names();

}  // namespace cohort::comm
