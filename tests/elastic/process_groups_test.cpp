// Groups of processes, one of which is killed.
#include <ATen/ops/full.h>
#include <ATen/ops/zeros.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <fstream>
#include <functional>
#include <iostream>
#include <memory>
#include <sstream>
#include <stdexcept>
#include <string>
#include <vector>

#include "cohort/base/env.h"
#include "cohort/base/internal/fault_points.h"
#include "cohort/elastic/session.h"
#include "cohort/parallel/virtual_ranks/text_gather.h"
#include "fake_agents.h"
#include "tests/support/slowdown.h"
#include "zygote.h"

namespace cohort::elastic {
namespace {

using test::FakeAgents;
using test::Zygote;
using Clock = std::chrono::steady_clock;

// The session's own exchange, in place of a group.
constexpr const char* kExchange = "exchange";

// Makes a group of the generation, and a function that says how many processes have called it.
std::function<std::size_t()> make_count(const std::shared_ptr<Session>& session) {
  const std::string backend = *base::env_string("TEST_BACKEND");
  if (backend == kExchange) {
    return [session] {
      const auto texts = parallel::all_gather_texts(session->exchange().get(), "a process");
      return texts.size();
    };
  }
  return
      [group = session->make_group({.backend = backend, .check_consistency = comm::ConsistencyCheck::kOff})] {
        at::Tensor ones = at::full({1000}, 1.0F);
        group.all_reduce(ones).wait();
        return static_cast<std::size_t>(ones[999].item<float>());
      };
}

// Process 2 asks for leave before the second call, and so the others wait for it.
int run_group_child() {
  try {
    test::stop_at_test_point();
    const std::shared_ptr<Session> session = session_of_process();
    session->set_state(
        {.save = [] { return StateSnapshot{"", {at::zeros({4})}}; }, .load = [](const StateSnapshot&) {}});
    GenerationInfo info = session->enter(0);
    std::function<std::size_t()> count = make_count(session);
    std::ostringstream result;
    result << count();
    session->commit(++info.steps);
    try {
      if (info.process == 2) base::reach_fault_point("waits");
      count();
      throw std::runtime_error("a call without process 2 has ended");
    } catch (const GenerationEnded&) {
      result << " " << Clock::now().time_since_epoch().count();
    }
    info = session->enter(info.steps);
    count = make_count(session);
    result << " " << count();
    session->finish();
    const std::string folder = *base::env_string("TEST_FOLDER");
    std::ofstream(folder + "/result " + std::to_string(::getpid())) << result.str();
    return 0;
  } catch (const std::exception& error) {
    std::cerr << "child failed: " << error.what() << std::endl;
    return 1;
  }
}

// Adds how long the calls of both survivors have waited after the kill, in ms.
void kill_one_of_three(Zygote& zygote, const std::string& backend, std::vector<double>& delays) {
  FakeAgents agents(zygote, {.total_steps = 5});
  agents.variables["TEST_BACKEND"] = backend;
  std::vector<FakeAgents::Child*> all;
  for (int i = 0; i < 3; ++i) all.push_back(&agents.start("waits:1"));
  const auto all_are = [&](const std::vector<FakeAgents::Child*>& children, auto condition) {
    return std::ranges::all_of(children, [&](const auto* child) { return condition(*child); });
  };
  agents.handle_until([&] { return all_are(all, [](const auto& child) { return child.status.is_ready; }); },
                      "processes");
  agents.decide(all, false, "the start");
  agents.handle_until(
      [&] {
        return all[2]->is_asking &&
               all_are(all, [](const auto& child) { return child.status.committed_steps == 1; });
      },
      "a call that waits");
  const Clock::time_point killed = Clock::now();
  agents.kill(*all[2]);
  agents.handle_until([&] { return all[2]->has_ended; }, "the end of a process");
  const std::vector<FakeAgents::Child*> survivors{all[0], all[1]};
  agents.decide(survivors, false, "a process was killed");
  agents.handle_until(
      [&] { return all_are(survivors, [](const auto& child) { return child.status.is_finished; }); },
      "another group");
  agents.end_run(true);
  const std::vector<std::string> results = agents.results();
  ASSERT_EQ(results.size(), 2U) << agents.story();
  for (const std::string& text : results) {
    std::istringstream stream(text);
    std::size_t before = 0, after = 0;
    Clock::rep thrown = 0;
    stream >> before >> thrown >> after;
    EXPECT_EQ(before, 3U);
    EXPECT_EQ(after, 2U);
    const auto waited = Clock::duration(thrown) - killed.time_since_epoch();
    delays.push_back(std::chrono::duration<double, std::milli>(waited).count());
  }
}

// The median of several rounds counts, as a process may wait for its core.
TEST(ElasticProcessesGroupsTest, ACallThatWaitsForAProcessThatIsKilledThrowsGenerationEnded) {
  constexpr int kRounds = 3;
  constexpr double kMaxMs = 100 * test::kSlowdown;
  Zygote zygote(run_group_child);
  for (const char* const backend : {"shm", "gloo", kExchange}) {
    SCOPED_TRACE(backend);
    std::vector<double> delays;
    for (int round = 0; round < kRounds; ++round) {
      ASSERT_NO_FATAL_FAILURE(kill_one_of_three(zygote, backend, delays));
    }
    std::ranges::sort(delays);
    const double median = delays[delays.size() / 2];
    std::cout << backend << ": a call has thrown " << median << " ms after the kill\n";
    EXPECT_LT(median, kMaxMs);
  }
}

}  // namespace
}  // namespace cohort::elastic
