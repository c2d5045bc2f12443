#include "cohort/elastic/internal/agent_link.h"

#include <gtest/gtest.h>

#include <chrono>
#include <future>
#include <stdexcept>
#include <string>

#include "tests/support/patience.h"

namespace cohort::elastic {
namespace {

using membership::RankLink;
using membership::RankStatus;

std::uint64_t received_steps(RankLink& agent) {
  const auto text = agent.receive(test::patience());
  return text ? membership::parse_rank_status(*text).committed_steps : 0;
}

// The next step may take an hour.
TEST(AgentLinkTest, AStatusIsSentSoonAlsoWhereNoOtherOneFollows) {
  auto [agent, rank] = RankLink::make_pair();
  AgentLink link(std::move(rank), {.on_order = [](const auto&) {}, .on_end = [](const std::string&) {}});
  link.update([](RankStatus& status) { status.committed_steps = 1; });
  EXPECT_EQ(received_steps(agent), 1U);
  for (std::uint64_t steps = 2; steps <= 5; ++steps) {
    link.update([&](RankStatus& status) { status.committed_steps = steps; }, AgentLink::When::kSoon);
    EXPECT_EQ(received_steps(agent), steps);
  }
}

TEST(AgentLinkTest, ManyChangesAreFewStatuses) {
  auto [agent, rank] = RankLink::make_pair();
  AgentLink link(std::move(rank), {.on_order = [](const auto&) {}, .on_end = [](const std::string&) {}});
  constexpr std::uint64_t kSteps = 2'000;
  const auto begin = std::chrono::steady_clock::now();
  for (std::uint64_t steps = 1; steps <= kSteps; ++steps) {
    link.update([&](RankStatus& status) { status.committed_steps = steps; }, AgentLink::When::kSoon);
  }
  std::uint64_t count = 1;
  while (received_steps(agent) != kSteps) ++count;
  const std::chrono::duration<double, std::milli> time = std::chrono::steady_clock::now() - begin;
  EXPECT_LE(static_cast<double>(count), 2 + time.count() / 20);
}

TEST(AgentLinkTest, WhateverIsThrownEndsTheLink) {
  auto [agent, rank] = RankLink::make_pair();
  std::promise<std::string> end;
  AgentLink link(std::move(rank), {.on_order = [](const auto&) { throw std::bad_alloc(); },
                                   .on_end = [&](const std::string& why) { end.set_value(why); }});
  agent.send(to_text(membership::RankOrder()), test::patience());
  auto why = end.get_future();
  ASSERT_EQ(why.wait_for(std::chrono::seconds(20)), std::future_status::ready);
  EXPECT_NE(why.get(), "");
}

}  // namespace
}  // namespace cohort::elastic
