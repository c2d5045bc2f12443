#include "cohort/parallel/reducer.h"

#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/nn/modules/embedding.h>
#include <torch/optim/sgd.h>

#include <atomic>
#include <torch/csrc/distributed/c10d/reducer.hpp>

#include "cohort/comm/text.h"
#include "tests/parallel/nets.h"
#include "tests/support/ranks.h"
#include "tests/support/slow_link.h"
#include "tests/support/throws.h"

namespace cohort::parallel {
namespace {

using test::make_stack;
using test::share_of;
using test::Stack;
using test::wave;

constexpr int kSteps = 20;  // past the second grouping

at::Tensor loss_of(Stack& net, const at::Tensor& input) {
  return net->forward(input).square().mean();
}

// A step with momentum, so that a gradient that is wrong once shows for ever.
class Descent {
 public:
  explicit Descent(const torch::nn::Module& module) : parameters_(module.parameters()) {}
  void zero_grad() {
    for (at::Tensor& parameter : parameters_) parameter.mutable_grad() = at::Tensor();
  }
  void step() {
    const at::NoGradGuard no_grad;
    momenta_.resize(parameters_.size());
    for (std::size_t i = 0; i < parameters_.size(); ++i) {
      const at::Tensor gradient = parameters_[i].grad();
      if (!gradient.defined()) continue;
      momenta_[i] = momenta_[i].defined() ? momenta_[i] * 0.9 + gradient : gradient.clone();
      parameters_[i].sub_(momenta_[i], 0.5);
    }
  }

