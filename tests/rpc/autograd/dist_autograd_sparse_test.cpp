// Sparse tensors: as arguments, results and objects of calls, and as gradients.
#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <gtest/gtest.h>

#include <functional>
#include <map>
#include <optional>
#include <string>
#include <thread>
#include <tuple>
#include <utility>
#include <vector>

#include "cohort/base/error.h"
#include "cohort/optim/factory.h"
#include "cohort/rpc/dist_autograd.h"
#include "cohort/rpc/dist_optimizer.h"
#include "tests/rpc/job.h"
#include "tests/support/comes_true.h"
#include "tests/support/throws.h"

namespace cohort::rpc {
namespace {

using dist_autograd::Context;
using dist_autograd::ContextId;
using test::agent_of;
using test::comes_true;
using test::Job;

at::Tensor look_up_table;  // a parameter of whoever looks up

at::Tensor look_up_in(const at::Tensor& rows, const at::Tensor& words) {
  return at::embedding(rows, words, /*padding_idx=*/-1, /*scale_grad_by_freq=*/false, /*sparse=*/true);
}
at::Tensor look_up(const at::Tensor& words) {
  return look_up_in(look_up_table, words);
}
at::Tensor sum_of_table() {
  return look_up_table.sum();
}
at::Tensor look_up_and_sum(const at::Tensor& words) {
  return look_up(words).sum() + sum_of_table();
}
at::Tensor look_up_in_bags(const at::Tensor& rows, const at::Tensor& words, const at::Tensor& scales) {
  return std::get<0>(at::embedding_bag(rows, words, at::tensor({0, 2}, at::kLong),
                                       /*scale_grad_by_freq=*/false, /*mode=*/0, /*sparse=*/true, scales));
}
at::Tensor look_up_bags(const at::Tensor& words, const at::Tensor& scales) {
  return look_up_in_bags(look_up_table, words, scales);
}
std::optional<at::Tensor> table_gradient(ContextId id) {
  for (const auto& [leaf, gradient] : dist_autograd::get_gradients(id)) {
    if (leaf.is_same(look_up_table)) return gradient;
  }
  return std::nullopt;
}
RRef<at::Tensor> table_reference() {
  return make_rref(look_up_table);
}
at::Tensor add_sparse(const at::Tensor& a, const at::Tensor& b) {
  return a + b;
}
Future<at::Tensor> add_sparse_later(const at::Tensor& a, const at::Tensor& b) {
  Promise<at::Tensor> sum;
  sum.set_value(a + b);
  return sum.future();
}
// w1 calls w2.
at::Tensor add_sparse_through(const std::string& here, const at::Tensor& a, const at::Tensor& b) {
  if (here == "w2") return a + b;
  return agent_of(here).rpc_sync<add_sparse_through>("w2", "w2", a, b) + a;
}
at::Tensor twice_of_object(const RRef<at::Tensor>& x) {
  const at::Tensor value = x.to_here();
  return value + value;
}
using SparseLists = std::map<std::string, std::vector<at::Tensor>>;
SparseLists swapped_lists(const SparseLists& lists) {
  return {{"a", lists.at("b")}, {"b", lists.at("a")}};
}

COHORT_REMOTE(look_up_in);
COHORT_REMOTE(look_up);
COHORT_REMOTE(sum_of_table);
COHORT_REMOTE(look_up_and_sum);
COHORT_REMOTE(look_up_bags);
COHORT_REMOTE(table_gradient);
COHORT_REMOTE(table_reference);
COHORT_REMOTE(add_sparse);
COHORT_REMOTE(add_sparse_later);
COHORT_REMOTE(add_sparse_through);
COHORT_REMOTE(twice_of_object);
COHORT_REMOTE(swapped_lists);

// Of 4 x 3: its entries are at (3, 1) and (0, 2).
at::Tensor sparse_leaf(double first) {
  return at::sparse_coo_tensor(at::tensor({3, 0, 1, 2}, at::kLong).view({2, 2}),
                               at::tensor({first, first + 1}), {4, 3})
      .requires_grad_();
}
at::Tensor loss_of_sparse(const at::Tensor& x) {
  const at::Tensor values = x.coalesce().values();
  return (values * values).sum();
}

class DistAutogradSparseTest : public testing::Test {
 protected:
  DistAutogradSparseTest() { look_up_table = at::arange(12, at::kDouble).view({6, 2}).requires_grad_(); }
  ~DistAutogradSparseTest() override { look_up_table.reset(); }

