// Random programs of workers that make objects, pass references on, drop them and die. Messages take any
// time, so they come in any order; a death is seen by each worker at a time of its own. Two workers may lose
// each other, while others keep both. What must hold at every step:
//   whoever may use a reference (its hold is confirmed, and worker and owner live and have each other) finds
//     the object at its owner;
//   a living worker is told that an object is gone only where somebody has died or was lost;
// and in the end, when all references are dropped: no object, no hold, and nothing that was passed on is
// left.
#include <gtest/gtest.h>

#include <functional>
#include <optional>
#include <set>
#include <string>

#include "cohort/rpc/internal/protocol/reference_protocol.h"
#include "tests/rpc/protocol/protocol_simulation.h"

namespace cohort::rpc {
namespace {

using Effects = ReferenceProtocol::Effects;
using HoldId = ReferenceProtocol::HoldId;
using State = ReferenceProtocol::State;

enum class Lost : std::uint8_t { kNothing, kWorkers, kPairs, kBoth };

class Simulation : test::ProtocolSimulation {
 public:
  Simulation(std::uint64_t seed, Lost lost) : ProtocolSimulation(seed) {
    const std::size_t num_workers = 2 + pick(4);
    for (std::size_t id = 0; id < num_workers; ++id) workers_.emplace_back(static_cast<std::int32_t>(id));
    delay_ = 1 + pick(pick(2) == 0 ? 20 : 400);
    const std::size_t num_steps = 10 + pick(150);
    for (std::size_t i = 0; i < num_steps; ++i) {
      at(pick(1'000), [this] { step(); });
    }
    if (lost == Lost::kWorkers || lost == Lost::kBoth) {
      for (std::size_t i = 1 + pick(num_workers); i > 0; --i) {
        at(pick(1'000), [this] { die(worker()); });
      }
    }
    if (lost == Lost::kPairs || lost == Lost::kBoth) {
      for (std::size_t i = 1 + pick(num_workers); i > 0; --i) {
        at(pick(1'000), [this] {
          cut(worker(), worker(), [this](std::int32_t self, std::int32_t other) { give_up(self, other); });
        });
      }
    }
  }

  // Returns what does not hold, or "".
  std::string run() {
    drain([this] { check(); });
    for (std::size_t id = 0; id < workers_.size(); ++id) {
      while (!workers_[id].references.empty()) drop(static_cast<std::int32_t>(id), 0);
    }
    drain([this] { check(); });
    for (const Worker& worker : workers_) {
      if (!worker.is_alive || !error().empty()) continue;
      const ReferenceProtocol& protocol = worker.protocol;
      if (protocol.num_objects() + protocol.num_holds() + protocol.num_passed_on() > 0) {
        fail("worker " + std::to_string(worker.id) + " is left with " +
             std::to_string(protocol.num_objects()) + " objects, " + std::to_string(protocol.num_holds()) +
             " holds, " + std::to_string(protocol.num_passed_on()) + " that were passed on");
      }
    }
    return error();
  }

  std::size_t num_passed_on = 0, num_gone = 0, num_freed = 0;

 private:
  struct Worker {
    explicit Worker(std::int32_t number) : id(number), protocol(number) {}
    std::int32_t id;
    ReferenceProtocol protocol;
    bool is_alive = true;
    std::set<std::int32_t> saw_down;
    std::vector<HoldId> references;     // that the program has
    std::map<ObjectId, bool> is_freed;  // its own objects
  };

  std::int32_t worker() { return static_cast<std::int32_t>(pick(workers_.size())); }
  // A message, which comes at any time. Once its receiver has seen its sender's death it comes seldom: an
  // agent that joins keeps what comes for later.
  void carry(std::int32_t from, std::int32_t to, std::function<void()> deliver) {
    at(1 + pick(delay_), [this, from, to, deliver = std::move(deliver)] {
      Worker& receiver = workers_[static_cast<std::size_t>(to)];
      if (is_cut(from, to) && pick(2) == 0) return;
      if (receiver.is_alive && (receiver.saw_down.count(from) == 0 || pick(10) == 0)) deliver();
    });
  }

  void apply(std::int32_t self, const Effects& effects) {
    Worker& here = workers_[static_cast<std::size_t>(self)];
    for (const auto& [to, message] : effects.messages) {
      if (to == self) return fail("a message to oneself leaves the protocol");
      carry(self, to, [this, self, to = to, message = message] {
        Effects next;
        workers_[static_cast<std::size_t>(to)].protocol.on_message(self, message, next);
        if (message.type == ReferenceMessage::Type::kGone) {
          ++num_gone;
          if (num_dead_ + num_cut() == 0) fail("an object is gone, and nobody has died");
        }
        apply(to, next);
      });
    }
    for (const ObjectId object : effects.freed) {
      ++num_freed;
      if (std::exchange(here.is_freed[object], true)) fail("an object is freed twice");
    }
  }

  void step() {
    const std::int32_t self = worker();
    Worker& here = workers_[static_cast<std::size_t>(self)];
    if (!here.is_alive) return;
    const std::uint64_t what = pick(10);
    if (here.references.empty() || what == 0) {
      make(self, worker());
    } else if (what < 6) {
      pass_on(self, here.references[pick(here.references.size())], worker());
    } else {
      drop(self, pick(here.references.size()));
    }
  }

  void make(std::int32_t self, std::int32_t owner) {
    Worker& here = workers_[static_cast<std::size_t>(self)];
    if (self == owner && pick(2) == 0) return here.references.push_back(here.protocol.create_here());
    const HoldId hold = here.protocol.create(owner);
    here.references.push_back(hold);
    const WireReference asked = here.protocol.describe(hold);
    const auto arrive = [this, self, owner, asked] {
      Effects effects;
      ReferenceProtocol& there = workers_[static_cast<std::size_t>(owner)].protocol;
      const HoldId maker = there.make(asked, self, effects);
      apply(owner, effects);
      at(pick(100), [this, owner, maker] { release(owner, maker); });  // the value is made
    };
    if (self == owner) return arrive();
    carry(self, owner, arrive);
  }

  // As an argument: once it is confirmed, or never where it is lost. Whoever gets it may drop it at once, as
  // a call whose time is over does.
  void pass_on(std::int32_t self, HoldId hold, std::int32_t to) {
    Worker& here = workers_[static_cast<std::size_t>(self)];
    if (here.protocol.state(hold) != State::kConfirmed) return;
    ++num_passed_on;
    const WireReference reference = here.protocol.send(hold, to);
    const auto arrive = [this, self, to, reference] {
      Worker& there = workers_[static_cast<std::size_t>(to)];
      Effects effects;
      const HoldId received = there.protocol.receive(reference, self, effects);
      apply(to, effects);
      if (pick(4) == 0) return release(to, received);
      there.references.push_back(received);
    };
    if (to == self) return arrive();
    carry(self, to, arrive);
  }

  void drop(std::int32_t self, std::size_t index) {
    Worker& here = workers_[static_cast<std::size_t>(self)];
    const HoldId hold = here.references[index];
    here.references.erase(here.references.begin() + static_cast<std::ptrdiff_t>(index));
    release(self, hold);
  }

  void release(std::int32_t self, HoldId hold) {
    Worker& here = workers_[static_cast<std::size_t>(self)];
    if (!here.is_alive) return;
    Effects effects;
    here.protocol.release(hold, effects);
    apply(self, effects);
  }

  void die(std::int32_t self) {
    if (!std::exchange(workers_[static_cast<std::size_t>(self)].is_alive, false)) return;
    ++num_dead_;
    for (Worker& other : workers_) {
      at(1 + pick(pick(2) == 0 ? 5 : 500), [this, self, &other] { give_up(other.id, self); });
    }
  }

  // `self` takes `other` for dead.
  void give_up(std::int32_t self, std::int32_t other) {
    Worker& here = workers_[static_cast<std::size_t>(self)];
    if (!here.is_alive) return;
    here.saw_down.insert(other);
    Effects effects;
    here.protocol.on_down(other, effects);
    apply(self, effects);
  }

  void check() {
    for (const Worker& worker : workers_) {
      if (!worker.is_alive) continue;
      for (const HoldId hold : worker.references) {
        const WireReference reference = worker.protocol.describe(hold);
        const Worker& owner = workers_[static_cast<std::size_t>(reference.owner)];
        if (worker.protocol.state(hold) != State::kConfirmed || !owner.is_alive) continue;
        if (is_cut(worker.id, owner.id)) continue;
        if (!owner.protocol.has_object(reference.object)) {
          return fail("worker " + std::to_string(worker.id) + " may use an object of worker " +
                      std::to_string(owner.id) + " that was freed");
        }
      }
    }
  }

  std::uint64_t delay_ = 1;
  std::size_t num_dead_ = 0;
  std::vector<Worker> workers_;
};

TEST(ReferenceSimulationTest, NothingIsFreedTooEarlyAndNothingStays) {
  std::size_t num_passed_on = 0, num_freed = 0;
  for (std::uint64_t seed = 1; seed <= test::num_seeds(); ++seed) {
    Simulation simulation(seed, Lost::kNothing);
    ASSERT_EQ(simulation.run(), "") << "seed " << seed;
    num_passed_on += simulation.num_passed_on;
    num_freed += simulation.num_freed;
  }
  EXPECT_GT(num_passed_on, test::num_seeds() * 10);
  EXPECT_GT(num_freed, test::num_seeds() * 5);
}

TEST(ReferenceSimulationTest, NothingIsFreedTooEarlyAndNothingStaysWhereWorkersDie) {
  std::size_t num_gone = 0;
  for (std::uint64_t seed = 1; seed <= test::num_seeds(); ++seed) {
    Simulation simulation(seed, Lost::kWorkers);
    ASSERT_EQ(simulation.run(), "") << "seed " << seed;
    num_gone += simulation.num_gone;
  }
  EXPECT_GT(num_gone, 0U) << "no death overtook a reference";
}

TEST(ReferenceSimulationTest, NothingIsFreedTooEarlyAndNothingStaysWhereTwoWorkersLoseEachOther) {
  std::size_t num_gone = 0;
  for (std::uint64_t seed = 1; seed <= test::num_seeds(); ++seed) {
    Simulation simulation(seed, seed % 2 == 0 ? Lost::kPairs : Lost::kBoth);
    ASSERT_EQ(simulation.run(), "") << "seed " << seed;
    num_gone += simulation.num_gone;
  }
  EXPECT_GT(num_gone, 0U) << "no loss overtook a reference";
}

}  // namespace
}  // namespace cohort::rpc
