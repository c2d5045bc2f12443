#pragma once

#include <array>
#include <chrono>
#include <cstdint>
#include <mutex>
#include <string>
#include <vector>

#include "cohort/comm/internal/signature.h"

/// What a group was last asked to do, kept for the moment when it hangs. Internal.
namespace cohort::comm {

enum class CallState : std::uint8_t { kBegun, kWaiting, kDone, kFailed };

/// "waiting".
const char* to_string(CallState state);

struct FlightEntry {
  using Clock = std::chrono::steady_clock;
  static constexpr int kFrames = 16;

  Signature signature;
  std::int64_t position = -1;      ///< among the calls that every rank makes; -1: a message
  Clock::time_point begun, since;  ///< `since`: in this state
  CallState state = CallState::kBegun;
  int num_frames = 0;
  std::array<void*, kFrames> frames{};  ///< return addresses, innermost first
};

/// The last calls of a group. Threads: any.
class FlightRecord {
 public:
  static constexpr std::size_t kCalls = 64;

  /// Records a call that begins now, with the stack of its caller; returns what to name it by later.
  std::uint64_t begin(const Signature& signature, std::int64_t position);
  /// Does nothing for a call that was pushed out by later ones.
  void set(std::uint64_t ticket, CallState state);
  /// Oldest first.
  std::vector<FlightEntry> last() const;

 private:
  mutable std::mutex mutex_;
  std::array<FlightEntry, kCalls> entries_;
  std::uint64_t count_ = 0;
};

/// Names the frames of the caller of this library, innermost first: "main+0x2f (train+0x1a2f)".
std::vector<std::string> name_frames(const FlightEntry& entry);

}  // namespace cohort::comm
