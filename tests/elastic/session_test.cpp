// Sessions over net, each with an agent that the test plays.
#include "cohort/elastic/session.h"

#include <ATen/Parallel.h>
#include <ATen/ops/full.h>
#include <fcntl.h>
#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <future>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "cohort/base/files/memory_file.h"
#include "cohort/base/log.h"
#include "cohort/base/secret.h"
#include "cohort/base/timeline.h"
#include "cohort/elastic/internal/arithmetic.h"
#include "cohort/elastic/internal/state_region.h"
#include "cohort/elastic/run.h"
#include "cohort/elastic/writer_fence.h"
#include "cohort/net/node.h"
#include "cohort/parallel/virtual_ranks/text_gather.h"
#include "played_agents.h"
#include "ring.h"
#include "tests/support/temp_dir.h"
#include "tests/support/throws.h"

namespace cohort::elastic {
namespace {

using test::PlayedAgents;
using Rank = PlayedAgents::Rank;
using std::chrono::milliseconds;

/// A state of one number for each step that has made it.
struct Counted {
  explicit Counted(double first = 0) : value(at::full({1000}, first)) {}
  StateAccess access() {
    return {.save = [this] { return StateSnapshot{"", {value}}; },
            .load = [this](const StateSnapshot& state) { value = state.tensors.at(0); }};
  }
  double number() const { return value[7].item<double>(); }
  at::Tensor value;
};

RunOptions options_of(const Rank& rank, std::uint64_t total_steps, std::uint64_t first_step = 0) {
  RunOptions options;
  options.total_steps = total_steps;
  options.first_step = first_step;
  options.session = rank.session;
  return options;
}

// All processes take part in each step, which adds one to the state.
std::optional<GenerationInfo> run_counted(const RunOptions& options, Counted& state) {
  return run(options, state.access(), [&](StepContext& context) {
    parallel::all_gather_texts(context.exchange().get(), "a part of the step");
    context.begin_changes();
    state.value += 1;
  });
}

TEST(ElasticSessionTest, ASecondRunIsAnError) {
  PlayedAgents agents;
  Rank &member = agents.add(), &idle = agents.add();
  for (Rank* const rank : {&member, &idle}) {
    agents.start(*rank, [&, rank](Session&) {
      Counted state;
      const std::optional<GenerationInfo> last = run_counted(options_of(*rank, 3), state);
      EXPECT_EQ(last.has_value(), rank == &member);
      if (last) EXPECT_EQ(last->steps, 3U);
      if (last) EXPECT_EQ(last->process, 0);
      EXPECT_EQ(state.number(), rank == &member ? 3 : 0);
      COHORT_EXPECT_THROW_WITH(run_counted(options_of(*rank, 6, 3), state), UsageError,
                               "a session is of one run");
    });
  }
  agents.wait_until_ready();
  agents.decide({&member});
  agents.wait_until([&] { return member.status.is_finished; });
  agents.end_run();
  agents.join(member);
  agents.join(idle);
}

// `cohort train` has stopped by a signal: the run ends so for those that had no part, too.
TEST(ElasticSessionTest, TheSignalThatHasStoppedTheRunIsToldToTheAgentAndByIt) {
  PlayedAgents agents;
  Rank &member = agents.add(), &idle = agents.add();
  Counted state, other;
  agents.start(member, [&](Session& session) {
    session.set_state(state.access());
    session.enter(0);
    session.set_stop_signal(15);
    session.finish();
  });
  agents.start(idle, [&](Session& session) {
    session.set_state(other.access());
    try {
      session.enter(0);
      ADD_FAILURE() << "it has entered a generation";
    } catch (const RunEnded& ended) {
      EXPECT_TRUE(ended.has_succeeded());
      EXPECT_EQ(ended.stop_signal(), 15);
    }
  });
  agents.wait_until_ready();
  agents.decide({&member});
  agents.wait_until([&] { return member.status.is_finished; });
  EXPECT_EQ(member.status.stop_signal, 15);
  agents.end_run(true, 15);
  agents.join(member);
  agents.join(idle);
}

// Its links are fine: a thread of net's answers.
TEST(ElasticSessionTest, AProcessThatIsStuckIsReportedAndTheOthersContinue) {
  PlayedAgents agents;
  std::promise<void> release;
  Rank &first = agents.add({.timeout = milliseconds(300)}),
       &stuck = agents.add({.timeout = milliseconds(300)});
  Counted state, other;
  agents.start(first, [&](Session&) {
    const std::optional<GenerationInfo> last = run_counted(options_of(first, 5), state);
    ASSERT_TRUE(last);
    EXPECT_EQ(last->num_processes, 1);
  });
  agents.start(stuck, [&](Session& session) {
    session.set_state(other.access());
    session.enter(0);
    release.get_future().wait();
  });
  agents.wait_until_ready();
  EXPECT_EQ(first.status.timeout_ms, 300U);
  agents.decide({&first, &stuck});
  const auto has_lost = [&] {
    return first.status.entered == agents.generation().number &&
           first.status.lost_links == std::vector{stuck.id};
  };
  agents.wait_until(has_lost);  // in a step
  agents.decide({&first, &stuck});
  agents.wait_until(has_lost);  // as it does not enter
  agents.decide({&first});
  agents.wait_until([&] { return first.status.is_finished; });
  agents.end_run();
  agents.join(first);
  EXPECT_EQ(state.number(), 5);
  release.set_value();
  agents.join(stuck);
}

// Its agent hears of it: it can end the process.
TEST(ElasticSessionTest, AStuckProcessOfTheSameMemberIsReportedToo) {
  std::vector<membership::MemberId> lost;
  ProcessInbox inbox([&](membership::MemberId member) { lost.push_back(member); });
  membership::RankOrder order = test::order_of(1, 0, 1);
  order.generation.members.front().num_processes = 2;
  inbox.on_order(order);
  inbox.enter([](const membership::Generation&) {});
  ProcessInbox::WaitEnd end{.generation = 1,
                            .needed = {1},
                            .deadline = base::Deadline(milliseconds(1)),
                            .what = "the hello of process 1"};
  COHORT_EXPECT_THROW_WITH(inbox.wait([] { return false; }, end), GenerationEnded,
                           "ms for the hello of process 1");
  EXPECT_EQ(lost, (std::vector<membership::MemberId>{1}));
  EXPECT_TRUE(inbox.must_enter());
}

// It may be the store.
TEST(ElasticSessionTest, AWaitForNoProcessEndsInATimeout) {
  ProcessInbox inbox([](membership::MemberId) {});
  inbox.on_order(test::order_of(1, 0, 1));
  inbox.enter([](const membership::Generation&) {});
  COHORT_EXPECT_THROW_WITH(
      inbox.wait([] { return false; },
                 {.generation = 1, .deadline = base::Deadline(milliseconds(1)), .what = "the addresses"}),
      TimeoutError, "ms for the addresses");
}

/// Takes connections, and answers nothing.
struct Deaf : net::Handler {
  void on_message(const std::shared_ptr<net::Peer>&, net::Message) override { ++num_messages; }
  std::atomic<int> num_messages{0};
};

// A client's requests end after two seconds.
TEST(ElasticSessionTest, AStoreThatDoesNotAnswerIsAskedAgain) {
  const std::string address = "unix:@cohort-" + base::random_word();
  const auto deaf = std::make_shared<Deaf>();
  net::NodeOptions options;
  options.name = "store";
  std::optional<net::Node> silent(std::in_place, options, deaf);
  silent->listen(address);
  PlayedAgents agents;
  Rank& rank = agents.add();
  Counted state;
  agents.start(rank, [&](Session&) { EXPECT_TRUE(run_counted(options_of(rank, 2), state)); });
  agents.wait_until_ready();
  agents.decide({&rank}, false, address);
  test::wait_until([&] { return deaf->num_messages >= 2; });
  silent.reset();
  const membership::NetStoreServer store({.listen = address});
  agents.wait_until([&] { return rank.status.is_finished; });
  agents.end_run();
  agents.join(rank);
}

// It has read a checkpoint of another run, for instance.
TEST(ElasticSessionTest, AProcessThatIsNewToTheRunDoesNotTakeItOver) {
  PlayedAgents agents;
  Rank &joining = agents.add(), &first = agents.add();  // it will be process 0
  Counted state, other(999);
  std::vector<std::uint64_t> committed;
  std::promise<void> gate;
  agents.start(first, [&](Session&) {
    const auto last = run(options_of(first, 20), state.access(), [&](StepContext& context) {
      if (context.step() == 3 && context.info().generation == 1) gate.get_future().wait();
      parallel::all_gather_texts(context.exchange().get(), "a part of the step");
      context.begin_changes();
      state.value += 1;
    });
    EXPECT_EQ(last.value().process, 1);
  });
  agents.start(joining, [&](Session&) {
    RunOptions options = options_of(joining, 20, 50);
    options.on_commit = [&](const GenerationInfo& info) { committed.push_back(info.steps); };
    run_counted(options, other);
  });
  agents.wait_until_ready();
  agents.decide({&first});
  agents.wait_until([&] { return first.status.committed_steps == 3; });
  agents.decide({&first, &joining}, /*is_planned=*/true);
  agents.wait_until([&] { return first.status.heard == 2; });
  gate.set_value();
  agents.wait_until([&] { return first.status.is_finished && joining.status.is_finished; });
  agents.end_run();
  agents.join(first);
  agents.join(joining);
  EXPECT_EQ(state.number(), 20);
  EXPECT_EQ(other.number(), 20);
  ASSERT_FALSE(committed.empty());
  EXPECT_LE(committed.front(), 4U) << "the last step of process 0 of before";
  EXPECT_EQ(committed.back(), 20U);
}

// Process 0 is stopped between a step and what is written after it. The other one continues without it.
TEST(ElasticSessionTest, AProcessThatComesLateDoesNotWriteOverWhatIsNewer) {
  PlayedAgents agents;
  const test::TempDir dir;
  Rank &late = agents.add(), &other = agents.add();
  std::promise<void> has_come, gate;
  std::atomic<std::uint64_t> written{0};
  const auto body = [&](Rank& rank) {
    Counted state;
    WriterFence fence(dir.path());
    RunOptions options = options_of(rank, 6);
    bool is_first_time = &rank == &late;
    options.on_enter = [&](const GenerationInfo& info) { fence.claim(info.origin); };
    options.on_commit = [&](const GenerationInfo& info) {
      if (info.steps == 2 && std::exchange(is_first_time, false)) {
        has_come.set_value();
        gate.get_future().wait();
      }
      fence.write(info, [&] { written = info.steps; });
    };
    const auto last = run_counted(options, state);
    EXPECT_EQ(last.has_value(), &rank == &other);
  };
  agents.start(late, [&](Session&) { body(late); });
  agents.start(other, [&](Session&) { body(other); });
  agents.wait_until_ready();
  agents.decide({&late, &other});
  const std::future<void> come = has_come.get_future();
  agents.wait_until([&] { return come.wait_for(milliseconds(0)) == std::future_status::ready; });
  agents.decide({&other});
  agents.wait_until([&] { return other.status.is_finished; });
  EXPECT_EQ(written, 6U);
  gate.set_value();
  agents.wait_until([&] { return late.status.left == 2; });
  EXPECT_EQ(written, 6U);
  agents.end_run();
  agents.join(late);
  agents.join(other);
}

TEST(ElasticSessionTest, ProcessesThatResumeFromDifferentFilesHaveTheStateOfTheFirstOne) {
  PlayedAgents agents;
  Rank &first = agents.add(), &second = agents.add();
  Counted state(7), other(8);
  agents.start(first, [&](Session&) { run_counted(options_of(first, 10, 7), state); });
  agents.start(second, [&](Session&) { run_counted(options_of(second, 10, 7), other); });
  agents.wait_until_ready();
  agents.decide({&first, &second});
  agents.wait_until([&] { return first.status.is_finished && second.status.is_finished; });
  agents.end_run();
  agents.join(first);
  agents.join(second);
  EXPECT_EQ(state.number(), 10);
  EXPECT_EQ(other.number(), 10);
}

/// How a process that has died says that it has computed, and what its successor logs.
struct LeftArithmetic {
  std::string text, warning;
};

// All wait for a process that joins from the generation's begin on.
TEST(ElasticSessionTest, AProcessHashesAndMovesItsTensorsBeforeItHasAGeneration) {
  PlayedAgents agents;
  Rank &member = agents.add(), &joining = agents.add();
  const base::Fd file = base::make_memory_file("test");
  joining.link.send_file(file, base::Deadline(milliseconds(1000)));
  Counted state, other;
  const void* const before = other.value.const_data_ptr();
  std::atomic<int> num_saved{0};
  agents.start(member, [&](Session&) { run_counted(options_of(member, 3), state); });
  agents.start(joining, [&](Session& session) {
    StateAccess access = other.access();
    access.save = [&] {
      ++num_saved;
      return StateSnapshot{"", {other.value.detach()}, {true}};
    };
    session.set_state(access);
    COHORT_EXPECT_THROW_WITH(session.enter(0), RunEnded, "the run has ended");
  });
  agents.wait_until_ready();
  agents.decide({&member});
  agents.wait_until([&] { return joining.status.left == 1 && member.status.is_finished; });
  EXPECT_EQ(num_saved, 2);
  EXPECT_EQ(read_commit_word(file), CommitWord{});
  agents.end_run();
  agents.join(member);
  agents.join(joining);
  EXPECT_NE(other.value.const_data_ptr(), before);
}

using SpanCounts = std::map<std::string, int>;

// By name, of a row of the timeline that is no thread.
SpanCounts spans_on_row(const std::string& row) {
  SpanCounts counts;
  const auto trace = nlohmann::json::parse(base::Timeline::json());
  for (const nlohmann::json& event : trace.at("traceEvents")) {
    const bool is_on_row = base::Timeline::thread_name(event.at("tid").get<int>()) == row;
    if (is_on_row && event.at("ph") == "X") ++counts[event.at("name").get<std::string>()];
  }
  return counts;
}

TEST(ElasticSessionTest, AChangeIsOnTheTimelineWithItsParts) {
  base::Timeline::start();
  PlayedAgents agents;
  Rank &survivor = agents.add(), &lost = agents.add();
  Counted state, other;
  agents.start(survivor, [&](Session&) { run_counted(options_of(survivor, 3), state); });
  agents.start(lost, [&](Session& session) {  // makes a step, and ends
    session.set_state(other.access());
    session.enter(0);
    session.exchange()->begin_step();
    parallel::all_gather_texts(session.exchange().get(), "a part of the step");
    session.begin_changes();
    other.value += 1;
    session.commit(1);
  });
  agents.wait_until_ready();
  agents.decide({&survivor, &lost});
  agents.join(lost);
  EXPECT_EQ(spans_on_row("elastic losses"), SpanCounts{});
  lost.session.reset();
  agents.wait_until([&] { return survivor.status.lost_links == std::vector{lost.id}; });
  agents.decide({&survivor});
  agents.wait_until([&] { return survivor.status.is_finished; });
  base::Timeline::stop();
  agents.end_run();
  agents.join(survivor);
  EXPECT_EQ(spans_on_row("elastic losses"), (SpanCounts{{"detect", 1}}));
  // Of both in the first generation, and of the survivor in the second one.
  EXPECT_EQ(spans_on_row("elastic changes"),
            (SpanCounts{{"agree", 3}, {"rebuild", 3}, {"state", 3}, {"redo", 3}}));
}

// Four successors in a row would die of it, and the run with them.
TEST(ElasticSessionTest, AProcessWhosePredecessorComputedInAnotherWayHasTheStateOfOthers) {
  Arithmetic other = Arithmetic::of_thread(), more_threads = other;
  other.instructions = "AVX1024";
  other.threads = more_threads.threads = other.threads + 2;
  const std::string does_not_fit = "the state that the process before has left does not fit: ";
  for (const auto& [text, warning] :
       {LeftArithmetic{"no line", does_not_fit + "[elastic.read] a process did not say how it computes"},
        LeftArithmetic{other.to_text() + "\n", does_not_fit + "[elastic.session] this process computes with"},
        LeftArithmetic{more_threads.to_text() + "\nrejected", does_not_fit + "[test] rejected"}}) {
    SCOPED_TRACE(text);
    const base::Fd file = base::make_memory_file("test");
    StateRegion(base::Fd(::fcntl(file.get(), F_DUPFD_CLOEXEC, 3)))
        .commit(5, {text, {at::full({1000}, 999.0)}, {false}});
    std::string log;
    base::set_log_sink([&](base::LogLevel, std::string_view line) { log += std::string(line) + "\n"; });
    {
      PlayedAgents agents;
      Rank &first = agents.add(), &successor = agents.add();
      Counted state, copied;
      agents.start(first, [&](Session&) { run_counted(options_of(first, 3), state); });
      agents.start(successor, [&](Session&) {
        const int threads = at::get_num_threads();
        StateAccess access = copied.access();
        access.load = [load = access.load](const StateSnapshot& given) {
          if (given.text == "rejected") throw DataError("test", "rejected");
          load(given);
        };
        run(options_of(successor, 3), access, [&](StepContext& context) {
          parallel::all_gather_texts(context.exchange().get(), "a part of the step");
          context.begin_changes();
          copied.value += 1;
        });
        EXPECT_EQ(at::get_num_threads(), threads) << "of the process whose state it has";
      });
      successor.link.send_file(file, base::Deadline(milliseconds(1000)));
      agents.wait_until_ready();
      agents.decide({&first, &successor});
      agents.wait_until([&] { return first.status.is_finished && successor.status.is_finished; });
      agents.end_run();
      agents.join(first);
      agents.join(successor);
      EXPECT_EQ(state.number(), 3);
      EXPECT_EQ(copied.number(), 3);
    }
    base::set_log_sink({});
    EXPECT_NE(log.find(warning), std::string::npos) << log;
    EXPECT_EQ(log.find("as the process before it"), std::string::npos) << log;
  }
}

}  // namespace
}  // namespace cohort::elastic
