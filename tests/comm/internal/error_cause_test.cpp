// What messages of the backends and stores that there are stand for.
#include "cohort/comm/internal/error_cause.h"

#include <gtest/gtest.h>

#include <stdexcept>

#include "cohort/base/error.h"
#include "cohort/comm/internal/group_state.h"
#include "tests/support/throws.h"

namespace cohort::comm {
namespace {

ErrorCause cause_of_words(const char* words) {
  return cause_of(std::runtime_error(words));
}

TEST(ErrorCauseTest, WordsOfBackendsAreToldApart) {
  for (const char* words :
       {"Timed out waiting 300ms for recv operation to complete", "Application timeout caused pair closure",
        "wait timeout after 300ms, keys: /default_pg/0/a", "Socket Timeout",
        "The client socket has timed out after 300ms while trying to connect to (127.0.0.1, 1).",
        "connection timed out", "another call on this rank timed out",
        "Watchdog caught collective operation timeout: WorkNCCL(SeqNum=1)"}) {
    EXPECT_EQ(cause_of_words(words), ErrorCause::kTimeout) << words;
  }
  for (const char* words :
       {"another call on this rank has lost a peer", "Connection closed by peer [127.0.0.1]:4000",
        "Connection reset by peer", "Broken pipe", "connect [127.0.0.1]:4000: Connection refused"}) {
    EXPECT_EQ(cause_of_words(words), ErrorCause::kPeer) << words;
  }
  EXPECT_EQ(cause_of_words("Invalid scalar type"), ErrorCause::kUsage);
  EXPECT_EQ(cause_of_words("it was aborted"), ErrorCause::kOther);
}

TEST(ErrorCauseTest, ErrorsOfOursAreWhatTheirTypeSaysWhateverTheirWords) {
  EXPECT_EQ(cause_of(UsageError("a.b", "timed out")), ErrorCause::kUsage);
  EXPECT_EQ(cause_of(TimeoutError("a.b", "connection refused")), ErrorCause::kTimeout);
  EXPECT_EQ(cause_of(PeerError("a.b", "rank 1 died after its call had timed out")), ErrorCause::kPeer);
  EXPECT_EQ(cause_of(CommError("a.b", "the group failed before: timed out")), ErrorCause::kOther);
  EXPECT_EQ(cause_of(SystemError("a.b", "connection refused")), ErrorCause::kOther);
}

TEST(ErrorCauseTest, AnErrorIsThrownAsWhatItStandsFor) {
  const auto thrown = [](const std::exception& error) {
    throw_translated(error, "comm.group", "all_reduce");
  };
  COHORT_EXPECT_THROW_WITH(thrown(std::runtime_error("Invalid scalar type")), UsageError,
                           "[comm.group] all_reduce: Invalid scalar type");
  COHORT_EXPECT_THROW_WITH(thrown(std::runtime_error("Socket Timeout")), TimeoutError,
                           "or raise the timeout");
  COHORT_EXPECT_THROW_WITH(thrown(std::runtime_error("Broken pipe")), PeerError,
                           "Try: look for the first rank");
  COHORT_EXPECT_THROW_WITH(thrown(PeerError("a.b", "it timed out")), PeerError, "it timed out");
  COHORT_EXPECT_THROW_WITH(thrown(std::runtime_error("it was aborted")), CommError,
                           "all_reduce: it was aborted");
}

}  // namespace
}  // namespace cohort::comm
