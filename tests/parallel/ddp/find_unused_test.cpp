// Ranks that use different parts of a model, in a backward that has collectives of its own, beside forwards
// that no backward follows, and with gradients that are left of earlier steps.
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/linear.h>

#include "cohort/autograd/recompute.h"
#include "cohort/parallel/distributed.h"
#include "cohort/parallel/sync_batch_norm.h"
#include "tests/parallel/nets.h"
#include "tests/support/ranks.h"

namespace cohort::parallel {
namespace {

using test::seeded;
using test::share_of;
using test::wave;

enum Parts : std::uint8_t { kTrunk = 0, kLeft = 1, kRight = 2, kBoth = 3, kNothing = 4 };

// A trunk with a norm, and two heads. Norm: of one process, or of all ranks.
template <typename Norm>
struct HeadsImpl : torch::nn::Module {
  explicit HeadsImpl(Norm of) {
    trunk = register_module("trunk", torch::nn::Linear(5, 6));
    norm = register_module("norm", std::move(of));
    left = register_module("left", torch::nn::Linear(6, 4));
    right = register_module("right", torch::nn::Linear(6, 4));
    to(at::kDouble);
  }
  at::Tensor heads_of(const at::Tensor& h, int parts) {
    at::Tensor y = h.square().mean();
    if ((parts & kLeft) != 0) y = y + left->forward(h).square().mean();
    if ((parts & kRight) != 0) y = y + right->forward(h).sin().mean();
    return y;
  }
  at::Tensor forward(const at::Tensor& x, int parts) {
    if (parts == kNothing) return x.square().mean();
    return heads_of(norm->forward(trunk->forward(x)).tanh(), parts);
  }
  torch::nn::Linear trunk = nullptr, left = nullptr, right = nullptr;
  Norm norm = nullptr;
};
using Heads = HeadsImpl<torch::nn::BatchNorm1d>;

template <typename Norm>
std::shared_ptr<HeadsImpl<Norm>> make_heads(const std::function<Norm()>& norm) {
  return seeded(7, [&] { return std::make_shared<HeadsImpl<Norm>>(norm()); });
}
std::shared_ptr<Heads> make_heads() {
  return make_heads<torch::nn::BatchNorm1d>([] { return torch::nn::BatchNorm1d(6); });
}

DistributedOptions find_unused() {
  DistributedOptions options;
  options.find_unused_parameters = true;
  return options;
}

void descend(torch::nn::Module& module) {
  const at::NoGradGuard no_grad;
  for (at::Tensor& parameter : module.parameters()) {
    if (parameter.grad().defined()) parameter.sub_(parameter.grad(), 0.1);
    parameter.mutable_grad() = at::Tensor();
  }
}

void expect_same_state(const torch::nn::Module& net, const torch::nn::Module& want, const std::string& what) {
  const auto parameters = want.named_parameters(), buffers = want.named_buffers();
  const auto compare = [&](const auto& entry, const at::Tensor& other) {
    EXPECT_TRUE(at::allclose(entry.value(), other, 1e-10, 1e-12)) << what << entry.key();
  };
  for (const auto& entry : net.named_parameters()) compare(entry, parameters[entry.key()]);
  for (const auto& entry : net.named_buffers()) compare(entry, buffers[entry.key()]);
}

// The gradients that one process has for the mean of the ranks' losses, each with its input and parts.
void expect_mean(const std::shared_ptr<Heads>& net, const std::vector<std::pair<at::Tensor, int>>& ranks,
                 const std::string& what) {
  const auto alone = make_heads();
  alone->eval();
  for (const auto& [x, parts] : ranks) {
    const at::Tensor loss = alone->forward(x, parts);
    if (loss.requires_grad()) (loss / static_cast<double>(ranks.size())).backward();
  }
  const auto wanted = alone->named_parameters();
  for (const auto& entry : net->named_parameters()) {
    const at::Tensor &gradient = entry.value().grad(), &expected = wanted[entry.key()].grad();
    ASSERT_EQ(gradient.defined(), expected.defined()) << what << entry.key();
    if (!gradient.defined()) continue;
    EXPECT_TRUE(at::allclose(gradient, expected, 1e-10, 1e-12)) << what << entry.key();
  }
}

// Rank 0's first gradient is a head's, and comes before the norm's sums over ranks in backward; that of a
// rank without a head comes after them.
TEST(FindUnusedTest, CollectivesWithinBackwardComeInOneOrderWhateverPartsARankUses) {
  const auto parts_of = [](int rank, int step) { return rank == 0 ? kBoth : step < 3 ? kLeft : kTrunk; };
  for (const std::int64_t bytes : {std::int64_t{1}, std::int64_t{25} << 20}) {
    for (const bool is_static : {false, true}) {
      const auto parts = [&](int rank, int step) {
        return is_static ? parts_of(rank, 9) : parts_of(rank, step);
      };
      const auto whole = make_heads();
      for (int step = 0; step < 15; ++step) {
        const at::Tensor h = whole->norm->forward(whole->trunk->forward(wave(6) + step)).tanh();
        at::Tensor loss = at::zeros({}, at::kDouble);
        for (int rank = 0; rank < 2; ++rank) {
          loss = loss + whole->heads_of(share_of(h, rank, 2), parts(rank, step)) / 2;
        }
        loss.backward();
        descend(*whole);
      }
      test::run_ranks(2, "gloo", [&](comm::Group& group) {
        auto net = make_heads<SyncBatchNorm1d>([&] { return SyncBatchNorm1d(6, group); });
        DistributedOptions options;
        (is_static ? options.static_graph : options.find_unused_parameters) = true;
        options.first_bucket_bytes = options.bucket_cap_bytes = bytes;
        DistributedDataParallel<decltype(net)> model(net, group, options);
        for (int step = 0; step < 15; ++step) {
          model.forward(share_of(wave(6) + step, group.rank(), 2), parts(group.rank(), step)).backward();
          descend(*net);
        }
        expect_same_state(*net, *whole, is_static ? "static " : "");
      });
    }
  }
}

// What a metric reaches says nothing of the backward of another forward: not more, not less, not nothing.
TEST(FindUnusedTest, ALonelyForwardBeforeABackwardLeavesItAsItIs) {
  for (const Parts lonely : {kTrunk, kLeft, kRight, kBoth, kNothing}) {
    test::run_ranks(2, "shm", [&](comm::Group& group) {
      const auto net = make_heads();
      net->eval();  // no statistics move
      DistributedDataParallel<std::shared_ptr<Heads>> model(net, group, find_unused());
      for (const int parts : {kLeft, kTrunk, kBoth, kNothing}) {
        net->zero_grad();
        const at::Tensor x = (wave(4) * (group.rank() + 1)).requires_grad_();
        const int own_parts = group.rank() == 0 ? parts : kRight;
        const at::Tensor loss = model.forward(x, own_parts);
        if (group.rank() == 0) model.forward(x, lonely);
        loss.backward();
        expect_mean(net, {{wave(4), parts}, {wave(4) * 2, kRight}}, base::concat(lonely, " ", parts, " "));
      }
    });
  }
}

TEST(FindUnusedTest, OneBackwardOverForwardsThatReachDifferentParts) {
  test::run_ranks(2, "shm", [](comm::Group& group) {
    const auto net = make_heads();
    net->eval();
    DistributedDataParallel<std::shared_ptr<Heads>> model(net, group, find_unused());
    for (const auto& [first, second] : {std::pair(kLeft, kRight), std::pair(kBoth, kTrunk)}) {
      net->zero_grad();
      const at::Tensor x = wave(4) * (group.rank() + 1);
      at::Tensor loss = model.forward(x, first);
      loss = loss + model.forward(x, second);
      loss.backward();
      const at::Tensor y = wave(4) * 2;
      const auto alone = make_heads();
      alone->eval();
      for (const int parts : {first, second}) {
        ((alone->forward(wave(4), parts) + alone->forward(y, parts)) / 2).backward();
      }
      EXPECT_TRUE(at::allclose(net->trunk->weight.grad(), alone->trunk->weight.grad(), 1e-10, 1e-12));
      EXPECT_TRUE(at::allclose(net->left->weight.grad(), alone->left->weight.grad(), 1e-10, 1e-12));
      EXPECT_TRUE(at::allclose(net->right->weight.grad(), alone->right->weight.grad(), 1e-10, 1e-12));
    }
  });
}

// Weight decay in the loss: on rank 0 for a part that the outputs do not reach.
TEST(FindUnusedTest, AParameterThatOnlyTheLossUsesIsUsed) {
  test::run_ranks(2, "shm", [](comm::Group& group) {
    const auto net = make_heads();
    net->eval();
    DistributedDataParallel<std::shared_ptr<Heads>> model(net, group, find_unused());
    for (int step = 0; step < 3; ++step) {
      net->zero_grad();
      at::Tensor loss = model.forward(wave(4), kLeft);
      if (group.rank() == 0) loss = loss + net->right->weight.square().sum();
      loss.backward();
      EXPECT_TRUE(at::allclose(net->right->weight.grad(), net->right->weight, 1e-12, 0)) << "2 w / 2";
      EXPECT_FALSE(net->right->bias.grad().defined());
    }
  });
}

// On one rank alone: it brings no parameter a gradient.
TEST(FindUnusedTest, AutogradGradBeginsNoReduction) {
  for (const Parts parts : {kLeft, kNothing}) {
    test::run_ranks(2, "shm", [&](comm::Group& group) {
      const auto net = make_heads();
      net->eval();
      DistributedDataParallel<std::shared_ptr<Heads>> model(net, group, find_unused());
      for (int step = 0; step < 3; ++step) {
        net->zero_grad();
        const at::Tensor x = (wave(4) * (group.rank() + 1)).requires_grad_();
        const at::Tensor loss = model.forward(x, group.rank() == 0 ? parts : kRight);
        if (group.rank() == 0) torch::autograd::grad({loss}, {x}, {}, /*retain_graph=*/true);
        loss.backward();
        expect_mean(net, {{wave(4), parts}, {wave(4) * 2, kRight}}, "");
      }
    });
  }
}

// Three times a third of a number is another number in bfloat16.
TEST(FindUnusedTest, AGradientThatIsLeftOfAnEarlierStepKeepsItsBits) {
  for (const bool as_view : {true, false}) {
    for (const std::int64_t bytes : {std::int64_t{1}, std::int64_t{25} << 20}) {
      test::run_ranks(3, "gloo", [&](comm::Group& group) {
        const auto net = make_heads();
        net->eval();
        net->to(at::kBFloat16);
        DistributedOptions options = find_unused();
        options.gradient_as_bucket_view = as_view;
        options.first_bucket_bytes = options.bucket_cap_bytes = bytes;
        DistributedDataParallel<std::shared_ptr<Heads>> model(net, group, options);
        const at::Tensor x = wave(4, 5, at::kBFloat16) * (group.rank() + 1);
        model.forward(x, kLeft).backward();
        const at::Tensor left = net->left->weight.grad().clone();
        for (int step = 0; step < 8; ++step) {
          if (step % 2 == 0) model.set_weight(group.rank() == 0 ? 0.0 : 1.0);
          if (step % 2 == 0 && group.rank() == 0) {
            model.step_without_samples();
          } else {
            model.forward(x, kRight).backward();
          }
          model.set_weight(std::nullopt);
          ASSERT_TRUE(at::equal(net->left->weight.grad(), left)) << step;
        }
        // One rank uses it again: all get the mean of what is there, and it is added once.
        const at::Tensor before = net->right->weight.grad().clone();
        model.forward(x, group.rank() == 1 ? kLeft : kTrunk).backward();
        EXPECT_FALSE(at::equal(net->left->weight.grad(), left));
        EXPECT_TRUE(at::allclose(net->left->weight.grad(), left, 0.5, 0.1));
        EXPECT_TRUE(at::equal(net->right->weight.grad(), before));
      });
    }
  }
}

// A temperature, as models of images and texts have; the part that makes the output changes from step to
// step.
struct ScaledImpl : torch::nn::Module {
  ScaledImpl() {
    a = register_module("a", torch::nn::Linear(5, 3));
    b = register_module("b", torch::nn::Linear(5, 3));
    scale = register_parameter("scale", at::full({}, 2.0));
    to(at::kDouble);
  }
  std::vector<at::Tensor> forward(const at::Tensor& x, bool first) {
    return {(first ? a : b)->forward(x), scale};
  }
  torch::nn::Linear a = nullptr, b = nullptr;
  at::Tensor scale;
};

at::Tensor scaled_loss(const std::vector<at::Tensor>& outputs) {
  return outputs[0].square().mean() * outputs[1];
}

TEST(FindUnusedTest, AParameterThatIsReturnedBeginsNoLaterBackwardWithWhatAnEarlierForwardReached) {
  const auto make = [] { return seeded(3, [] { return std::make_shared<ScaledImpl>(); }); };
  for (const bool is_static : {false, true}) {
    test::run_ranks(2, "shm", [&](comm::Group& group) {
      DistributedOptions options;
      options.find_unused_parameters = !is_static;
      options.static_graph = is_static;
      const auto net = make(), alone = make();
      DistributedDataParallel<std::shared_ptr<ScaledImpl>> model(net, group, options);
      for (int step = 0; step < 6; ++step) {
        const bool first = is_static || step % 2 == 0;
        model->zero_grad();
        alone->zero_grad();
        const at::Tensor x = wave(8) + step;
        scaled_loss(model.forward(share_of(x, group.rank(), 2), first)).backward();
        for (int rank = 0; rank < 2; ++rank)
          (scaled_loss(alone->forward(share_of(x, rank, 2), first)) / 2).backward();
        const auto wanted = alone->named_parameters();
        for (const auto& entry : net->named_parameters()) {
          const at::Tensor &gradient = entry.value().grad(), &expected = wanted[entry.key()].grad();
          ASSERT_EQ(gradient.defined(), expected.defined()) << step << entry.key();
          if (!gradient.defined()) continue;
          ASSERT_TRUE(at::allclose(gradient, expected, 1e-10, 1e-12)) << step << entry.key();
        }
        EXPECT_EQ(torch::autograd::impl::hooks(net->scale).size(), 0u) << "they would grow with the steps";
      }
    });
  }
}

// A node of two results brings an undefined gradient to the one that the loss does not use.
TEST(FindUnusedTest, AParameterWithoutAGradientKeepsWhatIsLeftOfAnEarlierStep) {
  test::run_ranks(3, "shm", [](comm::Group& group) {
    const auto net = seeded(3, [] { return std::make_shared<ScaledImpl>(); });
    struct BothImpl : torch::nn::Module {
      explicit BothImpl(std::shared_ptr<ScaledImpl> of) : net(register_module("net", std::move(of))) {}
      std::vector<at::Tensor> forward(const at::Tensor& x) {
        return autograd::recompute(
            [this](const at::Tensor& input) {
              return std::vector<at::Tensor>{net->a->forward(input), net->b->forward(input)};
            },
            x);
      }
      std::shared_ptr<ScaledImpl> net;
    };
    DistributedOptions options;
    options.find_unused_parameters = true;
    DistributedDataParallel<std::shared_ptr<BothImpl>> model(std::make_shared<BothImpl>(net), group, options);
    net->a->weight.mutable_grad() = at::full_like(net->a->weight, group.rank() + 1);
    const at::Tensor x = wave(4).requires_grad_();
    for (int step = 0; step < 3; ++step) {
      model.forward(x)[1].square().mean().backward();
      EXPECT_EQ(net->a->weight.grad().max().item<double>(), group.rank() + 1) << step;
      EXPECT_EQ(net->a->weight.grad().min().item<double>(), group.rank() + 1) << step;
      EXPECT_TRUE(net->b->weight.grad().defined());
    }
  });
}

}  // namespace
}  // namespace cohort::parallel
