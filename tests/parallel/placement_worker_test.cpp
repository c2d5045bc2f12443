#include "cohort/parallel/placement_worker.h"

#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Parallel.h>
#include <ATen/autocast_mode.h>
#include <gtest/gtest.h>

#include <functional>
#include <list>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "cohort/base/error.h"
#include "cohort/base/log.h"
#include "cohort/core/random_scope.h"
#include "tests/support/gate.h"
#include "tests/support/throws.h"

namespace cohort::parallel {
namespace {

using namespace std::chrono_literals;
using base::CpuSet;
using base::Deadline;
using base::Placement;

const Deadline& patience() {
  static const Deadline deadline(60s);
  return deadline;
}

TEST(PlacementWorkerTest, ComputesOnItsCoresWithAsManyThreads) {
  const Placement placement = Placement::parse("cpu:0");
  const auto worker = PlacementWorker::of(placement);
  EXPECT_EQ(worker->device(), at::kCPU);
  EXPECT_EQ(worker->intra_op_threads(), 1);
  EXPECT_EQ(worker->run("threads", [] { return at::get_num_threads(); }), 1);
  EXPECT_EQ(worker->run("cores", [] { return CpuSet::of_current_thread(); }), placement.cpus);
  EXPECT_TRUE(worker->run("self", [&] { return worker->is_current(); }));
  EXPECT_EQ(worker->run("outer", [&] { return worker->run("inner", [] { return 3; }); }), 3)
      << "a plain call on its own thread";
}

TEST(PlacementWorkerTest, LeavesTheNumbersOfThreadsOfOthersAlone) {
  int before = 0, after = 0;
  std::thread([&] { before = at::get_num_threads(); }).join();
  const int own_before = at::get_num_threads();
  at::set_num_threads(3);
  const auto worker = PlacementWorker::of(Placement::parse("cpu:0/threads"));
  EXPECT_EQ(at::get_num_threads(), 3);
  std::thread([&] { after = at::get_num_threads(); }).join();
  EXPECT_EQ(after, 3) << "what a new thread gets";
  EXPECT_EQ(worker->run("threads", [] { return at::get_num_threads(); }), 1);
  std::thread([=] { at::set_num_threads(before); }).join();
  at::set_num_threads(own_before);
}

TEST(PlacementWorkerTest, IsOneThreadPerNameForAsLongAsSomebodyHasIt) {
  const auto a = PlacementWorker::of(Placement::parse("cpu:0/a"));
  const auto b = PlacementWorker::of(Placement::parse("cpu:0/b"));
  EXPECT_EQ(PlacementWorker::of(Placement::parse("cpu:0/a")), a);
  const auto id = [] { return std::this_thread::get_id(); };
  EXPECT_NE(a->run("id", id), b->run("id", id));
  std::weak_ptr<PlacementWorker> gone;
  {
    const auto c = PlacementWorker::of(Placement::parse("cpu:0/c"));
    gone = c;
  }
  EXPECT_TRUE(gone.expired());
}

TEST(PlacementWorkerTest, SaysOnceThatPlacementsShareACore) {
  std::string lines;
  base::set_log_sink([&](base::LogLevel, std::string_view line) { lines += std::string(line) + "\n"; });
  {
    const auto a = PlacementWorker::of(Placement::parse("cpu:0/x"));
    const auto b = PlacementWorker::of(Placement::parse("cpu:0/y"));
    const auto c = PlacementWorker::of(Placement::parse("cpu:0/z"));
  }
  base::set_log_sink({});
  const auto first = lines.find("share a core");
  if (first != std::string::npos) {  // an earlier test of this process may have said it
    EXPECT_EQ(lines.find("share a core", first + 1), std::string::npos) << lines;
  }
}

TEST(PlacementWorkerTest, FunctionsFindTheCallersState) {
  const auto worker = PlacementWorker::of(Placement::parse("cpu:0"));
  const auto gradients = [] { return at::GradMode::is_enabled(); };
  EXPECT_TRUE(worker->run("gradients", gradients));
  base::Future<bool> given_without;
  {
    const at::NoGradGuard no_grad;
    EXPECT_FALSE(worker->run("gradients", gradients));
    given_without = worker->submit("gradients", gradients);
  }
  EXPECT_FALSE(given_without.get(patience())) << "as it was when the function was given";
  {
    const c10::InferenceMode inference;
    EXPECT_TRUE(worker->run("inference", [] { return at::ones({2}).is_inference(); }));
  }
  at::autocast::set_autocast_enabled(at::kCPU, true);
  at::autocast::set_autocast_dtype(at::kCPU, at::kBFloat16);
  const auto type =
      worker->run("autocast", [] { return at::mm(at::ones({2, 2}), at::ones({2, 2})).scalar_type(); });
  at::autocast::set_autocast_enabled(at::kCPU, false);
  at::autocast::clear_cache();
  EXPECT_EQ(type, at::kBFloat16);
  const auto caches = [] { return at::autocast::is_autocast_cache_enabled(); };
  at::autocast::set_autocast_cache_enabled(false);
  const bool caches_without = worker->run("cache", caches);
  at::autocast::set_autocast_cache_enabled(true);
  EXPECT_FALSE(caches_without);
  EXPECT_TRUE(worker->run("cache", caches));
  EXPECT_EQ(worker->run("autocast", [] { return at::mm(at::ones({2, 2}), at::ones({2, 2})).scalar_type(); }),
            at::kFloat);
}

// Also where something stands for the global generator, and where a scope within ends that.
TEST(PlacementWorkerTest, FunctionsDrawFromTheCallersRandomScope) {
  const auto worker = PlacementWorker::of(Placement::parse("cpu:0"));
  const auto make = [](std::uint64_t seed) { return at::make_generator<at::CPUGeneratorImpl>(seed); };
  const auto draw = [] {
    return at::cat({at::rand({2}), at::rand({2}, at::detail::getDefaultCPUGenerator())});
  };
  // Scopes by what they draw from, and what stands for the global generator; 0 is none.
  using Scopes = std::vector<std::pair<std::uint64_t, std::uint64_t>>;
  const std::vector<Scopes> all{{}, {{5, 0}}, {{5, 6}}, {{0, 6}}, {{5, 0}, {0, 0}}, {{5, 6}, {7, 0}}};
  for (const Scopes& scopes : all) {
    const auto in_scopes = [&](bool on_worker) {
      at::manual_seed(1);
      std::list<core::RandomScope> open;
      for (const auto& [own, global] : scopes) {
        open.emplace_back(own == 0 ? at::Generator() : make(own),
                          global == 0 ? at::Generator() : make(global));
      }
      const at::Tensor first = on_worker ? worker->run("draw", draw) : draw(), next = draw();
      while (!open.empty()) open.pop_back();
      return at::cat({first, next, draw()});
    };
    EXPECT_TRUE(at::equal(in_scopes(true), in_scopes(false))) << ::testing::PrintToString(scopes);
  }
  std::optional<core::RandomScope> scope(core::RandomKey{.seed = 5});
  auto given = worker->submit("scope", [] { return core::RandomScope::current(); });
  EXPECT_EQ(given.get(patience()), core::RandomScope::current());
  scope.reset();
  EXPECT_FALSE(worker->run("scope", [] { return core::RandomScope::current(); }).defined());
}

TEST(PlacementWorkerTest, AThreadThatIsStuckIsReplaced) {
  const auto gate = std::make_shared<test::Gate>(), entered = std::make_shared<test::Gate>();
  const auto worker = PlacementWorker::of(Placement::parse("cpu:0/stuck"));
  auto stuck = worker->submit("stuck", [gate, entered] {
    entered->open();
    gate->wait();
  });
  entered->wait();
  COHORT_EXPECT_THROW_WITH(stuck.get(Deadline(1ms)), TimeoutError,
                           "for stuck on thread cpu:0/stuck, which is busy with stuck");
  EXPECT_EQ(worker->run("next", [] { return 7; }, Deadline(60s)), 7);
  EXPECT_EQ(worker->run("threads", [] { return at::get_num_threads(); }), 1);
  gate->open();
  stuck.get(patience());
}

// A function that calls `moved` as it is taken.
struct WhileMoved {
  explicit WhileMoved(std::function<void()> fn) : moved(std::move(fn)) {}
  WhileMoved(WhileMoved&& other) : moved(std::exchange(other.moved, nullptr)) {
    if (moved) std::exchange(moved, nullptr)();
  }
  int operator()() { return 9; }
  std::function<void()> moved;
};

TEST(PlacementWorkerTest, AThreadThatIsReplacedUnderACallerIsNotItsThread) {
  const auto gate = std::make_shared<test::Gate>(), entered = std::make_shared<test::Gate>();
  const auto worker = PlacementWorker::of(Placement::parse("cpu:0/replaced"));
  auto pending = worker->submit("called", WhileMoved([&] {
                                  auto stuck = worker->submit("stuck", [gate, entered] {
                                    entered->open();
                                    gate->wait();
                                  });
                                  entered->wait();
                                  EXPECT_THROW(stuck.get(Deadline(1ms)), TimeoutError);
                                  EXPECT_EQ(worker->run("another call", [] { return 7; }),
                                            7);  // and this one replaces it
                                }));
  EXPECT_EQ(pending.get(patience()), 9);
  gate->open();
}

TEST(PlacementWorkerTest, AFunctionMayHoldTheLastReferenceToItsWorker) {
  for (int round = 0; round < 200; ++round) {
    auto worker = PlacementWorker::of(Placement::parse("cpu:0/last"));
    PlacementWorker& reference = *worker;
    auto pending = reference.submit("last", [worker = std::move(worker)] { return 1; });
    ASSERT_EQ(pending.get(patience()), 1);
  }
}

TEST(PlacementWorkerTest, AThreadIsKeptWhereSomebodyWaitsForWhatItRuns) {
  const auto gate = std::make_shared<test::Gate>();
  const auto worker = PlacementWorker::of(Placement::parse("cpu:0/kept"));
  const auto id = [] { return std::this_thread::get_id(); };
  auto first = worker->submit("first", [gate, id] {
    gate->wait();
    return id();
  });
  EXPECT_THROW(worker->submit("impatient", [] {}).get(Deadline(1ms)), TimeoutError);
  auto last = worker->submit("last", id);
  gate->open();
  EXPECT_EQ(first.get(patience()), last.get(patience()));
}

TEST(PlacementWorkerTest, PlacementThreadsAreThoseOfTheirWorkers) {
  const std::vector<Placement> placements = {Placement::parse("cpu:0/a"), Placement::parse("cpu:0/b")};
  const PlacementThreads threads(placements);
  ASSERT_EQ(threads.ids().size(), 2U);
  for (std::size_t i = 0; i < 2; ++i) {
    const auto worker = PlacementWorker::of(placements[i]);
    EXPECT_EQ(threads.ids()[i], worker->run("who", [] { return std::this_thread::get_id(); }));
  }
  EXPECT_NE(threads.ids()[0], threads.ids()[1]);
}

TEST(PlacementWorkerTest, ErrorsComeBack) {
  const auto worker = PlacementWorker::of(Placement::parse("cpu:0"));
  COHORT_EXPECT_THROW_WITH(worker->run("bad", []() -> int { throw DataError("test", "no"); }), DataError,
                           "[test] no");
  COHORT_EXPECT_THROW_WITH(worker->run("bad", [] { return at::ones({2, 3}).mm(at::ones({2, 3})); }),
                           c10::Error, "mat1 and mat2 shapes");
}

}  // namespace
}  // namespace cohort::parallel
