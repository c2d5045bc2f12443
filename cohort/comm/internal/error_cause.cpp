#include "cohort/comm/internal/error_cause.h"

#include <array>
#include <string_view>

#include "cohort/base/error.h"
#include "cohort/base/exception_text.h"

// Note [Words of backends]
// Gloo throws std::runtime_error for everything, and its own types are in no header of LibTorch. TCPStore and
// NCCL throw c10::DistError with the same type for a time that is over and for a peer that is gone. So words
// are all that tells. They are looked for here and nowhere else, without their first letter, which is a
// capital in some. The first row that fits counts: what timed out may also speak of a connection.
// tests/comm/internal/error_cause_test.cpp holds a message of each source; tests/comm/group_test.cpp runs
// into timeouts and dead peers with the LibTorch that is there, and fails where that says it in other words.
namespace cohort::comm {
namespace {

struct Words {
  std::string_view part;
  ErrorCause cause;
};

constexpr std::array kWords = {
    Words{"Invalid scalar type", ErrorCause::kUsage},  // Gloo, of a type that it has no code for
    Words{"imed out", ErrorCause::kTimeout},           // Gloo, MPI, c10d's sockets
    Words{"imeout", ErrorCause::kTimeout},             // TCPStore, NCCL, Gloo for what else waits then
    Words{"closed by peer", ErrorCause::kPeer},        // Gloo
    Words{"has lost a peer", ErrorCause::kPeer},       // ours, of the group's other calls: failed_call.cpp
    Words{"reset by peer", ErrorCause::kPeer},         // ECONNRESET
    Words{"roken pipe", ErrorCause::kPeer},            // EPIPE
    Words{"refused", ErrorCause::kPeer},               // ECONNREFUSED
};

}  // namespace

ErrorCause cause_of(const std::exception& error) {
  if (dynamic_cast<const UsageError*>(&error) != nullptr) return ErrorCause::kUsage;
  if (dynamic_cast<const TimeoutError*>(&error) != nullptr) return ErrorCause::kTimeout;
  if (dynamic_cast<const PeerError*>(&error) != nullptr) return ErrorCause::kPeer;
  if (dynamic_cast<const Error*>(&error) != nullptr) return ErrorCause::kOther;
  const std::string text = base::message_of(error);
  for (const Words& words : kWords) {
    if (text.find(words.part) != std::string::npos) return words.cause;
  }
  return ErrorCause::kOther;
}

}  // namespace cohort::comm