 private:
  std::vector<at::Tensor> parameters_, momenta_;
};

void expect_near(const Stack& net, const Stack& want, double tolerance) {
  const auto expected = want->named_parameters();
  for (const auto& entry : net->named_parameters()) {
    const at::Tensor& other = expected[entry.key()];
    EXPECT_LE((entry.value() - other).norm().item<double>(), tolerance * other.norm().item<double>())
        << entry.key();
  }
}

bool same_bits(const Stack& a, const Stack& b) {
  const auto first = a->parameters(), second = b->parameters();
  for (std::size_t i = 0; i < first.size(); ++i) {
    if (!at::equal(first[i], second[i])) return false;
  }
  return true;
}

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

// `steps` steps with weights; the batch has 7 samples, so shares are not even.
Stack train(comm::Group& group, const ReducerOptions& options, int steps = kSteps) {
  Stack net = make_stack();
  Reducer reducer(group, parameters_to_reduce(*net), options);
  Descent descent(*net);
  for (int step = 0; step < steps; ++step) {
    const at::Tensor mine = share_of(wave(7) + step, group.rank(), group.size());
    descent.zero_grad();
    const at::Tensor loss = loss_of(net, mine);
    reducer.prepare(Contribution{.weight = static_cast<double>(mine.size(0))}, {{loss}});
    loss.backward();
    EXPECT_EQ(reducer.finish().weight, 7);
    descent.step();
  }
  return net;
}

Stack train_alone(int steps = kSteps) {
  Stack net = make_stack();
  Descent descent(*net);
  for (int step = 0; step < steps; ++step) {
    descent.zero_grad();
    loss_of(net, wave(7) + step).backward();
    descent.step();
  }
  return net;
}

TEST(ReducerTest, EverySettingTrainsAsOneProcessWithTheJoinedBatch) {
  const Stack whole = train_alone();
  for (const Setting& setting : settings()) {
    for (const int size : {1, 2, 3}) {
      SCOPED_TRACE(core::concat(setting.name, ", ", size, " ranks"));
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
    EXPECT_EQ(reducer.buckets().front().front(), "layer0.weight");
    reducer.regroup();
    EXPECT_EQ(reducer.buckets().front().front(), "layer0.weight") << "nothing is known yet";
    step();
    reducer.regroup();
    EXPECT_EQ(reducer.buckets().front().front().substr(0, 6), "layer3");
    EXPECT_EQ(reducer.buckets().size(), 8U);
    for (int i = 0; i < 18; ++i) step();
    reducer.regroup();
    std::string text;
    for (const auto& bucket : reducer.buckets()) {
      for (const auto& name : bucket) text += name + " ";
      text += "| ";
    }
    EXPECT_EQ(comm::all_gather_text(group, text), std::vector<std::string>(2, text));
  });
}

// Twenty layers that come quickly one after the other, and a message costs more than all their bytes.
TEST(ReducerTest, WhereAMessageCostsMuchTheMeasuredPlanJoinsBucketsAndEndsEarlier) {
  test::run_ranks(2, "shm", [](comm::Group& group) {
    const auto link = test::SlowLink::under(group, {.latency = std::chrono::milliseconds(2)});
    Stack net = make_stack(1, std::vector<std::int64_t>(20, 8));
    const ReducerOptions options{.first_bucket_bytes = 600, .bucket_cap_bytes = 600};
    Reducer reducer(group, parameters_to_reduce(*net), options);
    std::chrono::nanoseconds first{0}, last{0};
    for (int step = 0; step < 22; ++step) {
      net->zero_grad();
      reducer.prepare();
      loss_of(net, wave(2, 8)).backward();
      const auto exposed = reducer.finish().exposed;
      if (step == 5) first = exposed;
      last = exposed;
    }
    EXPECT_LE(reducer.buckets().size(), 4U) << "of 19";
    EXPECT_LT(last * 3, first);
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
      torch::optim::SGD(net->parameters(), 1.0).zero_grad(false);  // calls detach_(), which views refuse
      EXPECT_EQ(a.abs().sum().item<double>(), 0);
    });
  }
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

// ------------------------------------------------------------------------------- unused and repeated ones

TEST(ReducerTest, ParametersThatOnlyOtherRanksUseAreAveragedAndWhatNobodyUsesStays) {
  for (const bool is_static : {false, true}) {
    test::run_ranks(3, is_static ? "gloo" : "shm", [&](comm::Group& group) {
      Stack net = make_stack();
      ReducerOptions options{.first_bucket_bytes = 1, .bucket_cap_bytes = 1};
      (is_static ? options.static_graph : options.find_unused_parameters) = true;
      Reducer reducer(group, parameters_to_reduce(*net), options);
      for (int step = 0; step < 4; ++step) {
        net->zero_grad();
        const at::Tensor out = net->forward_to(wave(2), group.rank() == 0 ? 3 : 2);  // layer3: nobody
        reducer.prepare({{out}});
        out.square().mean().backward();
        Stack alone = make_stack();
        alone->forward_to(wave(2), 3).square().mean().backward();
        EXPECT_FALSE(net->layers[3]->weight.grad().defined()) << step;
        ASSERT_TRUE(net->layers[2]->weight.grad().defined()) << step;
        EXPECT_TRUE(
            at::allclose(net->layers[2]->weight.grad(), alone->layers[2]->weight.grad() / 3, 1e-12, 0))
            << step;
      }
    });
  }
}

TEST(ReducerTest, WhatIsLeftOutIsNamedWhenNobodyLooksForIt) {
  test::run_ranks(2, "shm", [](comm::Group& group) {
    Stack net = make_stack();
    Reducer reducer(group, parameters_to_reduce(*net));
    reducer.prepare();
    net->forward_to(wave(2), 3).square().mean().backward();
    COHORT_EXPECT_THROW_WITH(reducer.prepare(), UsageError,
                             "backward left 2 of 8 parameters without a gradient, so not all were averaged: "
                             "layer3.bias, layer3.weight. Try: find_unused_parameters");
    COHORT_EXPECT_THROW_WITH(reducer.finish(), UsageError, "backward left 2 of 8 parameters");
  });
}

TEST(ReducerTest, WithoutOutputsToStartFromFinishFindsWhatIsUnused) {
  test::run_ranks(2, "shm", [](comm::Group& group) {
    Stack net = make_stack();
    Reducer reducer(group, parameters_to_reduce(*net), {.find_unused_parameters = true});
    for (int step = 0; step < 3; ++step) {
      net->zero_grad();
      const at::Tensor out = net->forward_to(wave(2), group.rank() == 0 ? 3 : 2);
      reducer.prepare();
      out.square().mean().backward();
      reducer.finish();
      EXPECT_FALSE(net->layers[3]->weight.grad().defined());
      Stack alone = make_stack();
      alone->forward_to(wave(2), 3).square().mean().backward();
      EXPECT_TRUE(at::allclose(net->layers[2]->weight.grad(), alone->layers[2]->weight.grad() / 2, 1e-12, 0));
    }
    reducer.prepare();
    net->forward_to(wave(2), 3).square().mean().backward();
    COHORT_EXPECT_THROW_WITH(reducer.prepare(), UsageError,
                             "Try: prepare(outputs), or finish() after backward");
  });
}

TEST(ReducerTest, ARankWithoutSamplesTakesPart) {
  const Stack whole = train_alone(1);
  test::run_ranks(2, "shm", [&](comm::Group& group) {
    Stack net = make_stack();
    Reducer reducer(group, parameters_to_reduce(*net), {.norm = true});
    Descent descent(*net);
    reducer.prepare(Contribution{.weight = group.rank() == 0 ? 7.0 : 0.0});
    if (group.rank() == 0) loss_of(net, wave(7)).backward();
    const ReduceReport report = reducer.finish();
    EXPECT_EQ(report.weight, 7);
    double squares = 0;
    for (const at::Tensor& parameter : net->parameters())
      squares += parameter.grad().square().sum().item<double>();
    EXPECT_NEAR(*report.norm, std::sqrt(squares), 1e-12);
    descent.step();
    expect_near(net, whole, 1e-13);
  });
}

TEST(ReducerTest, NumbersThatAreNotFiniteOnOneRankStopAllBeforeAnythingIsReduced) {
  test::run_ranks(3, "gloo", [](comm::Group& group) {
    Stack net = make_stack();
    Reducer reducer(group, parameters_to_reduce(*net));
    for (int round = 0; round < 2; ++round) {
      net->zero_grad();
      const at::Tensor loss = loss_of(net, wave(2) * (group.rank() + 1));
      const bool is_bad = round == 0 && group.rank() == 1;
      reducer.prepare(Contribution{.weight = 1, .finite = !is_bad});
      if (!is_bad) loss.backward();
      const ReduceReport report = reducer.finish();
      EXPECT_EQ(report.bad_rank, round == 0 ? std::optional(1) : std::nullopt);
      Stack alone = make_stack();
      loss_of(alone, wave(2) * (group.rank() + 1)).backward();
      if (!is_bad) {
        EXPECT_EQ(at::equal(net->layers[0]->weight.grad(), alone->layers[0]->weight.grad()), round == 0);
      }
    }
  });
}

TEST(ReducerTest, BackwardsUnderNoSyncAddUpUntilOneReduces) {
  const Stack whole = [] {
    Stack net = make_stack();
    for (int part = 0; part < 3; ++part) loss_of(net, wave(4) + part).backward();
    return net;
  }();
  for (const bool as_view : {true, false}) {
    test::run_ranks(2, "shm", [&](comm::Group& group) {
      Stack net = make_stack();
      Reducer reducer(group, parameters_to_reduce(*net), {.gradient_as_bucket_view = as_view});
      for (int step = 0; step < 3; ++step) {
        // Zeroed in place the second time: gradients then add up in the buckets themselves.
        net->zero_grad(step != 1);
        for (int part = 0; part < 3; ++part) {
          const at::Tensor mine = share_of(wave(4) + part, group.rank(), 2);
          if (part < 2) {
            // Also where one was prepared that no backward followed.
            if (part == 1) reducer.prepare();
            const Reducer::NoSync silent(reducer);
            loss_of(net, mine).backward();
          } else {
            const at::Tensor loss = loss_of(net, mine);
            reducer.prepare();
            loss.backward();
          }
        }
        for (std::size_t i = 0; i < 4; ++i) {
          EXPECT_TRUE(at::allclose(net->layers[i]->weight.grad(), whole->layers[i]->weight.grad(), 1e-12, 0))
              << step << " " << i;
        }
      }
    });
  }
}

TEST(ReducerTest, SeveralForwardsBeforeABackwardAndBackwardsOverPartsOfTheModel) {
  test::run_ranks(2, "shm", [](comm::Group& group) {
    const at::Tensor mine = share_of(wave(4), group.rank(), 2);
    Stack whole = make_stack();
    (loss_of(whole, wave(4)) + loss_of(whole, wave(4) * 2)).backward();
    Stack net = make_stack();
    Reducer reducer(group, parameters_to_reduce(*net));
    const at::Tensor first = loss_of(net, mine);
    reducer.prepare();
    const at::Tensor second = loss_of(net, mine * 2);
    reducer.prepare();
    (first + second).backward();
    EXPECT_TRUE(at::allclose(net->layers[0]->weight.grad(), whole->layers[0]->weight.grad(), 1e-12, 0));

    // Two heads of one step, gone back through one after the other.
    Stack heads = make_stack();
    Reducer each(group, parameters_to_reduce(*heads));
    const at::Tensor left = heads->layers[0]->forward(mine).square().mean();
    const at::Tensor right = heads->layers[3]
                                 ->forward(heads->layers[2]->forward(
                                     heads->layers[1]->forward(heads->layers[0]->forward(mine).detach())))
                                 .square()
                                 .mean();
    each.prepare();
    left.backward();
    right.backward();
    EXPECT_EQ(each.finish().bytes, 8 * (5 * 7 + 7 + 7 * 6 + 6 + 6 * 7 + 7 + 7 * 3 + 3));
  });
}

TEST(ReducerTest, ASecondBackwardThatWouldAddThisRanksGradientsAloneIsAnError) {
  test::run_ranks(2, "shm", [](comm::Group& group) {
    Stack net = make_stack();
    Reducer reducer(group, parameters_to_reduce(*net));
    reducer.prepare();
    const at::Tensor loss = loss_of(net, wave(2));
    loss.backward({}, true);
    COHORT_EXPECT_THROW_WITH(loss.backward(), UsageError,
                             "a second backward reached layer3.bias after the gradients");
    reducer.prepare();
    COHORT_EXPECT_THROW_WITH(loss_of(net, wave(2)).backward({}, true, true), UsageError,
                             "backward with create_graph");
  });
}

// ---------------------------------------------------------------------------------- kinds of parameters

TEST(ReducerTest, TypesFrozenAndSharedParameters) {
  test::run_ranks(2, "shm", [](comm::Group& group) {
    at::Tensor a = wave(3, 4).requires_grad_(), b = wave(3, 4, at::kFloat).requires_grad_();
    at::Tensor c = wave(3, 4, at::kBFloat16).requires_grad_();
    Reducer reducer(group, {{"a", a}, {"b", b}, {"c", c}});
    EXPECT_EQ(reducer.buckets().size(), 3U);
    reducer.prepare();
    const double factor = group.rank() + 1;
    (a.mul(factor).sum() + b.mul(factor).sum() + c.mul(factor).sum()).backward();
    for (const at::Tensor& one : {a, b, c}) {
      EXPECT_TRUE(at::equal(one.grad(), at::full({3, 4}, 1.5, one.options().requires_grad(false))))
          << one.dtype();
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

TEST(ReducerTest, WhatItCannotReduceIsRefusedByName) {
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
    COHORT_EXPECT_THROW_WITH(reducer.prepare(Contribution{.weight = -1}), UsageError, "weight is -1");
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

// ---------------------------------------------------------------------------------------------- hooks

TEST(CommHookTest, CompressedSumsAreWhatRoundingLeaves) {
  const Stack whole = train_alone(1);
  for (const bool is_half : {true, false}) {
    test::run_ranks(2, "shm", [&](comm::Group& group) {
      const Stack net = train(group, {.hook = is_half ? fp16_compress_hook() : bf16_compress_hook()}, 1);
      expect_near(net, whole, is_half ? 1e-3 : 1e-2);
      EXPECT_FALSE(same_bits(net, train(group, {}, 1))) << "nothing was rounded";
    });
  }
}

TEST(CommHookTest, AHookWrittenForC10dGetsThisRanksGradientAndReturnsTheMean) {
  const Stack whole = train_alone();
  for (const char* backend : {"gloo", "shm"}) {
    test::run_ranks(2, backend, [&](comm::Group& group) {
      std::size_t last = 0;
      const CommHook hook = future_hook([&](c10d::GradBucket& bucket) {
        EXPECT_EQ(bucket.getGradients().size(), bucket.getParameters().size());
        last += bucket.isLast() ? 1U : 0U;
        at::Tensor mean = bucket.getBuffer() / 2;
        std::vector<at::Tensor> tensors{mean};
        return group.process_group()->allreduce(tensors)->getFuture();
      });
      expect_near(train(group, {.first_bucket_bytes = 300, .bucket_cap_bytes = 300, .hook = hook}), whole,
                  1e-12);
      EXPECT_EQ(last, static_cast<std::size_t>(kSteps));
    });
  }
}

TEST(CommHookTest, AFutureThatNobodyCompletesEndsAtTheDeadline) {
  test::run_ranks(2, "shm", [](comm::Group& group) {
    Stack net = make_stack();
    const CommHook hook = future_hook(
        [](c10d::GradBucket&) { return c10::make_intrusive<c10::ivalue::Future>(c10::TensorType::get()); });
    Reducer reducer(group, parameters_to_reduce(*net),
                    {.hook = hook, .timeout = std::chrono::milliseconds(50)});
    reducer.prepare();
    const at::Tensor loss = loss_of(net, wave(2));
    COHORT_EXPECT_THROW_WITH(loss.backward(), TimeoutError, "did not complete the future of a bucket");
  });
}

}  // namespace
}  // namespace cohort::parallel
