#include "cohort/parallel/reducer.h"

#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/nn/modules/embedding.h>
#include <torch/nn/modules/linear.h>
#include <torch/optim/sgd.h>

#include <torch/csrc/distributed/c10d/reducer.hpp>

#include "cohort/comm/text_collectives.h"
#include "cohort/memory/internal/live_bytes.h"
#include "cohort/parallel/average.h"
#include "tests/parallel/training.h"
#include "tests/support/net/slow_link.h"
#include "tests/support/ranks.h"
#include "tests/support/throws.h"

namespace cohort::parallel {
namespace {

using test::Descent;
using test::expect_near;
using test::kSteps;
using test::loss_of;
using test::make_stack;
using test::same_bits;
using test::share_of;
using test::Stack;
using test::train;
using test::train_alone;
using test::wave;

struct Setting {
  const char* name;
  ReducerOptions options;
};

std::vector<Setting> settings() {
  std::vector<Setting> list = {{"default", {}}};
  const auto add = [&](const char* name, auto change) {
    list.push_back({name, {}});
    change(list.back().options);
  };
  add("no overlap", [](auto& o) { o.overlap = false; });
  add("copies", [](auto& o) { o.gradient_as_bucket_view = false; });
  add("a bucket for each", [](auto& o) { o.first_bucket_bytes = o.bucket_cap_bytes = 1; });
  add("small buckets by definition", [](auto& o) {
    o.first_bucket_bytes = o.bucket_cap_bytes = 400;
    o.plan = BucketPlan::kDefinition;
  });
  add("small buckets by arrival", [](auto& o) {
    o.first_bucket_bytes = o.bucket_cap_bytes = 400;
    o.plan = BucketPlan::kArrival;
  });
  add("own buckets", [](auto& o) {
    o.buckets = {{"layer0.weight", "layer3.bias"},
                 {"layer1.weight", "layer1.bias", "layer2.weight", "layer2.bias", "layer0.bias"},
                 {"layer3.weight"}};
  });
  add("find unused", [](auto& o) { o.find_unused_parameters = true; });
  add("static graph", [](auto& o) { o.static_graph = true; });
  return list;
}

TEST(ReducerTest, EverySettingTrainsAsOneProcessWithTheJoinedBatch) {
  const Stack whole = train_alone();
  for (const Setting& setting : settings()) {
    for (const int size : {1, 2, 3}) {
      SCOPED_TRACE(base::concat(setting.name, ", ", size, " ranks"));
      test::run_ranks(size, size == 3 ? "gloo" : "shm",
                      [&](comm::Group& group) { expect_near(train(group, setting.options), whole, 1e-12); });
    }
  }
}

TEST(ReducerTest, EverySettingAndBackendGivesTheSameBitsOnTwoRanks) {
  std::vector<Stack> results;
  std::mutex mutex;
  for (const Setting& setting : settings()) {
    test::run_ranks(2, setting.options.overlap ? "gloo" : "shm", [&](comm::Group& group) {
      const Stack net = train(group, setting.options);
      const std::lock_guard lock(mutex);
      results.push_back(net);
    });
  }
  for (const Stack& net : results) EXPECT_TRUE(same_bits(net, results[0]));
}

TEST(ReducerTest, TheSameBitsAsTheReducerOfC10d) {
  for (const bool as_view : {true, false}) {
    test::run_ranks(2, "gloo", [&](comm::Group& group) {
      const auto run = [&](auto&& prepare, Stack& net) {
        Descent descent(*net);
        for (int step = 0; step < kSteps; ++step) {
          descent.zero_grad();
          const at::Tensor loss = loss_of(net, share_of(wave(8) + step, group.rank(), 2));
          prepare();
          loss.backward();
          descent.step();
        }
      };
      Stack ours = make_stack(), theirs = make_stack();
      Reducer reducer(group, parameters_to_reduce(*ours),
                      {.bucket_cap_bytes = 400, .gradient_as_bucket_view = as_view});
      run([&] { reducer.prepare(); }, ours);
      const auto parameters = theirs->parameters();
      auto [buckets, limits] = c10d::compute_bucket_assignment_by_size(parameters, {100, 400});
      std::reverse(buckets.begin(), buckets.end());
      c10d::Reducer oracle(parameters, buckets, group.process_group(),
                           std::vector<bool>(parameters.size(), false), 400, false, as_view, {}, 100, false,
                           false, {});
      run(
          [&] {
            oracle.prepare_for_forward();
            if (oracle.should_rebuild_buckets()) oracle.rebuild_buckets();
            oracle.prepare_for_backward({});
          },
          theirs);
      EXPECT_TRUE(same_bits(ours, theirs));
    });
  }
}

TEST(ReducerTest, BucketsAreReducedWhileBackwardRuns) {
  for (const bool overlap : {true, false}) {
    test::run_ranks(2, "shm", [&](comm::Group& group) {
      Stack net = make_stack();
      int early = 0, calls = 0;
      ReducerOptions options{.first_bucket_bytes = 1, .bucket_cap_bytes = 1, .overlap = overlap};
      options.hook = [&](const HookBucket& bucket) {
        ++calls;
        if (!net->layers[0]->weight.grad().defined()) ++early;  // the last gradient of backward
        return all_reduce_hook()(bucket);
      };
      Reducer reducer(group, parameters_to_reduce(*net), options);
      reducer.prepare();
      loss_of(net, wave(2)).backward();
      EXPECT_EQ(calls, 8);
      EXPECT_EQ(early, overlap ? 7 : 0) << "all but that of the first layer's weight";
    });
  }
}

TEST(ReducerTest, BucketsFollowTheOrderOfArrivalAndThenWhatWasMeasured) {
  test::run_ranks(2, "shm", [](comm::Group& group) {
    // Defined in another order than they are used in.
    Stack net = make_stack();
    auto parameters = parameters_to_reduce(*net);
    std::reverse(parameters.begin(), parameters.end());
    Reducer reducer(group, parameters, {.first_bucket_bytes = 1, .bucket_cap_bytes = 1});
    const auto step = [&] {
      net->zero_grad();
      reducer.prepare();
      loss_of(net, wave(2)).backward();
    };
    EXPECT_EQ(reducer.buckets().front().front(), "layer0.weight") << "nothing was known yet";
    step();
    EXPECT_EQ(reducer.buckets().front().front().substr(0, 6), "layer3");
    EXPECT_EQ(reducer.buckets().size(), 8U);
    for (int i = 0; i < 18; ++i) step();
    std::string text;
    for (const auto& bucket : reducer.buckets()) {
      for (const auto& name : bucket) text += name + " ";
      text += "| ";
    }
    EXPECT_EQ(comm::all_gather_text(group, text), std::vector<std::string>(2, text));
  });
}

// Twenty layers that come quickly one after the other, and a message costs more than all their bytes.
TEST(ReducerTest, WhereAMessageCostsMuchTheMeasuredPlanJoinsBuckets) {
  test::run_ranks(2, "shm", [](comm::Group& group) {
    const auto link = test::SlowLink::under(group, {.latency = std::chrono::milliseconds(8)});
    Stack net = make_stack(1, std::vector<std::int64_t>(20, 8));
    const ReducerOptions options{.first_bucket_bytes = 600, .bucket_cap_bytes = 600};
    Reducer reducer(group, parameters_to_reduce(*net), options);
    for (int step = 0; step < kSteps; ++step) {
      net->zero_grad();
      reducer.prepare();
      loss_of(net, wave(2, 8)).backward();
      reducer.finish();
    }
    // 1 on an idle machine; more where a backward takes longer.
    EXPECT_LE(reducer.buckets().size(), 9U) << "of 19";
  });
}

TEST(ReducerTest, OwnBucketsStayAsTheyAre) {
  test::run_ranks(2, "shm", [](comm::Group& group) {
    const std::vector<std::vector<std::string>> own = {{"layer0.bias", "layer0.weight"},
                                                       {"layer1.weight", "layer1.bias"}};
    Stack net = make_stack(1, {5, 4, 3});
    Reducer reducer(group, parameters_to_reduce(*net), {.buckets = own});
    for (int i = 0; i < kSteps; ++i) {
      reducer.prepare();
      loss_of(net, wave(2)).backward();
    }
    EXPECT_EQ(reducer.buckets(), own);
    const auto parameters = parameters_to_reduce(*net);
    COHORT_EXPECT_THROW_WITH(Reducer(group, parameters, {.buckets = {{"layer0.bias", "layr"}}}), UsageError,
                             "bucket 0 has \"layr\", which is no parameter");
    COHORT_EXPECT_THROW_WITH(Reducer(group, parameters, {.buckets = {{"layer0.bias"}}}), UsageError,
                             "is in no bucket");
  });
}

TEST(ReducerTest, GradientsAreViewsOfTheBucketsOrCopies) {
  for (const bool as_view : {true, false}) {
    test::run_ranks(2, "shm", [&](comm::Group& group) {
      Stack net = make_stack();
      Reducer reducer(group, parameters_to_reduce(*net), {.gradient_as_bucket_view = as_view});
      reducer.prepare();
      loss_of(net, wave(2)).backward();
      const auto a = net->layers[0]->weight.grad(), b = net->layers[1]->weight.grad();
      EXPECT_EQ(a.storage().data() == b.storage().data(), as_view);
      torch::optim::SGD(net->parameters(), 1.0).zero_grad(false);  // calls detach_(), which views reject
      EXPECT_EQ(a.abs().sum().item<double>(), 0);
    });
  }
}

TEST(ReducerTest, OnceBucketsAreFinalTheyAreTheMemoryOfTheGradients) {
  for (const bool as_view : {true, false}) {
    // No thread but this one drops tensors.
    test::run_ranks(2, "fake", [&](comm::Group& group) {
      Stack net = make_stack(1, {300, 400, 300, 10});
      double gradients = 0;
      for (const at::Tensor& parameter : net->parameters())
        gradients += static_cast<double>(parameter.nbytes());
      const memory::LiveBytes bytes;
      Reducer reducer(group, parameters_to_reduce(*net), {.gradient_as_bucket_view = as_view});
      for (int step = 0; step < kSteps; ++step) {
        net->zero_grad();
        reducer.prepare();
        loss_of(net, wave(2, 300)).backward();
      }
      const auto live = static_cast<double>(bytes.now());
      EXPECT_GE(live, gradients * (as_view ? 1 : 2));
      EXPECT_LE(live, gradients * (as_view ? 1.01 : 2.01));
    });
  }
}

TEST(ReducerTest, AGradientAloneInItsBucketIsReducedWhereItWasBorn) {
  test::run_ranks(2, "fake", [](comm::Group& group) {
    Stack net = make_stack(1, {300, 400});
    const auto bytes = static_cast<double>(net->layers[0]->weight.nbytes());
    Reducer reducer(group, parameters_to_reduce(*net), {.first_bucket_bytes = 1, .bucket_cap_bytes = 1});
    for (int step = 0; step < 3; ++step) {
      net->zero_grad();
      reducer.prepare();
      const at::Tensor loss = loss_of(net, wave(2, 300));
      const memory::LiveBytes live;
      loss.backward();
      EXPECT_LE(static_cast<double>(live.peak()), 1.1 * bytes) << "no second copy";
    }
  });
}

// The gradient of `last` is what goes back to `first` too, which comes later.
TEST(ReducerTest, AGradientWhoseMemoryIsStillReadIsLeftAsItIs) {
  test::run_ranks(2, "gloo", [](comm::Group& group) {
    at::Tensor first = wave(1, 6).requires_grad_(), last = wave(6, 1).requires_grad_();
    Reducer reducer(group, {{"first", first}, {"last", last}},
                    {.first_bucket_bytes = 1, .bucket_cap_bytes = 1});
    for (int step = 0; step < 3; ++step) {
      first.mutable_grad() = last.mutable_grad() = at::Tensor();
      reducer.prepare();
      const at::Tensor early = first * 2;
      ((early + last.view({1, 6})) * (group.rank() + 1)).sum().backward();
      EXPECT_TRUE(at::equal(first.grad(), at::full({1, 6}, 3, at::kDouble))) << first.grad();
      EXPECT_TRUE(at::equal(last.grad(), at::full({6, 1}, 1.5, at::kDouble))) << last.grad();
    }
  });
}

TEST(ReducerTest, ChannelsLastGradientsKeepTheirStrides) {
  test::run_ranks(2, "shm", [](comm::Group& group) {
    at::Tensor weight =
        wave(6, 36).view({6, 4, 3, 3}).contiguous(at::MemoryFormat::ChannelsLast).requires_grad_();
    Reducer reducer(group, {{"weight", weight}});
    const at::Tensor input = wave(2, 100).view({2, 4, 5, 5}) * (group.rank() + 1);
    reducer.prepare();
    at::conv2d(input, weight).square().mean().backward();
    EXPECT_EQ(weight.grad().strides(), weight.strides());
    at::Tensor alone = weight.detach().clone().requires_grad_();
    const at::Tensor both = wave(2, 100).view({2, 4, 5, 5});
    ((at::conv2d(both, alone).square().mean() + at::conv2d(both * 2, alone).square().mean()) / 2).backward();
    EXPECT_LE((weight.grad() - alone.grad()).norm().item<double>(),
              1e-13 * alone.grad().norm().item<double>());
  });
}

TEST(ReducerTest, TypesFrozenAndSharedParameters) {
  test::run_ranks(2, "shm", [](comm::Group& group) {
    at::Tensor a = wave(3, 4).requires_grad_(), b = wave(3, 4, at::kFloat).requires_grad_();
    at::Tensor c = wave(3, 4, at::kBFloat16).requires_grad_();
    Reducer reducer(group, {{"a", a}, {"b", b}, {"c", c}});
    EXPECT_EQ(reducer.buckets().size(), 3U);
    reducer.prepare();
    const double factor = group.rank() + 1;
    (a.mul(factor).sum() + b.mul(factor).sum() + c.mul(factor).sum()).backward();
    for (const at::Tensor& parameter : {a, b, c}) {
      EXPECT_TRUE(
          at::equal(parameter.grad(), at::full({3, 4}, 1.5, parameter.options().requires_grad(false))))
          << parameter.dtype();
    }

    struct Tied : torch::nn::Module {
      Tied() {
        weight = register_parameter("weight", wave(5, 5));
        again = register_parameter("again", weight);
        frozen = register_parameter("frozen", wave(5, 5), false);
        own = register_parameter("own", wave(5, 5));
      }
      at::Tensor weight, again, frozen, own;
    } tied;
    const auto list = parameters_to_reduce(tied, {"own"});
    ASSERT_EQ(list.size(), 1U);
    EXPECT_EQ(list[0].name, "weight");
    COHORT_EXPECT_THROW_WITH(parameters_to_reduce(tied, {"owm"}), UsageError,
                             "there is no \"owm\" to ignore");
    Reducer shared(group, list);
    shared.prepare();
    wave(2).mul(factor).matmul(tied.weight).matmul(tied.again).sum().backward();
    EXPECT_FALSE(tied.frozen.grad().defined());
    const at::Tensor mean = tied.weight.grad().clone();
    tied.weight.mutable_grad() = at::Tensor();
    const Reducer::NoSync silent(shared);
    wave(2).mul(1.5).matmul(tied.weight).matmul(tied.again).sum().backward();
    EXPECT_TRUE(at::allclose(mean, tied.weight.grad(), 1e-12, 0));
  });
}

// Two tables, one of them for bags, and a layer; what a rank looks up is its own.
struct TablesImpl : torch::nn::Module {
  explicit TablesImpl(bool is_sparse) {
    words =
        register_module("words", torch::nn::Embedding(torch::nn::EmbeddingOptions(9, 4).sparse(is_sparse)));
    bags = register_module(
        "bags",
        torch::nn::EmbeddingBag(torch::nn::EmbeddingBagOptions(9, 4).sparse(is_sparse).mode(torch::kSum)));
    layer = register_module("layer", torch::nn::Linear(4, 2));
    to(at::kDouble);
  }
  at::Tensor forward(const at::Tensor& index) {
    return layer->forward(words->forward(index) + bags->forward(index.unsqueeze(1)));
  }
  torch::nn::Embedding words = nullptr;
  torch::nn::EmbeddingBag bags = nullptr;
  torch::nn::Linear layer = nullptr;
};
TORCH_MODULE(Tables);

TEST(ReducerTest, SparseGradientsAreTheRowsOfAllRanks) {
  const auto make = [](bool is_sparse) { return test::seeded(3, [&] { return Tables(is_sparse); }); };
  const auto index_of = [](int rank) {  // one looks up nothing
    return rank == 0   ? at::tensor({1, 2, 2, 7}, at::kLong)
           : rank == 1 ? at::tensor({7, 0}, at::kLong)
                       : at::empty({0}, at::kLong);
  };
  Tables dense = make(false);
  for (int rank = 0; rank < 3; ++rank) (dense->forward(index_of(rank)).square().sum() / 3).backward();
  for (const bool is_static : {false, true}) {
    test::run_ranks(3, is_static ? "gloo" : "shm", [&](comm::Group& group) {
      Tables net = make(true);
      Reducer reducer(group, parameters_to_reduce(*net), {.static_graph = is_static});
      EXPECT_EQ(reducer.buckets(), (std::vector<std::vector<std::string>>{{"layer.bias", "layer.weight"}}));
      for (int step = 0; step < kSteps; ++step) {
        net->zero_grad();
        const at::Tensor out = net->forward(index_of(group.rank()));
        reducer.prepare({{out}});
        out.square().sum().backward();
        for (const auto& [ours, wanted] : {std::pair(net->words->weight, dense->words->weight),
                                           std::pair(net->bags->weight, dense->bags->weight)}) {
          ASSERT_TRUE(ours.grad().is_sparse());
          EXPECT_EQ(ours.grad().coalesce()._nnz(), 4) << "rows 0, 1, 2 and 7";
          EXPECT_TRUE(at::allclose(ours.grad().to_dense(), wanted.grad(), 1e-12, 1e-14));
        }
        EXPECT_TRUE(at::allclose(net->layer->weight.grad(), dense->layer->weight.grad(), 1e-12, 1e-14));
      }
      if (is_static) return;
      reducer.finish();  // says nothing about what comes next
      Reducer measuring(group, parameters_to_reduce(*net), {.norm = true});
      net->zero_grad();
      measuring.prepare();
      net->forward(index_of(group.rank())).square().sum().backward();
      double squares = 0;
      for (const at::Tensor& parameter : dense->parameters()) {
        squares += parameter.grad().square().sum().item<double>();
      }
      EXPECT_NEAR(*measuring.finish().norm, std::sqrt(squares), 1e-9);
    });
  }
}

TEST(ReducerTest, TheNormOfComplexGradientsIsThatOfTheirParts) {
  test::run_ranks(2, "gloo", [](comm::Group& group) {
    at::Tensor weight = at::complex(wave(2, 3), wave(2, 3) + 1).requires_grad_();
    at::Tensor bias = wave(1, 3).requires_grad_();
    Reducer reducer(group, {{"weight", weight}, {"bias", bias}}, {.norm = true});
    reducer.prepare();
    const at::Tensor loss = at::view_as_real(weight * (group.rank() + 1)).square().sum() + bias.sum();
    loss.backward();
    const auto norm = reducer.finish().norm;
    const double expected =
        std::sqrt(std::pow(5 * at::view_as_real(weight.detach()).norm().item<double>(), 2) + 3);
    ASSERT_TRUE(norm.has_value());
    EXPECT_NEAR(*norm, expected, 1e-12 * expected);
  });
}

// A bucket of one gradient, whose memory Gloo would sum: zeros without memory on a rank beside a gradient
// that has some, and a lazily conjugate one beside one that is not.
TEST(ReducerTest, GradientsWhoseValuesDoNotLieInMemoryAreReduced) {
  using Loss = std::function<at::Tensor(const at::Tensor&)>;
  const at::Tensor real = wave(2, 3), complex = at::complex(wave(2, 3), wave(2, 3) + 1);
  const std::vector<std::pair<at::Tensor, std::array<Loss, 2>>> cases = {
      {real,
       {[](const at::Tensor& w) { return w.sgn().sum(); },
        [&](const at::Tensor& w) { return (w * real).sum(); }}},
      {complex,
       {[&](const at::Tensor& w) { return at::real(w * complex).sum(); },
        [&](const at::Tensor& w) { return at::real(w.conj() * complex).sum(); }}}};
  for (const char* backend : {"gloo", "shm"}) {
    test::run_ranks(2, backend, [&](comm::Group& group) {
      for (const auto& [start, losses] : cases) {
        at::Tensor sum = at::zeros_like(start);
        for (const Loss& loss : losses) {
          const at::Tensor alone = start.clone().requires_grad_();
          sum += torch::autograd::grad({loss(alone)}, {alone})[0];
        }
        for (const bool is_view : {true, false}) {
          at::Tensor weight = start.clone().requires_grad_();
          Reducer reducer(group, {{"weight", weight}}, {.gradient_as_bucket_view = is_view});
          reducer.prepare();
          losses[static_cast<std::size_t>(group.rank())](weight).backward();
          (void)reducer.finish();
          EXPECT_TRUE(at::allclose(weight.grad(), sum / 2)) << backend;
        }
        const at::Tensor weight = start.clone().requires_grad_();
        losses[static_cast<std::size_t>(group.rank())](weight).backward();
        if (!start.is_complex()) {
          GradientAverager(group).average(std::span(&weight, 1), 1);
          EXPECT_TRUE(at::allclose(weight.grad(), sum / 2)) << backend;
        }
      }
    });
  }
}

TEST(ReducerTest, WhatItCannotReduceIsRejectedByName) {
  test::run_ranks(2, "shm", [](comm::Group& group) {
    torch::nn::Embedding embedding(torch::nn::EmbeddingOptions(5, 3).sparse(true));
    Reducer reducer(group, {{"weight", embedding->weight}});  // not said to be sparse
    reducer.prepare();
    const at::Tensor out = embedding->forward(at::zeros({2}, at::kLong)).sum();
    COHORT_EXPECT_THROW_WITH(out.backward(), UsageError,
                             "the gradient of weight is sparse, expected a dense one");
  });
  test::run_ranks(2, "gloo", [](comm::Group& group) {
    const Stack net = make_stack(1, {5, group.rank() == 0 ? 4 : 5, 2});
    COHORT_EXPECT_THROW_WITH(
        Reducer(group, parameters_to_reduce(*net)), UsageError,
        "the list of parameters is not the same on all ranks: rank 0 has 'layer0.weight double[4, 5]");
    COHORT_EXPECT_THROW_WITH(Reducer(group, {}), UsageError, "there is no parameter that needs a gradient");
    COHORT_EXPECT_THROW_WITH(Reducer(group, parameters_to_reduce(*make_stack()), {.bucket_cap_bytes = 0}),
                             UsageError, "expected at least 1");
    Reducer reducer(group, parameters_to_reduce(*make_stack()));
    COHORT_EXPECT_THROW_WITH(reducer.prepare(StepInfo{.weight = -1}), UsageError, "weight is -1");
    COHORT_EXPECT_THROW_WITH(reducer.finish(), UsageError, "finish() without a prepare()");
  });
}

TEST(ReducerTest, ARankThatIsGoneEndsTheBackwardOfTheOthers) {
  EXPECT_THROW(test::run_ranks(2, "shm",
                               [](comm::Group& group) {
                                 Stack net = make_stack();
                                 Reducer reducer(group, parameters_to_reduce(*net));
                                 if (group.rank() == 1) return;
                                 reducer.prepare();
                                 const at::Tensor loss = loss_of(net, wave(2));
                                 EXPECT_THROW(loss.backward(), Error);
                                 COHORT_EXPECT_THROW_WITH(reducer.prepare(), UsageError,
                                                          "a reduction failed before");
                                 throw CommError("test", "seen");
                               }),
               CommError);
}

}  // namespace
}  // namespace cohort::parallel
