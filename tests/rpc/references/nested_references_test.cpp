// References within objects, which third workers fetch.
#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "cohort/rpc/agent.h"
#include "tests/rpc/job.h"
#include "tests/support/comes_true.h"

namespace cohort::rpc {
namespace {

using test::agent_of;
using test::Job;
using TensorReferences = std::vector<RRef<at::Tensor>>;

at::Tensor shifted(const at::Tensor& x, double by) {
  return x + by;
}
COHORT_REMOTE(shifted);

// References to objects of another worker.
TensorReferences two_references(const std::string& here, const std::string& there, const at::Tensor& x) {
  return {agent_of(here).remote<shifted>(there, x, 1), agent_of(here).remote<shifted>(there, x, 2)};
}
COHORT_REMOTE(two_references);

at::Tensor fetch_second(const RRef<TensorReferences>& list) {
  return list.to_here().at(1).to_here();
}
COHORT_REMOTE(fetch_second);

at::Tensor two_times(const at::Tensor& x) {
  return x * 2;
}
COHORT_REMOTE(two_times);

TensorReferences two_times_each(const std::string& here, const std::string& there,
                                const std::vector<at::Tensor>& values) {
  TensorReferences references;
  for (const at::Tensor& value : values) references.push_back(agent_of(here).remote<two_times>(there, value));
  return references;
}
COHORT_REMOTE(two_times_each);

// An object that holds a reference to the next one, on the next worker; the last one a value.
struct ChainLink {
  std::vector<RRef<ChainLink>> next;
  at::Tensor value;
};
COHORT_NESTED(ChainLink, next, value)

ChainLink make_link(const std::string& here, const RRef<at::Tensor>& source, int left) {
  if (left == 0) return {{}, source.to_here()};
  const std::string next = here == "w0" ? "w1" : here == "w1" ? "w2" : "w0";
  return {{agent_of(here).remote<make_link>(next, next, source, left - 1)}, {}};
}
COHORT_REMOTE(make_link);

class NestedReferencesTest : public testing::Test {
 protected:
  ~NestedReferencesTest() override {
    EXPECT_TRUE(test::comes_true([this] {
      std::size_t left = 0;
      for (std::size_t id = 0; id < 3; ++id) {
        const AgentMetrics metrics = job[id].metrics();
        left += metrics.references + metrics.objects.size();
      }
      return left == 0;
    }));
    job.shutdown();
  }
  Job job{3};
  const at::Tensor x = at::ones({2, 2});
};

TEST_F(NestedReferencesTest, AnObjectMayBeAListOfReferences) {
  for (const char* there : {"w2", "w1", "w0"}) {
    const RRef<TensorReferences> list = job[0].remote<two_references>("w1", "w1", there, x);
    const TensorReferences references = list.to_here();
    ASSERT_EQ(references.size(), 2U);
    for (std::size_t i = 0; i < 2; ++i) {
      EXPECT_EQ(references[i].owner().name, there);
      EXPECT_TRUE(references[i].confirmed_by_owner());
      EXPECT_TRUE(at::equal(references[i].to_here(), x + static_cast<double>(i + 1)));
    }
    for (const char* worker : {"w0", "w1", "w2"}) {
      EXPECT_TRUE(at::equal(job[0].rpc_sync<fetch_second>(worker, list), x + 2)) << worker << ' ' << there;
    }
  }
}

TEST_F(NestedReferencesTest, ManyListsOfReferencesAreMadeBeforeTheFirstIsFetched) {
  std::vector<RRef<TensorReferences>> lists;
  for (int i = 0; i < 20; ++i) lists.push_back(job[0].remote<two_references>("w1", "w1", "w2", x * i));
  for (int i = 0; i < 20; ++i) {
    const TensorReferences references = lists[static_cast<std::size_t>(i)].to_here();
    EXPECT_TRUE(at::equal(references.at(0).to_here(), x * i + 1)) << i;
    EXPECT_TRUE(at::equal(references.at(1).to_here(), x * i + 2)) << i;
  }
}

TEST_F(NestedReferencesTest, ListsOfReferencesMayPointToSparseTensors) {
  const at::Tensor a = at::eye(3).to_sparse(), b = (at::eye(3) * 5).to_sparse();
  std::vector<RRef<TensorReferences>> lists;
  for (int i = 0; i < 20; ++i) {
    lists.push_back(job[0].remote<two_times_each>("w1", "w1", "w2", std::vector<at::Tensor>{a, b}));
  }
  for (const RRef<TensorReferences>& list : lists) {
    const TensorReferences references = list.to_here();
    ASSERT_EQ(references.size(), 2U);
    const at::Tensor first = references[0].to_here(), second = references[1].to_here();
    EXPECT_TRUE(first.is_sparse() && second.is_sparse());
    EXPECT_TRUE(at::equal(first.to_dense(), at::eye(3) * 2));
    EXPECT_TRUE(at::equal(second.to_dense(), at::eye(3) * 10));
  }
}

TEST_F(NestedReferencesTest, AChainOfObjectsLeadsToItsEnd) {
  const RRef<at::Tensor> source = job[0].remote<shifted>("w1", x, 1);
  RRef<ChainLink> link = job[0].remote<make_link>("w1", "w1", source, 8);
  for (int i = 0; i < 8; ++i) {
    const ChainLink here = link.to_here();
    EXPECT_FALSE(here.value.defined());
    ASSERT_EQ(here.next.size(), 1U) << i;
    link = here.next[0];
  }
  const ChainLink end = link.to_here();
  EXPECT_TRUE(end.next.empty());
  EXPECT_TRUE(at::equal(end.value, x + 1));
}

}  // namespace
}  // namespace cohort::rpc
