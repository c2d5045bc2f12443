#include "cohort/membership/internal/heard_agents.h"

#include <gtest/gtest.h>

namespace cohort::membership {
namespace {

using std::chrono::milliseconds;

const Time kBegin{std::chrono::hours(1)};
constexpr milliseconds kSilence(100);

TEST(HeardAgentsTest, OneThatIsListenedToOwesASignWithinTheSilence) {
  HeardAgents heard(kSilence);
  EXPECT_FALSE(heard.is_unheard("a", kBegin + 10 * kSilence));  // nobody listens to it
  heard.listen_to("a", kBegin);
  heard.listen_to("a", kBegin + milliseconds(50));  // it owes one already
  EXPECT_FALSE(heard.is_unheard("a", kBegin + kSilence));
  EXPECT_TRUE(heard.is_unheard("a", kBegin + kSilence + milliseconds(1)));
  heard.on_message("a", kBegin + milliseconds(80));
  EXPECT_FALSE(heard.is_unheard("a", kBegin + milliseconds(180)));
  EXPECT_TRUE(heard.is_unheard("a", kBegin + milliseconds(181)));
  heard.listen_only_to({"b"});
  EXPECT_FALSE(heard.is_unheard("a", kBegin + 10 * kSilence));
}

TEST(HeardAgentsTest, OneThatDiedIsUnheardUntilItSpeaks) {
  HeardAgents heard(kSilence);
  heard.on_death("a");
  EXPECT_TRUE(heard.is_unheard("a", kBegin));
  heard.forget(kBegin, [](const std::string&) { return true; });
  EXPECT_TRUE(heard.is_dead("a"));
  heard.on_message("a", kBegin);
  EXPECT_FALSE(heard.is_unheard("a", kBegin));
  heard.on_death("a");
  heard.forget(kBegin, [](const std::string& incarnation) { return incarnation != "a"; });
  EXPECT_FALSE(heard.is_dead("a"));
}

TEST(HeardAgentsTest, TheTimeOfAClosedPortEndsWithAMessage) {
  HeardAgents heard(kSilence);
  EXPECT_EQ(heard.on_closed_port("a", kBegin), kBegin);
  EXPECT_EQ(heard.on_closed_port("a", kBegin + kSilence), kBegin);
  heard.on_message("a", kBegin + kSilence);
  EXPECT_EQ(heard.on_closed_port("a", kBegin + 2 * kSilence), kBegin + 2 * kSilence);
}

TEST(HeardAgentsTest, AGapOfThisProcessCountsForNobody) {
  HeardAgents heard(kSilence);
  heard.listen_to("a", kBegin);
  heard.on_closed_port("a", kBegin);
  heard.on_gap(kBegin + 5 * kSilence);
  EXPECT_FALSE(heard.is_unheard("a", kBegin + 6 * kSilence));
  EXPECT_TRUE(heard.is_unheard("a", kBegin + 6 * kSilence + milliseconds(1)));
  EXPECT_EQ(heard.on_closed_port("a", kBegin + 6 * kSilence), kBegin + 6 * kSilence);
}

}  // namespace
}  // namespace cohort::membership
