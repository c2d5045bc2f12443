// Random programs of workers that begin contexts, call each other in them and end them. Handlers call on,
// also back to their callers, and also once the context has ended. Messages take any time, so they come in
// any order; a death is seen by each worker at a time of its own. Two workers may lose each other, while
// others keep both. What must hold:
//   while the creator of a context lives and has not ended it, each call of it runs in it, and no worker ends
//     its copy, unless it has lost the creator;
//   a call is within a context only where the copy of its caller has not ended;
// and in the end, when all contexts have ended and all messages have come: no worker has a copy, or knows
// anything of a context.
#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <map>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "cohort/rpc/internal/protocol/context_protocol.h"
#include "tests/rpc/protocol/protocol_simulation.h"

namespace cohort::rpc {
namespace {

enum class Losses : std::uint8_t { kNone, kDeaths, kPairs, kBoth };

class ContextSimulation : test::ProtocolSimulation {
 public:
  ContextSimulation(std::uint64_t seed, Losses losses) : ProtocolSimulation(seed) {
    const std::size_t num_workers = 2 + pick(4);
    for (std::size_t id = 0; id < num_workers; ++id) workers_.emplace_back(static_cast<std::int32_t>(id));
    delay_ = 1 + pick(pick(2) == 0 ? 20 : 400);
    const std::size_t num_steps = 10 + pick(pick(32) == 0 ? 1'000 : 80);
    for (std::size_t i = 0; i < num_steps; ++i) {
      at(pick(1'000), [this] { step(); });
    }
    if (losses == Losses::kDeaths || losses == Losses::kBoth) {
      for (std::size_t i = 1 + pick(num_workers); i > 0; --i) {
        at(pick(1'000), [this] { die(worker()); });
      }
    }
    if (losses == Losses::kPairs || losses == Losses::kBoth) {
      for (std::size_t i = 1 + pick(num_workers); i > 0; --i) {
        at(pick(1'000), [this] {
          cut(worker(), worker(), [this](std::int32_t self, std::int32_t other) { give_up(self, other); });
        });
      }
    }
  }

  // Returns what does not hold, or "".
  std::string run() {
    const auto check_at_times = [this] {
      if (num_events() % 8 == 0) check();
    };
    drain(check_at_times);
    for (Worker& worker : workers_) {
      while (worker.is_alive && !worker.open.empty()) end(worker.id, 0);
    }
    drain(check_at_times);
    for (const Worker& worker : workers_) {
      if (!worker.is_alive) continue;
      if (worker.protocol.num_copies() + worker.protocol.size() > 0) {
        fail("worker " + std::to_string(worker.id) + " is left with " +
             std::to_string(worker.protocol.num_copies()) + " copies, and knows of " +
             std::to_string(worker.protocol.size()) + " contexts");
      }
      if (!worker.copies.empty()) fail("a copy is gone, and nobody was told");
    }
    return error();
  }

  std::size_t num_late = 0, num_made_late = 0, num_outside = 0, num_unsent = 0, num_orphaned = 0,
              num_abandoned = 0;

 private:
  using CopyId = ContextProtocol::CopyId;
  struct Worker {
    explicit Worker(std::int32_t number) : id(number), protocol(number) {}
    std::int32_t id;
    ContextProtocol protocol;
    bool is_alive = true;
    std::set<std::int32_t> saw_down;
    std::vector<ContextId> open;         // of its program
    std::map<CopyId, ContextId> copies;  // that have not ended
  };

  std::int32_t worker() { return static_cast<std::int32_t>(pick(workers_.size())); }
  Worker& worker_at(std::int32_t id) { return workers_[static_cast<std::size_t>(id)]; }
  bool is_open(ContextId context) const { return open_.count(context) > 0; }
  // A message, which comes at any time. It may be lost with its sender. Once its receiver has seen its
  // sender's death it comes seldom: an agent that joins keeps what comes for later.
  void carry(std::int32_t from, std::int32_t to, std::function<void()> deliver) {
    at(1 + pick(delay_), [this, from, to, deliver = std::move(deliver)] {
      const Worker& receiver = worker_at(to);
      if (!receiver.is_alive || (!worker_at(from).is_alive && pick(2) == 0)) return;
      if (is_cut(from, to) && pick(2) == 0) return;
      if (receiver.saw_down.count(from) == 0 || pick(10) == 0) deliver();
    });
  }

  void apply(std::int32_t self, const ContextProtocol::Effects& effects) {
    Worker& here = worker_at(self);
    for (const CopyId copy : effects.ended) {
      const auto ended = here.copies.extract(copy);
      if (ended.empty()) return fail("a copy ends twice, or never began");
      if (is_open(ended.mapped()) && here.saw_down.count(ended.mapped().creator) == 0) {
        fail("a copy ends, and the context has not");
      }
    }
    for (const auto& [to, message] : effects.messages) {
      if (message.type == ContextMessage::Type::kUnsent) ++num_unsent;
      if (message.type == ContextMessage::Type::kOrphaned) ++num_orphaned;
      if (message.type == ContextMessage::Type::kAbandoned) ++num_abandoned;
      const auto deliver = [this, self, to = to, message = message] {
        ContextProtocol::Effects next;
        Worker& receiver = worker_at(to);
        receiver.protocol.on_message(self, message, next);
        // A message that counts calls may come before them, and makes the copy.
        const CopyId copy = receiver.protocol.copy_of(message.context);
        if (copy != ContextProtocol::kNoCopy) receiver.copies.emplace(copy, message.context);
        apply(to, next);
      };
      if (to == self) {
        deliver();
      } else {
        carry(self, to, deliver);
      }
    }
  }

  void step() {
    const std::int32_t self = worker();
    Worker& here = worker_at(self);
    if (!here.is_alive) return;
    const std::uint64_t what = pick(10);
    if (here.open.empty() || what < 2) return create(self);
    const std::size_t index = pick(here.open.size());
    if (what < 4) return end(self, index);
    const ContextId context = here.open[index];
    call(self, here.protocol.copy_of(context), context, 2);
  }

  void create(std::int32_t self) {
    Worker& here = worker_at(self);
    const ContextId context = here.protocol.create();
    here.open.push_back(context);
    here.copies.emplace(here.protocol.copy_of(context), context);
    open_.insert(context);
  }

  void end(std::int32_t self, std::size_t index) {
    Worker& here = worker_at(self);
    const ContextId context = here.open[index];
    here.open.erase(here.open.begin() + static_cast<std::ptrdiff_t>(index));
    open_.erase(context);
    ContextProtocol::Effects effects;
    here.protocol.end(context, effects);
    apply(self, effects);
  }

  // By the program of a context, or by a handler. `depth`: of the calls that its own handler makes.
  void call(std::int32_t self, CopyId copy, ContextId context, int depth) {
    Worker& here = worker_at(self);
    if (!here.is_alive) return;
    const std::int32_t callee = worker();
    const bool has_copy = here.copies.count(copy) > 0;
    if (here.protocol.begin_call(copy, callee) != has_copy) {
      return fail(has_copy ? "a call is not within its context"
                           : "a call is within a context that has ended");
    }
    if (!has_copy) return ++num_outside, void();
    const std::uint64_t delay = pick(2) == 0 ? 0 : pick(delay_);  // until its references are known
    if (pick(8) == 0) {
      return at(delay, [this, self, copy, callee, context] { cancel(self, copy, callee, context); });
    }
    at(delay, [this, self, callee, context, depth] {
      if (!worker_at(self).is_alive) return;
      const auto deliver = [this, self, callee, context, depth] { arrive(self, callee, context, depth); };
      if (callee == self) return deliver();
      carry(self, callee, deliver);
    });
  }

  // A call is not sent: its caller has given up, or it cannot travel.
  void cancel(std::int32_t self, CopyId copy, std::int32_t callee, ContextId context) {
    Worker& here = worker_at(self);
    if (!here.is_alive) return;
    ContextProtocol::Effects effects;
    here.protocol.cancel_call(copy, context, callee, effects);
    apply(self, effects);
  }

  void arrive(std::int32_t caller, std::int32_t self, ContextId context, int depth) {
    Worker& here = worker_at(self);
    const CopyId before = here.protocol.copy_of(context);
    const CopyId copy = here.protocol.on_call(caller, context);
    if (before != ContextProtocol::kNoCopy && copy != before) fail("a call runs in another copy");
    if (copy == ContextProtocol::kNoCopy) {
      if (is_open(context) && here.saw_down.count(caller) + here.saw_down.count(context.creator) == 0) {
        fail("a call does not run in its context");
      }
    } else {
      here.copies.emplace(copy, context);
    }
    if (!is_open(context)) {
      ++num_late;
      if (copy != before) ++num_made_late;
    }
    // A call that fails, or was cancelled, has a handler that does nothing.
    for (std::uint64_t i = depth == 0 ? 0 : pick(5) / 2; i > 0; --i) {
      at(pick(200), [this, self, copy, context, depth] { call(self, copy, context, depth - 1); });
    }
  }

  void die(std::int32_t self) {
    Worker& dead = worker_at(self);
    if (!std::exchange(dead.is_alive, false)) return;
    for (const ContextId context : dead.open) open_.erase(context);
    for (Worker& other : workers_) {
      at(1 + pick(pick(2) == 0 ? 5 : 500), [this, self, &other] { give_up(other.id, self); });
    }
  }

  // `self` takes `other` for dead.
  void give_up(std::int32_t self, std::int32_t other) {
    Worker& here = worker_at(self);
    if (!here.is_alive) return;
    here.saw_down.insert(other);
    ContextProtocol::Effects effects;
    here.protocol.on_down(other, effects);
    apply(self, effects);
  }

  void check() {
    for (const Worker& worker : workers_) {
      if (!worker.is_alive) continue;
      const auto is_gone = [&](const auto& entry) {
        return worker.protocol.copy_of(entry.second) != entry.first;
      };
      if (std::any_of(worker.copies.begin(), worker.copies.end(), is_gone)) {
        return fail("worker " + std::to_string(worker.id) + " has forgotten a context");
      }
    }
  }

  std::uint64_t delay_ = 1;
  std::vector<Worker> workers_;
  std::set<ContextId> open_;  // of living creators
};

TEST(ContextSimulationTest, ContextsLiveUntilTheirEndAndLeaveNothing) {
  std::size_t num_late = 0, num_made_late = 0, num_outside = 0, num_unsent = 0;
  for (std::uint64_t seed = 1; seed <= test::num_seeds(); ++seed) {
    ContextSimulation simulation(seed, Losses::kNone);
    ASSERT_EQ(simulation.run(), "") << "seed " << seed;
    num_late += simulation.num_late;
    num_made_late += simulation.num_made_late;
    num_outside += simulation.num_outside;
    num_unsent += simulation.num_unsent;
  }
  EXPECT_GT(num_late, test::num_seeds()) << "calls that come after the end";
  EXPECT_GT(num_made_late, 0U) << "copies that such a call makes";
  EXPECT_GT(num_outside, test::num_seeds() / 10) << "calls of handlers that run on after the end";
  EXPECT_GT(num_unsent, 0U) << "calls that ends have counted, and that are not sent";
}

TEST(ContextSimulationTest, ContextsLiveUntilTheirEndAndLeaveNothingWhereWorkersDie) {
  std::size_t num_late = 0, num_orphaned = 0;
  for (std::uint64_t seed = 1; seed <= test::num_seeds(); ++seed) {
    ContextSimulation simulation(seed, Losses::kDeaths);
    ASSERT_EQ(simulation.run(), "") << "seed " << seed;
    num_late += simulation.num_late;
    num_orphaned += simulation.num_orphaned;
  }
  EXPECT_GT(num_late, test::num_seeds() / 4) << "calls that come after the end";
  EXPECT_GT(num_orphaned, 0U) << "copies of which a caller has died";
}

TEST(ContextSimulationTest, ContextsLiveUntilTheirEndAndLeaveNothingWhereTwoWorkersLoseEachOther) {
  std::size_t num_abandoned = 0, num_unsent = 0;
  for (std::uint64_t seed = 1; seed <= test::num_seeds(); ++seed) {
    ContextSimulation simulation(seed, seed % 2 == 0 ? Losses::kPairs : Losses::kBoth);
    ASSERT_EQ(simulation.run(), "") << "seed " << seed;
    num_abandoned += simulation.num_abandoned;
    num_unsent += simulation.num_unsent;
  }
  EXPECT_GT(num_abandoned, test::num_seeds() / 4)
      << "copies whose creator was lost, and that have made calls";
  EXPECT_GT(num_unsent, 0U) << "calls that ends have counted, and that are not sent";
}

}  // namespace
}  // namespace cohort::rpc
