#include "cohort/rpc/rref.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <atomic>

#include "cohort/base/error.h"
#include "tests/rpc/job.h"
#include "tests/support/comes_true.h"
#include "tests/support/gate.h"
#include "tests/support/throws.h"

namespace cohort::rpc {
namespace {

using std::chrono::milliseconds;
using test::agent_of;
using test::comes_true;
using test::Job;
using test::patience;

std::atomic<int> num_tables{0};

// Cannot travel.
class Table {
 public:
  Table(std::int64_t rows, double fill) : rows_(at::full({rows, 2}, fill)) { ++num_tables; }
  ~Table() { --num_tables; }
  Table(const Table&) = delete;
  Table& operator=(const Table&) = delete;

  at::Tensor lookup(const at::Tensor& rows) const { return rows_.index_select(0, rows); }
  void add(double value) { rows_ += value; }
  std::shared_ptr<Table> half() { return std::make_shared<Table>(rows_.size(0) / 2, 0.5); }
  double sum() noexcept { return rows_.sum().item<double>(); }

  // References of its own.
  void keep(RRef<Table> other) { other_ = std::move(other); }

 private:
  at::Tensor rows_;
  RRef<Table> other_;
};
std::shared_ptr<Table> make_table(std::int64_t rows) {
  if (rows == 0) throw DataError("data.test", "no rows");
  if (rows < 0) return nullptr;
  return std::make_shared<Table>(rows, 1.0);
}
at::Tensor twice(const at::Tensor& x) {
  return x * 2;
}
at::Tensor sum_of(const RRef<at::Tensor>& x) {
  return x.to_here().sum();
}
double sum_of_tables(const std::vector<RRef<Table>>& tables) {
  double sum = 0;
  for (const RRef<Table>& table : tables) sum += table.rpc_sync<&Table::sum>();
  return sum;
}
std::mutex kept_mutex;
std::map<std::string, RRef<Table>> kept;
void keep_as(const std::string& name, const RRef<Table>& table) {
  const std::lock_guard lock(kept_mutex);
  kept[name] = table;
}
RRef<Table> kept_as(const std::string& name) {
  const std::lock_guard lock(kept_mutex);
  return kept.at(name);
}
void forget(const std::string& name) {
  RRef<Table> table;
  const std::lock_guard lock(kept_mutex);
  std::swap(table, kept[name]);
}
std::optional<RRef<at::Tensor>> optional_rref(const std::string& here, bool has) {
  if (!has) return std::nullopt;
  return agent_of(here).make_rref(at::ones({3}));
}
test::Gate* gate = nullptr;
at::Tensor behind_gate() {
  gate->wait();
  return at::ones({2});
}
Promise<at::Tensor>* promised = nullptr;
Future<at::Tensor> comes_later() {
  return promised->future();
}
void do_nothing() {}

COHORT_REMOTE(make_table);
COHORT_REMOTE(make<Table, std::int64_t, double>);
COHORT_REMOTE(Table::lookup);
COHORT_REMOTE(Table::add);
COHORT_REMOTE(Table::half);
COHORT_REMOTE(Table::sum);
COHORT_REMOTE(Table::keep);
COHORT_REMOTE(twice);
COHORT_REMOTE(sum_of);
COHORT_REMOTE(sum_of_tables);
COHORT_REMOTE(keep_as);
COHORT_REMOTE(kept_as);
COHORT_REMOTE(forget);
COHORT_REMOTE(optional_rref);
COHORT_REMOTE(behind_gate);
COHORT_REMOTE(comes_later);
COHORT_REMOTE(do_nothing);

// Nothing is left on any worker.
::testing::AssertionResult is_empty(Job& job, std::size_t size) {
  const bool empty = comes_true([&] {
    for (std::size_t id = 0; id < size; ++id) {
      const AgentMetrics metrics = job[id].metrics();
      if (metrics.references + metrics.objects.size() > 0) return false;
    }
    return num_tables == 0;
  });
  if (empty) return ::testing::AssertionSuccess();
  auto failure = ::testing::AssertionFailure() << num_tables << " tables";
  for (std::size_t id = 0; id < size; ++id) {
    failure << "; w" << id << " has " << job[id].metrics().references << " references";
    for (const std::string& object : job[id].metrics().objects) failure << "\n  " << object;
  }
  return failure;
}

TEST(RRefTest, AnotherAgentOfTheProcessHasReferencesOfItsOwn) {
  Job job(2), other(2);
  const RRef<at::Tensor> x = job[0].remote<&twice>("w1", at::ones({3})),
                         y = other[0].remote<&twice>("w1", at::full({3}, 5.0));
  COHORT_EXPECT_THROW_WITH(other[0].rpc_sync<&sum_of>("w1", x), UsageError, "another agent of this process");
  COHORT_EXPECT_THROW_WITH(other[0].remote<&sum_of>("w1", x), UsageError, "another agent of this process");
  EXPECT_EQ(other[0].rpc_sync<&sum_of>("w1", y).item<double>(), 30);
  EXPECT_EQ(job[0].rpc_sync<&sum_of>("w1", x).item<double>(), 6);
  job.shutdown();
  other.shutdown();
}

TEST(RRefTest, AnObjectStaysWhereItIsMadeAndItsFunctionsRunThere) {
  Job job(2);
  {
    const RRef<Table> table = job[0].remote<&make_table>("w1", 4);
    EXPECT_EQ(table.owner().name, "w1");
    EXPECT_FALSE(table.is_owner());
    const at::Tensor rows = at::tensor({0, 3}, at::kLong);
    EXPECT_TRUE(at::equal(table.rpc_sync<&Table::lookup>(rows), at::ones({2, 2})));
    EXPECT_TRUE(table.confirmed_by_owner());
    table.rpc_sync<&Table::add>(2);
    EXPECT_EQ(table.rpc_async<&Table::sum>().get(), 24);
    const RRef<Table> half = table.remote<&Table::half>();
    EXPECT_EQ(half.rpc_sync<&Table::sum>(), 2);
    COHORT_EXPECT_THROW_WITH(table.local_value(), UsageError, "lies on w1, not here");
    EXPECT_EQ(num_tables, 2);
    const std::vector<std::string> objects = job[1].metrics().objects;
    ASSERT_EQ(objects.size(), 2U);
    EXPECT_NE(objects[0].find("rref_test.cpp:"), std::string::npos) << objects[0];
    EXPECT_NE(objects[0].find(" by make_table, held by w0"), std::string::npos) << objects[0];
  }
  EXPECT_TRUE(is_empty(job, 2));
  job.shutdown();
}

TEST(RRefTest, ValuesAreFetched) {
  Job job(2);
  {
    const at::Tensor x = at::arange(4, at::kFloat);
    for (const char* worker : {"w0", "w1"}) {
      const RRef<at::Tensor> y = job[0].remote<&twice>(worker, x);
      EXPECT_EQ(y.is_owner(), worker[1] == '0');
      EXPECT_TRUE(at::equal(y.to_here(), x * 2));
      EXPECT_TRUE(at::equal(y.to_here_async().get(), x * 2)) << "again";
      EXPECT_EQ(job[0].rpc_sync<&sum_of>("w1", y).item<float>(), 12) << worker;
      EXPECT_EQ(job[0].rpc_sync<&sum_of>("w0", y).item<float>(), 12) << worker;
    }
    const RRef<Table> table = job[0].remote<&make<Table, std::int64_t, double>>("w1", 3, 2.5);
    EXPECT_EQ(table.rpc_sync<&Table::sum>(), 15);
    const RRef<at::Tensor> here = job[0].make_rref(x);
    EXPECT_EQ(here.local_value()->const_data_ptr(), x.const_data_ptr());
    EXPECT_EQ(job[0].rpc_sync<&sum_of>("w1", here).item<float>(), 6);
    job[0].remote<&do_nothing>("w1").to_here();
    EXPECT_TRUE(at::equal(job[0].rpc_sync<&optional_rref>("w1", "w1", true)->to_here(), at::ones({3})));
    EXPECT_FALSE(job[0].rpc_sync<&optional_rref>("w1", "w1", false).has_value());
  }
  EXPECT_TRUE(is_empty(job, 2));
  job.shutdown();
}

TEST(RRefTest, WhoeverHasAReferenceKeepsTheObject) {
  Job job(3);
  {
    RRef<Table> table = job[0].remote<&make_table>("w1", 4);
    job[0].rpc_sync<&keep_as>("w2", "t", table);
    table = {};
    EXPECT_TRUE(comes_true([&] { return job[0].metrics().references == 0; }));
    EXPECT_TRUE(comes_true([] { return num_tables == 1; })) << "it may not be made yet";
    RRef<Table> again = job[0].rpc_sync<&kept_as>("w2", "t");
    EXPECT_EQ(again.owner().name, "w1");
    EXPECT_EQ(again.rpc_sync<&Table::sum>(), 8);
    job[0].rpc_sync<&forget>("w2", "t");
    EXPECT_EQ(again.rpc_sync<&Table::sum>(), 8);
    // Not confirmed yet, and to all workers, the owner among them.
    const RRef<Table> fresh = job[0].remote<&make_table>("w1", 1);
    for (const char* worker : {"w0", "w1", "w2"}) {
      EXPECT_EQ(job[0].rpc_sync<&sum_of_tables>(worker, std::vector<RRef<Table>>{fresh, again, fresh}), 12)
          << worker;
    }
  }
  EXPECT_TRUE(is_empty(job, 3));
  job.shutdown();
}

TEST(RRefTest, AnObjectMayHoldReferences) {
  Job job(3);
  {
    const RRef<Table> inner = job[0].remote<&make_table>("w1", 1);
    const RRef<Table> outer = job[0].remote<&make_table>("w2", 2);
    outer.rpc_sync<&Table::keep>(inner);
  }
  EXPECT_TRUE(is_empty(job, 3));
  // Two that hold each other live until the end, which names them.
  {
    const RRef<Table> a = job[0].remote<&make_table>("w1", 1), b = job[0].remote<&make_table>("w2", 1);
    a.rpc_sync<&Table::keep>(b);
    b.rpc_sync<&Table::keep>(a);
  }
  EXPECT_TRUE(comes_true([&] { return job[0].metrics().references == 0; }));
  EXPECT_TRUE(comes_true([&] {
    const auto objects = job[1].metrics().objects;
    return objects.size() == 1 && objects[0].find("held by w2") == objects[0].size() - 10;
  })) << job[1].metrics().objects.at(0);
  job.shutdown();
  EXPECT_EQ(num_tables, 0) << "of agents that have ended";
}

TEST(RRefTest, WhatTheMakerThrowsIsThrownAtTheUse) {
  Job job(2);
  {
    const RRef<Table> none = job[0].remote<&make_table>("w1", 0);
    COHORT_EXPECT_THROW_WITH(none.rpc_sync<&Table::sum>(), DataError, "no rows");
    const RRef<Table> null = job[0].remote<&make_table>("w1", -1);
    COHORT_EXPECT_THROW_WITH(null.rpc_sync<&Table::sum>(), UsageError, "returned null");
    const RRef<at::Tensor> unsent = job[0].remote<&twice>("w1", at::empty({2}, at::kMeta));
    COHORT_EXPECT_THROW_WITH(unsent.to_here(), UsageError, "cannot travel");
    COHORT_EXPECT_THROW_WITH(job[0].rpc_sync<&make_table>("w1", 3), UsageError, "returns an object");
    COHORT_EXPECT_THROW_WITH(job[0].remote<&make_table>("w7", 3), UsageError, "there is no worker 'w7'");
    COHORT_EXPECT_THROW_WITH(RRef<Table>().rpc_sync<&Table::sum>(), UsageError, "an empty RRef");
    const RRef<at::Tensor> other(null.reference());
    COHORT_EXPECT_THROW_WITH(other.to_here(), UsageError, "returned null");
    const RRef<Table> table = job[1].make_rref(std::make_shared<Table>(1, 1.0));
    const RRef<at::Tensor> wrong(table.reference());
    COHORT_EXPECT_THROW_WITH(wrong.local_value(), UsageError, "not a ");
    COHORT_EXPECT_THROW_WITH(wrong.to_here_async().get(), UsageError, "cannot travel");
  }
  EXPECT_TRUE(is_empty(job, 2));
  job.shutdown();
}

TEST(RRefTest, AResultMayComeLater) {
  Job job(2);
  {
    Promise<at::Tensor> promise;
    promised = &promise;
    const RRef<at::Tensor> x = job[0].remote<&comes_later>("w1");
    COHORT_EXPECT_THROW_WITH(x.within(milliseconds(50)).to_here(), TimeoutError, "no answer within 50 ms");
    Future<at::Tensor> sum = job[0].rpc_async<&sum_of>("w1", x);
    EXPECT_FALSE(sum.ready());
    promise.set_value(at::ones({3}));
    EXPECT_EQ(sum.get().item<float>(), 3);
    EXPECT_TRUE(at::equal(x.to_here(), at::ones({3})));
  }
  EXPECT_TRUE(is_empty(job, 2));
  job.shutdown();
}

// A call that gives up takes the references of its arguments, and of its late result, along.
TEST(RRefTest, CallsThatGiveUpLeaveNothing) {
  AgentOptions options;
  options.num_threads = 1;
  Job job(2, options);
  {
    test::Gate closed;
    gate = &closed;
    Future<at::Tensor> busy = job[0].rpc_async<&behind_gate>("w1");
    const RRef<Table> table = job[0].make_rref(std::make_shared<Table>(1, 1.0));
    EXPECT_THROW(job[0].rpc_sync<&keep_as>(to("w1").within(milliseconds(50)), "t", table), TimeoutError);
    EXPECT_THROW(job[0].rpc_sync<&optional_rref>(to("w1").within(milliseconds(50)), "w1", true),
                 TimeoutError);
    const RRef<at::Tensor> late = job[0].remote<&twice>(to("w1").within(milliseconds(50)), at::ones({1}));
    // Only the busy one is left once the time of the others is over.
    EXPECT_TRUE(comes_true([&] {
      const AgentMetrics there = job[1].metrics();
      return there.calls_unanswered == 1 && there.calls_handled == 4;
    }));
    closed.open();
    busy.get();
    COHORT_EXPECT_THROW_WITH(late.to_here(), TimeoutError, "twice was not done in time");
  }
  EXPECT_TRUE(is_empty(job, 2));
  job.shutdown();
}

TEST(RRefTest, AWorkersEndDropsItsReferencesAndLosesItsObjects) {
  Job job(3);
  const RRef<Table> of_1 = job[0].remote<&make_table>("w1", 1), of_2 = job[0].remote<&make_table>("w2", 1);
  EXPECT_EQ(of_1.rpc_sync<&Table::sum>() + of_2.rpc_sync<&Table::sum>(), 4);
  const RRef<Table> by_1 = job[1].remote<&make_table>("w2", 1);
  EXPECT_EQ(by_1.rpc_sync<&Table::sum>(), 2);
  job[0].rpc_sync<&keep_as>("w2", "t", of_1);
  job.drop(1);
  EXPECT_TRUE(comes_true([&] { return job[2].metrics().objects.size() == 1; })) << "what only w1 held";
  EXPECT_TRUE(comes_true([&] {
    try {
      of_1.confirmed_by_owner();
      return false;
    } catch (const OwnerLostError& error) {
      return std::string(error.what()).find("of w1: w1 ") != std::string::npos;
    }
  }));
  EXPECT_THROW(of_1.rpc_sync<&Table::sum>(), OwnerLostError);
  EXPECT_THROW(of_1.rpc_async<&Table::sum>().get(), OwnerLostError);
  EXPECT_THROW(job[0].rpc_sync<&keep_as>("w2", "u", of_1), OwnerLostError);
  EXPECT_THROW(job[0].remote<&make_table>("w1", 1).rpc_sync<&Table::sum>(), OwnerLostError);
  EXPECT_EQ(of_2.rpc_sync<&Table::sum>(), 2);
  forget("t");
}

}  // namespace
}  // namespace cohort::rpc
