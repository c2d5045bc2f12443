// What a rank sees only as it looks for the last time before it calls others late.
#include <gtest/gtest.h>

#include <atomic>
#include <memory>
#include <thread>

#include "cohort/base/error.h"
#include "tests/comm/shm/ranks.h"
#include "tests/support/comes_true.h"
#include "tests/support/throws.h"

namespace cohort::comm::shm {
namespace {

using test::wait_until;

/// The end of a round, which this rank sees when it looks who is late, and not before.
class EndsAsTheLateAreNamed : public Condition {
 public:
  EndsAsTheLateAreNamed(Communicator& ranks, base::Deadline deadline)
      : all_(ranks.everyone()), deadline_(deadline) {}
  bool ready() override { return was_named_ && all_.ready(); }
  std::uint64_t waits_for() const override {
    was_named_ = was_named_ || deadline_.expired();
    return 2;  // rank 1
  }

 private:
  Communicator::Everyone all_;
  const base::Deadline deadline_;
  mutable bool was_named_ = false;
};

// Two rounds, each of which all come to. Rank 0 sees the end of the first one as it looks who is late.
Task two_rounds(Communicator& ranks, base::Deadline deadline) {
  const Signature signature{
      .type = CollectiveType::kAllReduce, .dtype = Dtype::kFloat, .op = Op::kSum, .bytes = 4096};
  ranks.arrive(signature);
  if (ranks.rank() == 0) {
    co_await EndsAsTheLateAreNamed(ranks, deadline);
  } else {
    co_await ranks.everyone();
  }
  ranks.arrive(signature);
  co_await ranks.everyone_again();
}

// Rank 1 has begun in time, and computes: rank 0 comes to the second round with its last look, and asks it to
// continue. A loaded machine may stop its thread for longer than it gets, so one good round is enough.
TEST(ShmLastLookTest, WhoHasBegunInTimeIsNotLateForTheRoundOfTheLastLook) {
  bool is_good = false;
  for (int round = 0; round < 20 && !is_good; ++round) {
    std::atomic<bool> has_begun{false}, is_over{false};
    run_threads(2, [&](Rank& rank) {
      rank.run([&] { return barrier(rank.ranks()); });
      std::this_thread::sleep_for(milliseconds(20));  // the progress threads rest
      const bool is_first = rank.rank() == 0;
      if (is_first) wait_until([&] { return has_begun.load(); });
      const base::Deadline deadline(is_first ? milliseconds(100) : milliseconds(20'000));
      const auto operation = std::make_shared<Operation>(deadline);
      operation->call = "all_reduce";
      operation->rounds = Rounds::kOne;  // the rest is left to wait()
      operation->make = [&rank, deadline] { return two_rounds(rank.ranks(), deadline); };
      rank.engine().begin(operation);
      has_begun = true;
      if (!is_first) wait_until([&] { return is_over.load(); });
      try {
        rank.wait(operation);
        if (is_first) is_good = true;
      } catch (const Error&) {
      }
      if (is_first) is_over = true;
    });
  }
  EXPECT_TRUE(is_good);
}

/// Never comes, and names nobody at the first looks at who is late.
class NamesNobodyAtFirst : public Condition {
 public:
  bool ready() override { return false; }
  std::uint64_t waits_for() const override { return ++num_looks_ > 4 ? 2 : 0; }

 private:
  mutable int num_looks_ = 0;
};

TEST(ShmLastLookTest, ARankIsNamedThoughOthersCameAtTheLastLooks) {
  std::atomic<bool> is_over{false};
  run_threads(2, [&](Rank& rank) {
    if (rank.rank() == 1) return wait_until([&] { return is_over.load(); });
    const auto call = []() -> Task { co_await NamesNobodyAtFirst(); };
    COHORT_EXPECT_THROW_WITH(rank.wait(rank.begin(call, "call", false, milliseconds(10))), TimeoutError,
                             "ms: rank 1 has not come");
    is_over = true;
  });
}

}  // namespace
}  // namespace cohort::comm::shm
