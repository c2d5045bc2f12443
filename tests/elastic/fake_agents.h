#pragma once

#include <sys/types.h>

#include <chrono>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <random>
#include <string>
#include <vector>

#include "cohort/base/files/fd.h"
#include "cohort/base/secret.h"
#include "cohort/membership/net_store.h"
#include "cohort/membership/rank_link.h"
#include "tests/support/temp_dir.h"
#include "zygote.h"

namespace cohort::test {

/// Plays the agents of a run, each of which has one process or some. They decide generations, as the seed
/// says, and start, kill and stop processes. Always: some living process has the state, or the region of a
/// dead one, as far as anybody can know.
class FakeAgents {
 public:
  struct Options {
    std::uint64_t seed = 1;
    std::uint64_t total_steps = 60;
    int virtual_ranks = 4;
    int num_events = 12;    ///< changes of the run by the seed
    int max_event_ms = 25;  ///< about the most time between two of them
    int hidden = 64;
    std::int64_t bucket_bytes = 8'192;
    std::uint64_t chunk_bytes = std::uint64_t{4} << 20;
    int max_ranks = 1;        ///< of an agent, where the seed decides
    int max_processes = 4;    ///< of a generation, but for those that must be in it
    bool loses_last = false;  ///< the last process that has the state may die, too
    bool has_regions = true;
    std::string plant = {};  ///< a fault that tests must find: TEST_PLANT
  };
  FakeAgents(Zygote& zygote, const Options& options);
  ~FakeAgents();
  FakeAgents(const FakeAgents&) = delete;
  FakeAgents& operator=(const FakeAgents&) = delete;

  /// A process.
  struct Child {
    pid_t pid = -1;
    membership::RankLink link;
    base::Fd process{}, control{};
    std::size_t agent = 0;  // number
    membership::MemberId id = 0;
    int index = 0;  // among the processes of the member
    std::string incarnation = {};
    membership::RankStatus status = {};
    base::Fd region = base::Fd();  ///< not open: it has none yet
    bool has_inherited = false;    ///< its region had a committed state
    bool is_member = false, is_asking = false, is_stopped = false, is_killed = false, has_ended = false;
    int exit_status = 0;
    std::uint64_t held_in = 0;  // generation in which it was told to wait at its point; 0: it was not
    base::Deadline held_until = base::Deadline::never();
  };

  /// Runs it all. Returns what does not hold; empty: nothing.
  std::string run();
  /// The bytes that each process ended with.
  std::vector<std::string> results() const;
  /// What children wrote, and what was done.
  std::string story() const;
  /// The first step that no process 0 has committed; empty: each step of the run was.
  std::string missing_step() const;
  /// Processes that have entered a generation without the state that lay in their region; empty: none.
  std::string find_forgotten() const;

  // For tests that decide by themselves.

  Child& start(const std::string& point = "", const std::string& initial_seed = "");
  /// The child has the region of `before`, which has ended; null: a new one.
  void give_region(Child& child, Child* before = nullptr);
  /// A process that asks at its point continues.
  void release(Child& child);
  /// Handles what comes until the condition holds. Throws: TimeoutError.
  void handle_until(const std::function<bool()>& condition, const std::string& what);
  void decide(const std::vector<Child*>& members, bool is_planned, const std::string& cause);
  void kill(Child& child);
  void end_run(bool has_succeeded);
  const membership::Generation& generation() const { return generation_; }
  std::vector<Child*> living();
  std::vector<Child*> members();

  struct Counts {
    int generations = 0, planned = 0, kills = 0, kills_at_points = 0, holds = 0, stops = 0, joins = 0;
    int heirs = 0;  ///< processes that got the region of one that had died
  };
  Counts counts;
  /// What run() returns where the last process has died while it changed its state.
  static constexpr const char* kStateLost = "the state is lost";
  std::map<std::string, std::string> variables;  // of the environment of processes that are started

 private:
  void handle(std::chrono::milliseconds timeout);
  void read_link(Child& child);
  void on_end(Child& child);
  void send_order(Child& child);
  std::string output_of(const Child& child) const;
  bool has_state(const Child& child) const;
  bool may_lose(const Child& child);
  bool may_lose_last(const Child& child);
  bool holds_state(const Child& child) const;
  bool is_state_there(const std::vector<Child*>& ready);
  bool find_heirs();
  void answer(Child& child);
  void make_event();
  void continue_stopped();
  void choose_members(bool is_planned, const std::string& cause);
  std::uint64_t pick(std::uint64_t below) { return random_() % below; }
  void tell(const std::string& line);

  Zygote& zygote_;
  const Options options_;
  std::mt19937_64 random_;
  TempDir folder_;
  membership::NetStoreServer store_{{}};
  std::vector<std::unique_ptr<Child>> children_;
  const std::string origin_ = base::random_word();
  membership::Generation generation_;
  std::uint64_t revision_ = 0, committed_ = 0;
  membership::MemberId next_id_ = 1;
  bool must_decide_ = false, has_run_ended_ = false, has_succeeded_ = false;
  std::string story_, failure_;
};

}  // namespace cohort::test
