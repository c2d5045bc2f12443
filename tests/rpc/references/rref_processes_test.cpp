// Random programs of three processes that make objects, pass references on, use them and drop them; one
// process may be killed on the way. In the end nothing is left: no object, no reference. COHORT_RPC_PROGRAMS:
// how many programs.
#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <mutex>
#include <random>
#include <string>
#include <vector>

#include "cohort/base/error.h"
#include "cohort/rpc/init.h"
#include "tests/support/comes_true.h"
#include "tests/support/patience.h"
#include "tests/support/processes.h"

namespace cohort::rpc {
namespace {

constexpr int kNumRanks = 3;

std::atomic<int> num_cells{0};
class Cell {
 public:
  explicit Cell(std::int64_t value) : value_(at::full({4}, value, at::kLong)) { ++num_cells; }
  ~Cell() {
    --num_cells;
    value_.zero_();  // so that a use after the end is seen
  }
  Cell(const Cell&) = delete;
  Cell& operator=(const Cell&) = delete;
  at::Tensor value() const { return value_; }

 private:
  at::Tensor value_;
};

// A reference, and what its object holds.
struct Kept {
  RRef<Cell> cell;
  std::int64_t value = 0;
};
std::mutex cells_mutex;
std::vector<Kept> kept_cells;
int num_finished = 0;

void keep_cell(const RRef<Cell>& cell, std::int64_t value) {
  const std::lock_guard lock(cells_mutex);
  kept_cells.push_back({cell, value});
}
void say_finished() {
  const std::lock_guard lock(cells_mutex);
  ++num_finished;
}

COHORT_REMOTE(make<Cell, std::int64_t>);
COHORT_REMOTE(Cell::value);
COHORT_REMOTE(keep_cell);
COHORT_REMOTE(say_finished);

int number(const char* name) {
  return std::atoi(std::getenv(name));
}

// One rank's part of a program. Errors are those of a peer that died.
class Program {
 public:
  Program(int rank, int seed, int victim) : rank_(rank), victim_(victim), random_(seed * kNumRanks + rank) {}

  void run() {
    const int num_steps = 20 + pick(60), last = rank_ == victim_ ? pick(num_steps) : num_steps;
    for (int i = 0; i < last; ++i) {
      try {
        step();
      } catch (const PeerError&) {
        if (victim_ < 0) throw;
      }
    }
    if (rank_ == victim_) std::raise(SIGKILL);
    for (Future<void>& call : calls_) {
      try {
        call.get();
      } catch (const PeerError&) {
        if (victim_ < 0) throw;
      }
    }
  }

 private:
  int pick(int below) { return static_cast<int>(random_() % static_cast<unsigned>(below)); }
  std::string worker() { return "w" + std::to_string(pick(kNumRanks)); }
  Kept any() {
    const std::lock_guard lock(cells_mutex);
    if (kept_cells.empty()) return {};
    return kept_cells[static_cast<std::size_t>(pick(static_cast<int>(kept_cells.size())))];
  }

  void step() {
    const Kept some = any();
    const int what = pick(8);
    if (!some.cell || what == 0) {
      const std::int64_t value = rank_ * 1'000 + ++num_made_;
      return keep_cell(remote<&make<Cell, std::int64_t>>(worker(), value), value);
    }
    if (what < 4) return calls_.push_back(rpc_async<&keep_cell>(worker(), some.cell, some.value));
    if (what < 6) {
      const at::Tensor value = some.cell.rpc_sync<&Cell::value>();
      if (!value.eq(some.value).all().item<bool>()) throw UsageError("test", "an object was freed");
      return;
    }
    Kept dropped;
    const std::lock_guard lock(cells_mutex);
    if (kept_cells.empty()) return;
    const auto at = kept_cells.begin() + pick(static_cast<int>(kept_cells.size()));
    dropped = std::move(*at);
    kept_cells.erase(at);
  }

  const int rank_, victim_;
  std::mt19937 random_;
  int num_made_ = 0;
  std::vector<Future<void>> calls_;
};

TEST(RRefProgramsChild, DISABLED_Rank) {
  const int rank = number("RANK"), victim = number("TEST_VICTIM");
  init_rpc("w" + std::to_string(rank));
  Program(rank, number("TEST_SEED"), victim).run();
  // Nobody who lives passes anything on after this.
  const int num_others = kNumRanks - 1 - (victim < 0 ? 0 : 1);
  for (int other = 0; other < kNumRanks; ++other) {
    if (other != rank && other != victim) rpc_sync<&say_finished>("w" + std::to_string(other));
  }
  test::wait_until([&] {
    const std::lock_guard lock(cells_mutex);
    return num_finished == num_others;
  });
  // What the victim called before it died has come once its death is known, and is handled soon.
  EXPECT_TRUE(victim < 0 || test::comes_true([&] {
                try {
                  rpc_sync<&say_finished>("w" + std::to_string(victim));
                } catch (const PeerError&) {
                  return true;
                }
                return false;
              }));
  const bool is_empty = test::comes_true([] {
    std::vector<Kept> dropped;
    {
      const std::lock_guard lock(cells_mutex);
      dropped.swap(kept_cells);
    }
    dropped.clear();
    const AgentMetrics metrics = agent().metrics();
    return metrics.calls_unanswered == 0 && metrics.references == 0 && metrics.objects.empty() &&
           num_cells == 0;
  });
  const AgentMetrics metrics = agent().metrics();
  EXPECT_TRUE(is_empty) << num_cells << " cells, " << metrics.references << " references";
  for (const std::string& object : metrics.objects) ADD_FAILURE() << object;
  shutdown();
}

TEST(RRefProgramsTest, LeaveNothingAndFreeNothingTooEarly) {
  const char* const text = std::getenv("COHORT_RPC_PROGRAMS");
  const int num_programs = text == nullptr ? 2 : std::atoi(text);
  for (int seed = 1; seed <= num_programs; ++seed) {
    const int victim = seed % 2 == 0 ? seed / 2 % kNumRanks : -1;
    test::RankProcesses ranks("RRefProgramsChild", kNumRanks,
                              {{"TEST_SEED", std::to_string(seed)}, {"TEST_VICTIM", std::to_string(victim)}});
    std::vector<int> expected(kNumRanks, 0);
    if (victim >= 0) expected[static_cast<std::size_t>(victim)] = -1;
    EXPECT_EQ(ranks.wait(), expected) << "seed " << seed << "\n"
                                      << ranks.output(0) << ranks.output(1) << ranks.output(2);
  }
}

}  // namespace
}  // namespace cohort::rpc
