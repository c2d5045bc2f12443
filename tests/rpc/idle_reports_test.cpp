// Random programs of workers in shutdown() that call each other. Calls and reports take any time; the reports
// of one worker to another stay in order. Whoever finds that all is over must be right, and in the end all
// find it.
#include "cohort/rpc/internal/idle_reports.h"

#include <gtest/gtest.h>

#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <optional>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "cohort/base/error.h"
#include "tests/support/throws.h"

namespace cohort::rpc {
namespace {

class ShutdownSimulation {
 public:
  explicit ShutdownSimulation(unsigned seed) : random_(seed) {
    const std::size_t size = 2 + pick(4);
    workers_.resize(size);
    for (Leaver& worker : workers_) {
      worker.counts = {std::vector<std::uint64_t>(size), std::vector<std::uint64_t>(size)};
      worker.view.resize(size);
      worker.reports.resize(size);
    }
    num_calls_left_ = pick(60);
  }

  // Returns what does not hold, or "".
  std::string run() {
    while (step()) {
      const bool is_over = calls_.empty() && !any_is_active();
      for (std::size_t id = 0; id < workers_.size(); ++id) {
        const Leaver& worker = workers_[id];
        if (is_over || worker.is_active || worker.last != worker.counts) continue;
        if (worker.view.is_over()) return "worker " + std::to_string(id) + " leaves too early";
        if (has_all_reports(worker)) ++num_waits;
      }
    }
    for (std::size_t id = 0; id < workers_.size(); ++id) {
      if (!workers_[id].view.is_over()) return "worker " + std::to_string(id) + " never leaves";
    }
    return "";
  }

  std::size_t num_waits = 0;  // steps at which reports of all workers were there, and something ran on

 private:
  struct Leaver {
    bool is_active = true;
    IdleReport counts;
    std::optional<IdleReport> last;
    IdleReports view;
    std::vector<std::deque<IdleReport>> reports;  // on their way to it, from each worker
  };

  std::size_t pick(std::size_t below) { return random_() % below; }
  bool any_is_active() const {
    for (const Leaver& worker : workers_) {
      if (worker.is_active) return true;
    }
    return false;
  }
  bool has_all_reports(const Leaver& worker) const {
    for (std::size_t id = 0; id < workers_.size(); ++id) {
      if (!worker.view.has(id)) return false;
    }
    return true;
  }

  bool step() {
    std::vector<std::function<void()>> possible;
    for (std::size_t id = 0; id < workers_.size(); ++id) {
      Leaver& worker = workers_[id];
      if (worker.is_active) {
        if (num_calls_left_ > 0) possible.emplace_back([this, id] { call(id, pick(workers_.size())); });
        possible.emplace_back([&worker] { worker.is_active = false; });
      } else if (worker.last != worker.counts) {
        possible.emplace_back([this, id] { report(id); });
      }
      for (std::size_t from = 0; from < workers_.size(); ++from) {
        if (worker.reports[from].empty()) continue;
        possible.emplace_back([&worker, from] {
          worker.view.set(from, worker.reports[from].front());
          worker.reports[from].pop_front();
        });
      }
    }
    for (std::size_t i = 0; i < calls_.size(); ++i) {
      possible.emplace_back([this, i] { arrive(i); });
    }
    if (possible.empty()) return false;
    possible[pick(possible.size())]();
    return true;
  }
  void call(std::size_t from, std::size_t to) {
    --num_calls_left_;
    ++workers_[from].counts.sent[to];
    calls_.emplace_back(from, to);
  }
  void arrive(std::size_t place) {
    const auto [from, to] = calls_[place];
    calls_.erase(calls_.begin() + static_cast<std::ptrdiff_t>(place));
    ++workers_[to].counts.received[from];
    workers_[to].is_active = true;
  }
  void report(std::size_t id) {
    Leaver& worker = workers_[id];
    worker.last = worker.counts;
    worker.view.set(id, worker.counts);
    for (std::size_t to = 0; to < workers_.size(); ++to) {
      if (to != id) workers_[to].reports[id].push_back(worker.counts);
    }
  }

  std::mt19937 random_;
  std::vector<Leaver> workers_;
  std::vector<std::pair<std::size_t, std::size_t>> calls_;  // on their way
  std::size_t num_calls_left_ = 0;
};

TEST(IdleReportsTest, NobodyLeavesWhileAnythingRunsAndAllLeaveInTheEnd) {
  std::size_t num_waits = 0;
  for (unsigned seed = 1; seed <= 400; ++seed) {
    ShutdownSimulation simulation(seed);
    EXPECT_EQ(simulation.run(), "") << "seed " << seed;
    num_waits += simulation.num_waits;
  }
  EXPECT_GT(num_waits, 100U) << "reports alone would have been enough";
}

TEST(IdleReportsTest, ACallIsOnItsWayUntilItsReceiverHasCountedIt) {
  IdleReports reports;
  reports.resize(3);
  EXPECT_FALSE(reports.is_over());
  reports.set(0, IdleReport{{0, 2, 0}, {0, 0, 0}});
  reports.set(1, IdleReport{{0, 0, 0}, {1, 0, 0}});
  EXPECT_FALSE(reports.is_over());
  reports.set(2, IdleReport{{0, 0, 0}, {0, 0, 0}});
  EXPECT_FALSE(reports.is_over());
  EXPECT_EQ(reports.find_call(), std::pair(std::size_t{0}, std::size_t{1}));
  reports.set(1, IdleReport{{0, 0, 0}, {2, 0, 0}});
  EXPECT_TRUE(reports.is_over());
  reports.set(1, std::nullopt);
  EXPECT_FALSE(reports.is_over()) << "it has come anew";
  reports.remove(1);
  EXPECT_TRUE(reports.is_over()) << "calls to a worker that is gone do not count";
  COHORT_EXPECT_THROW_WITH(reports.set(2, IdleReport{{0, 0}, {0, 0}}), CommError,
                           "a report about 2 workers, not 3");
}

}  // namespace
}  // namespace cohort::rpc