  at::Tensor gradient_of_table(std::size_t trainer, const Context& context) {
    const at::NoGradGuard no_grad;
    return job[trainer].rpc_sync<table_gradient>("w1", context.id()).value_or(at::Tensor());
  }
  static at::Tensor gradient_of(const Context& context, const at::Tensor& leaf) {
    for (const auto& [known, gradient] : dist_autograd::get_gradients(context)) {
      if (known.is_same(leaf)) return gradient;
    }
    return {};
  }
  // Of the table, in one process.
  template <typename Fn>
  static at::Tensor locally(const Fn& loss) {
    const at::Tensor own = look_up_table.detach().clone().requires_grad_();
    loss(own).backward();
    return own.grad().is_sparse() ? own.grad().to_dense() : own.grad();
  }

  Job job{3};
  const at::Tensor words = at::tensor({1, 4, 1}, at::kLong);
};

TEST_F(DistAutogradSparseTest, SparseTensorsAreArgumentsResultsAndObjects) {
  const at::Tensor a = sparse_leaf(2).detach(), b = sparse_leaf(5).detach();
  for (const char* worker : {"w0", "w1"}) {
    const at::Tensor sum = job[0].rpc_sync<add_sparse>(worker, a, b);
    EXPECT_TRUE(sum.is_sparse()) << worker;
    EXPECT_TRUE(at::equal(sum.to_dense(), (a + b).to_dense())) << worker;
    EXPECT_TRUE(at::equal(job[0].rpc_sync<add_sparse_later>(worker, a, b).to_dense(), sum.to_dense()));
    const RRef<at::Tensor> object = job[0].remote<add_sparse>(worker, a, a);
    EXPECT_TRUE(at::equal(object.to_here().to_dense(), (a + a).to_dense())) << worker;
    EXPECT_TRUE(at::equal(job[0].rpc_sync<twice_of_object>("w2", object).to_dense(), 4 * a.to_dense()));
  }
  const auto swapped = job[0].rpc_sync<swapped_lists>("w1", SparseLists{{"a", {a, b}}, {"b", {b}}});
  ASSERT_EQ(swapped.at("b").size(), 2U);
  EXPECT_TRUE(at::equal(swapped.at("b")[0].to_dense(), a.to_dense()));
  EXPECT_TRUE(at::equal(swapped.at("a")[0].to_dense(), b.to_dense()));
  job.shutdown();
}

TEST_F(DistAutogradSparseTest, AnEmbeddingOnAnotherWorkerHasASparseGradient) {
  Context context(job[0]);
  const at::Tensor rows = job[0].rpc_sync<look_up>("w1", words);
  dist_autograd::backward(context, {(rows * rows).sum()});
  const at::Tensor gradient = gradient_of_table(0, context);
  ASSERT_TRUE(gradient.is_sparse());
  EXPECT_TRUE(at::equal(gradient.to_dense(), locally([&](const at::Tensor& own) {
                          const at::Tensor found = look_up_in(own, words);
                          return (found * found).sum();
                        })));
}

TEST_F(DistAutogradSparseTest, SeveralBackwardsOfAnEmbeddingBag) {
  const at::Tensor scales = at::tensor({0.5, 2.0, 4.0}).requires_grad_(),
                   own_scales = scales.detach().clone().requires_grad_();
  Context context(job[0]);
  const at::Tensor loss = job[0].rpc_sync<look_up_bags>("w1", words, scales).square().sum();
  dist_autograd::backward(context, {loss}, {.keep_graph = true});
  dist_autograd::backward(context, {loss});
  const at::Tensor expected =
      locally([&](const at::Tensor& own) { return look_up_in_bags(own, words, own_scales).square().sum(); });
  EXPECT_TRUE(at::allclose(gradient_of_table(0, context).to_dense(), 2 * expected));
  EXPECT_TRUE(at::allclose(gradient_of(context, scales), 2 * own_scales.grad()));
}

TEST_F(DistAutogradSparseTest, SparseAndDenseGradientsOfALeafAddUpInAnyOrder) {
  const auto check = [&](const std::function<at::Tensor()>& loss, int num_sums) {
    Context context(job[0]);
    dist_autograd::backward(context, {loss()});
    const at::Tensor gradient = gradient_of_table(0, context),
                     expected = locally([&](const at::Tensor& own) {
                       return look_up_in(own, words).sum() + num_sums * own.sum();
                     });
    EXPECT_FALSE(gradient.is_sparse());
    EXPECT_TRUE(at::equal(gradient, expected));
  };
  const auto sparse = [&] { return job[0].rpc_sync<look_up>("w1", words).sum(); };
  const auto dense = [&] { return job[0].rpc_sync<sum_of_table>("w1"); };
  check([&] { return job[0].rpc_sync<look_up_and_sum>("w1", words); }, 1);
  check(
      [&] {
        const at::Tensor first = dense();  // gradients are added from the last call to the first
        return first + sparse();
      },
      1);
  check(
      [&] {
        const at::Tensor first = sparse(), second = dense();
        return first + second + dense();
      },
      2);
}

TEST_F(DistAutogradSparseTest, SparseAndDenseGradientsAddUpInGrad) {
  const at::Tensor own = at::ones({6, 2}, at::kDouble).requires_grad_();
  const auto add = [](Context& context, const at::Tensor& loss) {
    dist_autograd::backward(context, {loss});
    dist_autograd::accumulate_into_grad(dist_autograd::get_gradients(context));
  };
  for (int i = 0; i < 2; ++i) {
    {
      Context context(job[0]);  // the gradient of an argument travels as a sparse one
      add(context, job[0].rpc_sync<look_up_in>("w1", own, words).sum());
    }
    EXPECT_EQ(own.grad().is_sparse(), i == 0);
    Context context(job[0]);
    add(context, own.sum());
    EXPECT_FALSE(own.grad().is_sparse());
  }
  EXPECT_TRUE(at::equal(own.grad().sum(1), 2 * at::tensor({2.0, 6.0, 2.0, 2.0, 4.0, 2.0})));
}

TEST_F(DistAutogradSparseTest, SparseArgumentsAndResultsHaveGradients) {
  const at::Tensor local_a = sparse_leaf(2), local_b = sparse_leaf(5);
  loss_of_sparse(local_a + local_b + local_a).backward();
  for (const char* worker : {"w0", "w1"}) {
    const at::Tensor a = sparse_leaf(2), b = sparse_leaf(5), constant = sparse_leaf(5).detach();
    Context context(job[0]);
    const at::Tensor sum = job[0].rpc_sync<add_sparse>(worker, job[0].rpc_sync<add_sparse>("w2", a, b), a);
    EXPECT_TRUE(sum.requires_grad());
    dist_autograd::backward(context, {loss_of_sparse(sum)});
    const at::Tensor of_a = gradient_of(context, a);
    ASSERT_TRUE(of_a.is_sparse());
    EXPECT_TRUE(at::equal(of_a.to_dense(), local_a.grad().to_dense())) << worker;
    EXPECT_TRUE(at::equal(gradient_of(context, b).to_dense(), local_b.grad().to_dense())) << worker;
    EXPECT_FALSE(a.grad().defined());
    EXPECT_FALSE(job[0].rpc_sync<add_sparse>(worker, constant, constant).requires_grad());
    EXPECT_TRUE(job[0].rpc_sync<add_sparse>(worker, a, constant).requires_grad()) << "nobody uses it";
  }
}

TEST_F(DistAutogradSparseTest, ListsAndElementTypes) {
  const at::Tensor a = sparse_leaf(2), unused = sparse_leaf(3), constant = sparse_leaf(5).detach(),
                   single = sparse_leaf(4).detach().to(at::kFloat).requires_grad_();
  Context context(job[0]);
  const auto lists =
      job[0].rpc_sync<swapped_lists>("w1", SparseLists{{"a", {a, constant}}, {"b", {unused, single}}});
  EXPECT_FALSE(lists.at("b").at(1).requires_grad());
  const at::Tensor sum = job[0].rpc_sync<add_sparse>("w2", lists.at("b").at(0), lists.at("a").at(1));
  EXPECT_EQ(sum.scalar_type(), at::kDouble);
  dist_autograd::backward(context, {loss_of_sparse(sum)});
  const at::Tensor expected = 2 * (a.detach() + single.detach()).to_dense();
  EXPECT_TRUE(at::equal(gradient_of(context, a).to_dense(), expected));
  EXPECT_EQ(gradient_of(context, single).scalar_type(), at::kFloat);
  EXPECT_TRUE(at::equal(gradient_of(context, single).to_dense(), expected.to(at::kFloat)));
  EXPECT_FALSE(gradient_of(context, unused).defined());
}

TEST_F(DistAutogradSparseTest, NestedCallsAndObjectsHaveSparseGradients) {
  const at::Tensor local_a = sparse_leaf(2), local_b = sparse_leaf(5);
  const at::Tensor nested = local_a + local_b + local_a;
  loss_of_sparse(nested + nested).backward();
  const at::Tensor a = sparse_leaf(2), b = sparse_leaf(5);
  {
    Context context(job[0]);
    const RRef<at::Tensor> object = job[0].remote<add_sparse_through>("w1", "w1", a, b);
    const at::Tensor loss = loss_of_sparse(job[0].rpc_sync<twice_of_object>("w2", object));
    dist_autograd::backward(context, {loss}, {.keep_graph = true});
    EXPECT_TRUE(at::equal(gradient_of(context, a).to_dense(), local_a.grad().to_dense()));
    dist_autograd::backward(context, {loss});
    EXPECT_TRUE(at::equal(gradient_of(context, a).to_dense(), 2 * local_a.grad().to_dense()));
    EXPECT_TRUE(at::equal(gradient_of(context, b).to_dense(), 2 * local_b.grad().to_dense()));
  }
  EXPECT_TRUE(comes_true([&] {
    std::size_t left = 0;
    for (std::size_t i = 0; i < 3; ++i) left += job[i].metrics().contexts + job[i].metrics().references;
    return left == 0;
  }));
}

TEST_F(DistAutogradSparseTest, TrainersLookUpInOneTable) {
  std::vector<std::thread> trainers;
  for (const std::size_t trainer : {std::size_t{0}, std::size_t{2}}) {
    trainers.emplace_back([this, trainer] {
      Context context(job[trainer]);
      const double scale = 1 + static_cast<double>(trainer);
      dist_autograd::backward(context, {(job[trainer].rpc_sync<look_up>("w1", words) * scale).sum()});
      EXPECT_TRUE(at::equal(gradient_of_table(trainer, context).to_dense().sum(1),
                            scale * at::tensor({0.0, 4.0, 0.0, 0.0, 2.0, 0.0})));
    });
  }
  for (std::thread& trainer : trainers) trainer.join();
}

TEST_F(DistAutogradSparseTest, AnOptimizerStepsByASparseGradientOrNamesItself) {
  const at::Tensor local = look_up_table.detach().clone().requires_grad_();
  (look_up_in(local, words).square().sum() + look_up_in(local, words).sum()).backward();
  const at::Tensor expected = local.detach() - 0.5 * local.grad().to_dense(),
                   before = look_up_table.detach().clone();
  const std::vector parameters = {job[0].rpc_sync<table_reference>("w1")};
  DistributedOptimizer sgd(parameters, {.name = "sgd", .lr = 0.5}),
      dense_only(parameters, {.name = "adam", .lr = 0.5});
  Context context(job[0]);
  const at::Tensor squares = job[0].rpc_sync<look_up>("w1", words).square().sum();
  dist_autograd::backward(context, {squares + job[0].rpc_sync<look_up>("w1", words).sum()});
  COHORT_EXPECT_THROW_WITH(dense_only.step(context), UsageError, "adam does not step sparse gradients");
  EXPECT_TRUE(at::equal(look_up_table, before));
  sgd.step(context);
  EXPECT_TRUE(at::equal(look_up_table, expected));
  EXPECT_FALSE(look_up_table.grad().defined());
}

}  // namespace
}  // namespace cohort::rpc
