#include "cohort/rpc/internal/agent/early_events.h"

#include <gtest/gtest.h>

#include <optional>
#include <string>
#include <utility>

namespace cohort::rpc {
namespace {

net::Message message_of(const std::string& header) {
  net::Message message;
  message.header = header;
  return message;
}

TEST(EarlyEventsTest, EventsAreKeptInOrderUntilNoneIsLeft) {
  EarlyEvents events;
  net::Message first = message_of("first"), second = message_of("second"), third = message_of("third");
  EXPECT_TRUE(events.keep(nullptr, first));
  EXPECT_TRUE(events.keep_down(nullptr, "died"));
  EXPECT_TRUE(events.keep(nullptr, second));
  std::optional<EarlyEvents::Events> taken = events.take();
  ASSERT_TRUE(taken.has_value());
  ASSERT_EQ(taken->messages.size(), 2U);
  EXPECT_EQ(taken->messages[0].second.header, "first");
  EXPECT_EQ(taken->messages[1].second.header, "second");
  ASSERT_EQ(taken->down.size(), 1U);
  EXPECT_EQ(taken->down[0].second, "died");
  // The first ones are being handled: what comes now must not overtake them.
  EXPECT_TRUE(events.keep(nullptr, third));
  taken = events.take();
  ASSERT_TRUE(taken.has_value());
  ASSERT_EQ(taken->messages.size(), 1U);
  EXPECT_EQ(taken->messages[0].second.header, "third");
  EXPECT_TRUE(taken->down.empty());
  EXPECT_FALSE(events.take().has_value());
}

TEST(EarlyEventsTest, AfterTheJoinNothingIsKept) {
  EarlyEvents events;
  EXPECT_FALSE(events.take().has_value());
  net::Message message = message_of("late");
  EXPECT_FALSE(events.keep(nullptr, message));
  EXPECT_EQ(message.header, "late");  // still the caller's
  EXPECT_FALSE(events.keep_down(nullptr, "died"));
  EXPECT_FALSE(events.take().has_value());
}

}  // namespace
}  // namespace cohort::rpc
