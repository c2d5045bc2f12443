// Groups and stores of a generation's processes: sessions over net, each with an agent that the test plays.
#include <ATen/ops/full.h>
#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <filesystem>
#include <memory>
#include <string>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <vector>

#include "cohort/comm/backend.h"
#include "cohort/comm/internal/group_state.h"
#include "cohort/elastic/internal/net_slice_exchange.h"
#include "cohort/elastic/run.h"
#include "cohort/elastic/session.h"
#include "cohort/parallel/virtual_ranks/text_gather.h"
#include "tests/elastic/groups/group_run.h"
#include "tests/support/comes_true.h"
#include "tests/support/header_examples.h"
#include "tests/support/slowdown.h"
#include "tests/support/temp_dir.h"
#include "tests/support/throws.h"

namespace cohort::elastic {
namespace {

using comm::ConsistencyCheck;
using test::count_calls;
using test::empty_state;
using test::GroupRun;
using test::PlayedAgents;
using GroupRank = PlayedAgents::Rank;
using std::chrono::milliseconds;

// One of three processes does not come.
TEST(ElasticSessionGroupsTest, TheMakingOfAGroupEndsWithTheGeneration) {
  for (const char* const backend : {"shm", "gloo"}) {
    SCOPED_TRACE(backend);
    GroupRun run(2);
    std::atomic<bool> is_making{false};
    run.start([&](Session& session, GenerationInfo info) {
      if (info.process == 0) {
        is_making = true;
        COHORT_EXPECT_THROW_WITH(session.make_group({.backend = backend}), GenerationEnded, "2 follows");
      } else {
        test::wait_until([&] { return session.must_enter(); });
      }
      session.enter(0);
      EXPECT_EQ(count_calls(session.make_group({.backend = backend})), 2);
    });
    run.agents.wait_until([&] { return is_making.load(); });
    run.agents.decide(run.ranks);
    run.end(run.ranks);
  }
}

// What fails in a process alone is no sign of the generation's end, for which it would wait.
TEST(ElasticSessionGroupsTest, AProcessThatCannotMakeAGroupThrowsAtOnce) {
  const char* const name = "fails in process 0";
  static std::once_flag is_registered;  // where the test is repeated
  std::call_once(is_registered, [&] {
    comm::register_backend(name, {.make =
                                      [](const comm::BackendOptions& options) {
                                        if (options.rank == 0) throw SystemError("test", "no space left");
                                        auto made = comm::backend_type("fake").make(options);
                                        made.is_distributed = true;
                                        return made;
                                      },
                                  .ends_calls = true});
  });
  GroupRun run(2);
  std::atomic<bool> has_failed{false};
  run.start([&](Session& session, GenerationInfo info) {
    if (info.process == 0) {
      const base::Deadline waited(milliseconds(2'500));
      COHORT_EXPECT_THROW_WITH(session.make_group({.backend = name}), SystemError, "no space left");
      EXPECT_FALSE(waited.expired());
      has_failed = true;
      test::wait_until([&] { return session.must_enter(); });
    } else {
      COHORT_EXPECT_THROW_WITH(session.make_group({.backend = name}), GenerationEnded, "2 follows");
    }
    session.enter(0);
  });
  run.agents.wait_until([&] { return has_failed.load(); });
  run.agents.decide(run.ranks);
  run.end(run.ranks);
}

// Others may have made it, and would give the next one another number.
TEST(ElasticSessionGroupsTest, AfterAGroupThatCouldNotBeMadeTheGenerationHasNoFurtherOne) {
  GroupRun run(1);
  std::atomic<bool> has_failed{false};
  run.start([&](Session& session, GenerationInfo) {
    COHORT_EXPECT_THROW_WITH(session.make_group({.backend = "none such"}), UsageError, "none such");
    COHORT_EXPECT_THROW_WITH(session.make_group({}), UsageError, "group 0 of generation 1 could not be made");
    has_failed = true;
    test::wait_until([&] { return session.must_enter(); });
    session.enter(0);
    EXPECT_EQ(count_calls(session.make_group({})), 1);
  });
  run.agents.wait_until([&] { return has_failed.load(); });
  run.agents.decide(run.ranks);
  run.end(run.ranks);
}

TEST(ElasticSessionGroupsTest, TheStoreOfAGenerationGoesWithIt) {
  GroupRun run(2);
  std::atomic<int> num_waiting{0};
  run.start([&](Session& session, GenerationInfo info) {
    const auto before = session.store();
    before->set(base::concat("from ", info.process), std::string("value"));
    before->wait({"from 0", "from 1"});
    ++num_waiting;
    COHORT_EXPECT_THROW_WITH(before->wait({"never"}), GenerationEnded, "generation 2 follows");
    COHORT_EXPECT_THROW_WITH(before->check({"from 0"}), GenerationEnded, "generation 1 has ended");
    session.enter(0);
    EXPECT_FALSE(session.store()->check({"from 0"}));
    count_calls(session.make_group({}));
  });
  run.agents.wait_until([&] { return num_waiting == 2; });
  run.agents.decide(run.ranks);
  run.agents.wait_until([&] { return run.ranks[0]->status.is_finished && run.ranks[1]->status.is_finished; });
  membership::NetStore client({.address = run.agents.store().address()});
  EXPECT_TRUE(client.has("generation/1/user/from 0")) << "somebody may still be in a step of it";
  EXPECT_FALSE(client.has("generation/3/user/from 0"));
  COHORT_EXPECT_THROW_WITH(client.has("generation/1/user/from 0"), membership::StaleGeneration, "has ended");
  EXPECT_GT(run.agents.store().num_keys(), 0U) << "of the second";
  EXPECT_FALSE(client.has("generation/4/user/from 0"));
  EXPECT_EQ(run.agents.store().num_keys(), 0U);
  run.end(run.ranks);
}

// Of the step that is under way all processes are there. One that joins is in the next generation already.
TEST(ElasticSessionGroupsTest, APlannedChangeLetsAStepEnd) {
  GroupRun run(2);
  GroupRank& joining = run.agents.add({.timeout = milliseconds(20'000)});
  run.agents.start(joining, [](Session& session) {
    session.set_state(empty_state());
    session.enter(0);
    EXPECT_EQ(count_calls(session.make_group({})), 3);
    session.finish();
  });
  std::atomic<int> num_ready{0};
  run.start([&](Session& session, GenerationInfo info) {
    comm::Group group = session.make_group({});
    const auto store = session.store();
    ++num_ready;
    test::wait_until([&] { return session.must_enter(); });
    membership::NetStore client({.address = run.agents.store().address()});
    test::wait_until([&] { return client.has("generation/2/address/2"); });
    EXPECT_FALSE(session.must_leave());
    group.barrier();
    EXPECT_EQ(count_calls(group), 2);
    EXPECT_EQ(count_calls(session.make_group({})), 2) << "a second group";
    store->set(base::concat("from ", info.process), std::string("value"));
    store->wait({"from 0", "from 1"});
    session.commit(++info.steps);
    session.enter(info.steps);
    COHORT_EXPECT_THROW_WITH(count_calls(group), GenerationEnded, "this process has left it");
    EXPECT_EQ(count_calls(session.make_group({})), 3);
  });
  run.ranks.push_back(&joining);
  run.agents.wait_until([&] { return num_ready == 2; });
  run.agents.decide(run.ranks, /*is_planned=*/true);
  run.end(run.ranks);
}

// Where a process died then, no process would have the state any more.
TEST(ElasticSessionGroupsTest, AGroupIsNotCalledWhileTheStateChanges) {
  GroupRun run(1);
  run.start([&](Session& session, GenerationInfo) {
    const comm::Group group = session.make_group({});
    const auto store = session.store();
    session.begin_changes();
    const std::string words = "after begin_changes() in generation 1";
    COHORT_EXPECT_THROW_WITH(count_calls(group), UsageError, words);
    COHORT_EXPECT_THROW_WITH(group.barrier(), UsageError, words);
    COHORT_EXPECT_THROW_WITH(group.subgroup({0}), UsageError, words);
    COHORT_EXPECT_THROW_WITH(store->check({"key"}), UsageError, words);
    COHORT_EXPECT_THROW_WITH(session.make_group({}), UsageError, words);
    session.commit(1);
    EXPECT_EQ(count_calls(group), 1);
    EXPECT_EQ(count_calls(session.make_group({})), 1) << "no attempt has failed";
  });
  run.end(run.ranks);
}

// A slow process is named by the time that each one works in a step.
TEST(ElasticSessionGroupsTest, WaitsInAGroupAreNoWork) {
  constexpr std::chrono::duration<double> kLate = milliseconds(60) * test::kSlowdown;
  GroupRun run(2);
  run.start([&](Session& session, GenerationInfo info) {
    const comm::Group group = session.make_group({});
    const auto exchange = std::dynamic_pointer_cast<NetSliceExchange>(session.exchange());
    group.barrier();
    session.commit(1);  // what came before is no part of the step
    const base::Deadline works(kLate);
    test::wait_until([&] { return info.process == 0 || works.expired(); });
    EXPECT_EQ(count_calls(group), 2);
    group.barrier();
    session.commit(2);
    parallel::all_gather_texts(exchange.get(), "the times of step 2");
    const std::vector<double> seconds = exchange->end_step({});
    EXPECT_LT(seconds[0], kLate.count());
    EXPECT_GE(seconds[1], kLate.count());
  });
  run.end(run.ranks);
}

// As where the session's own exchange waits for one: others continue without it, or with new links.
TEST(ElasticSessionGroupsTest, AProcessThatIsStuckIsLostForWhoeverWaitsForIt) {
  const milliseconds timeout = test::kSlowdown * milliseconds(50);
  for (const bool is_in_call : {false, true}) {
    SCOPED_TRACE(is_in_call);
    GroupRun run(2);
    run.start([&](Session& session, GenerationInfo info) {
      comm::Group group;
      if (is_in_call) group = session.make_group({});
      if (info.process == 1) {
        test::wait_until([&] { return session.must_enter(); });
      } else if (is_in_call) {
        group.shared_state()->timeout = timeout;
        COHORT_EXPECT_THROW_WITH(count_calls(group), GenerationEnded, "ms for process 1 in all_reduce 0 of");
      } else {
        COHORT_EXPECT_THROW_WITH(session.make_group({.timeout = timeout}), GenerationEnded,
                                 "ms for process 1 in the making of group 'generation 1 group 0'");
      }
      EXPECT_TRUE(session.must_enter());
      session.enter(0);
      EXPECT_EQ(count_calls(session.make_group({})), 2);
    });
    run.agents.wait_until([&] { return run.ranks[0]->status.lost_links == std::vector{run.ranks[1]->id}; });
    run.agents.decide(run.ranks);
    run.end(run.ranks);
  }
}

// With its thread, its connection to the store and those of its backend.
TEST(ElasticSessionGroupsTest, AGroupMayOutlastItsSessionAndThenAllOfItGoes) {
  const auto count = [](const char* folder) {
    return std::distance(std::filesystem::directory_iterator(base::concat("/proc/self/", folder)), {});
  };
  const auto run_once = [] {
    std::vector<comm::Group> groups(2);
    {
      GroupRun run(2);
      run.start([&](Session& session, GenerationInfo info) {
        comm::Group& group = groups[static_cast<std::size_t>(info.process)];
        group = session.make_group({.backend = "gloo"});
        EXPECT_EQ(count_calls(group), 2);
      });
      run.end(run.ranks);
      COHORT_EXPECT_THROW_WITH(count_calls(groups[0]), RunEnded, "the run has ended");
    }
    COHORT_EXPECT_THROW_WITH(count_calls(groups[0]), GenerationEnded, "session of this process is destroyed");
  };
  run_once();  // threads that stay: LibTorch's
  const auto threads = count("task"), files = count("fd");
  run_once();
  EXPECT_TRUE(test::comes_true([&] { return count("task") <= threads; })) << count("task") << " " << threads;
  EXPECT_TRUE(test::comes_true([&] { return count("fd") <= files; })) << count("fd") << " " << files;
}

// elastic::run makes the group again.
TEST(ElasticSessionGroupsTest, TheExampleInTheHeaderRuns) {
  GroupRun run(2);
  std::atomic<int> num_steps{0};
  for (GroupRank* const rank : run.ranks) {
    run.agents.start(*rank, [&, session = rank->session](Session&) {
      RunOptions options;
      options.session = session;
      options.total_steps = 3;
      comm::Group group;
      options.on_enter = [&](const elastic::GenerationInfo&) { group = elastic::make_group(session); };
      elastic::run(options, empty_state(), [&](StepContext& context) {
        at::Tensor loss = at::full({1}, 1.0F);
        if (context.step() == 1 && context.info().generation == 1) {
          ++num_steps;
          test::wait_until([&] { return context.info().process == 1 || session->must_enter(); });
        }
        group.all_reduce(loss).wait();
        EXPECT_EQ(loss.item<float>(), 2.0F);
        context.begin_changes();
      });
    });
  }
  run.agents.wait_until_ready();
  run.agents.decide(run.ranks);
  run.agents.wait_until([&] { return num_steps == 2; });
  run.agents.decide(run.ranks);
  run.end(run.ranks);
  std::vector<std::string> example;
  for (const std::string& line : test::example_of("elastic/session.h")) {
    if (line.find("group") != std::string::npos) example.push_back(line);
  }
  EXPECT_EQ(example.size(), 3U);
  const std::string here =
      test::read_file(test::source_dir() / "tests/elastic/groups/session_groups_test.cpp");
  EXPECT_EQ(test::first_missing(example, here), "");
}

// Process 1 drops the last step, and gets its state from process 0, which only waits for the end of the run.
TEST(ElasticSessionGroupsTest, AProcessThatEntersAfterTheLastStepMakesNoGroup) {
  GroupRun run(2);
  std::atomic<std::uint64_t> committed{0};  // by process 0
  for (GroupRank* const rank : run.ranks) {
    run.agents.start(*rank, [&, session = rank->session](Session&) {
      RunOptions options;
      options.session = session;
      options.total_steps = 2;
      comm::Group group;
      options.on_enter = [&](const elastic::GenerationInfo&) { group = elastic::make_group(session); };
      options.on_commit = [&](const elastic::GenerationInfo& info) { committed = info.steps; };
      const auto last = elastic::run(options, empty_state(), [&](StepContext& context) {
        EXPECT_EQ(count_calls(group), 2);
        if (context.step() == 1 && context.info().process == 1) {
          test::wait_until([&] { return committed == 2; });
          throw GenerationEnded("test", "this process drops the step");
        }
        context.begin_changes();
      });
      EXPECT_EQ(last.value().steps, 2U);
    });
  }
  run.agents.wait_until_ready();
  run.agents.decide(run.ranks);
  run.agents.wait_until([&] { return run.ranks[0]->status.is_finished; });
  run.agents.decide(run.ranks);
  run.end(run.ranks);
}

TEST(ElasticSessionGroupsTest, AGroupNeedsAGeneration) {
  PlayedAgents agents;
  GroupRank& rank = agents.add();
  COHORT_EXPECT_THROW_WITH(rank.session->make_group({}), UsageError, "in no generation");
  COHORT_EXPECT_THROW_WITH(rank.session->store(), UsageError, "in no generation");
  EXPECT_EQ(count_calls(make_group(nullptr)), 1) << "alone";
  COHORT_EXPECT_THROW_WITH(make_group(nullptr, {.backend = "nccl"}), UsageError, "nccl cannot be ended");
}

}  // namespace
}  // namespace cohort::elastic
