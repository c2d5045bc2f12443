#pragma once

#include <ATen/ops/full.h>
#include <ATen/ops/zeros.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <functional>
#include <vector>

#include "cohort/comm/group.h"
#include "cohort/elastic/session.h"
#include "tests/elastic/played_agents.h"

/// Processes of a generation that make groups.
namespace cohort::test {

/// How many processes have called it.
inline int count_calls(const comm::Group& group) {
  at::Tensor ones = at::full({1000}, 1.0F);
  group.all_reduce(ones).wait();
  return static_cast<int>(ones[999].item<float>());
}

inline elastic::StateAccess empty_state() {
  return {.save = [] { return elastic::StateSnapshot{"", {at::zeros({4})}}; }, .load = [](const auto&) {}};
}

/// Processes of one generation, and then of others.
struct GroupRun {
  explicit GroupRun(int size) {
    for (int i = 0; i < size; ++i)
      ranks.push_back(&agents.add({.timeout = std::chrono::milliseconds(20'000)}));
  }
  /// Each process runs the body in the first generation, and then waits for the end of the run.
  void start(
      const std::function<void(elastic::Session& session, const elastic::GenerationInfo& info)>& body) {
    for (PlayedAgents::Rank* const rank : ranks) {
      agents.start(*rank, [body](elastic::Session& session) {
        session.set_state(empty_state());
        try {
          body(session, session.enter(0));
          session.finish();
        } catch (const elastic::RunEnded& ended) {
          EXPECT_TRUE(ended.has_succeeded());
        }
      });
    }
    agents.wait_until_ready();
    agents.decide(ranks);
  }
  void end(const std::vector<PlayedAgents::Rank*>& finishing) {
    agents.wait_until([&] {
      return std::ranges::all_of(finishing,
                                 [](const PlayedAgents::Rank* rank) { return rank->status.is_finished; });
    });
    agents.end_run();
    for (PlayedAgents::Rank* const rank : ranks) agents.join(*rank);
  }
  PlayedAgents agents;
  std::vector<PlayedAgents::Rank*> ranks;
};

}  // namespace cohort::test
