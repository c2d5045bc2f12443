// Random sequences of what a program does with DistributedDataParallel, beside PyTorch's: a step, an
// accumulation, a batch that is skipped, a forward for a metric, also one rank's between forward and
// backward, evaluation, parts that ranks leave out, ranks that end sooner.
#include <gtest/gtest.h>
#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/linear.h>

#include <cstdlib>
#include <random>

#include "cohort/checkpoint/safetensors.h"
#include "cohort/checkpoint/state_dict.h"
#include "cohort/parallel/distributed.h"
#include "tests/parallel/nets.h"
#include "tests/support/processes/python.h"
#include "tests/support/ranks.h"
#include "tests/support/source_dir.h"
#include "tests/support/temp_dir.h"

namespace cohort::parallel {
namespace {

namespace nn = torch::nn;

enum Step : std::int64_t {
  kTrain,
  kNoSync,
  kSkip,
  kEval,
  kEvalNoGrad,
  kZero,
  kZeroInPlace,
  kTrainAfterMetric,  // of one rank, which PyTorch's does not allow
  kNumSteps
};
constexpr std::array kTypes = {at::kFloat, at::kBFloat16, at::kHalf};
constexpr int kMaxRanks = 3, kSamples = 4;

int num_sequences() {
  const char* const given = std::getenv("COHORT_RANDOM_SEQUENCES");
  return given == nullptr ? 50 : std::atoi(given);
}

struct BranchesImpl : nn::Module {
  BranchesImpl() {
    trunk = register_module("trunk", nn::Linear(5, 6));
    norm = register_module("norm", nn::BatchNorm1d(nn::BatchNormOptions(6).eps(0.1)));
    fixed = register_module("fixed", nn::Linear(6, 6));
    left = register_module("left", nn::Linear(6, 4));
    right = register_module("right", nn::Linear(6, 4));
    for (at::Tensor& parameter : fixed->parameters()) parameter.requires_grad_(false);
  }
  at::Tensor forward(const at::Tensor& x, std::int64_t parts) {
    const at::Tensor h = fixed->forward(norm->forward(trunk->forward(x))).tanh();
    at::Tensor y = h.sum(1);
    if ((parts & 1) != 0) y = y + left->forward(h).sum(1);
    if ((parts & 2) != 0) y = y + right->forward(h).square().sum(1);
    return y;
  }
  nn::Linear trunk = nullptr, fixed = nullptr, left = nullptr, right = nullptr;
  nn::BatchNorm1d norm = nullptr;
};
TORCH_MODULE(Branches);

struct Sequence {
  at::ScalarType type;
  bool as_view, joins;
  Branches net = nullptr;
  at::Tensor steps;   // [n, 1 + ranks]: what is done, and which parts each rank uses
  at::Tensor inputs;  // [n, ranks, samples, 5]
};

Sequence make_sequence(std::uint64_t seed) {
  std::mt19937 random(static_cast<std::mt19937::result_type>(seed));
  const auto below = [&](int limit) {
    return static_cast<std::int64_t>(random() % static_cast<unsigned>(limit));
  };
  Sequence made{.type = kTypes[static_cast<std::size_t>(below(3))],
                .as_view = below(2) == 0,
                .joins = below(5) == 0,
                .steps = {},
                .inputs = {}};
  const std::int64_t length = 4 + below(8);
  made.steps = at::zeros({length, 1 + kMaxRanks}, at::kLong);
  auto rows = made.steps.accessor<std::int64_t, 2>();
  // What PyTorch's cannot do: its next backward under no_sync() reduces after a forward that no backward
  // followed, and a gradient that was accumulated and taken away must come again.
  bool is_prepared = false, accumulates = false;
  for (std::int64_t i = 0; i < length; ++i) {
    // Within join() each forward in training is followed by a backward.
    const bool trains = made.joins || below(3) == 0;
    rows[i][0] = trains ? std::int64_t{kTrain} : below(kNumSteps);
    if (rows[i][0] == kNoSync && is_prepared) rows[i][0] = kTrain;
    if (accumulates && (rows[i][0] == kZero || rows[i][0] == kZeroInPlace)) rows[i][0] = kEvalNoGrad;
    if (rows[i][0] == kTrain || rows[i][0] == kTrainAfterMetric) is_prepared = accumulates = false;
    if (rows[i][0] == kNoSync) accumulates = true;
    if (rows[i][0] == kSkip || rows[i][0] == kEval) is_prepared = true;
    for (int rank = 0; rank < kMaxRanks; ++rank) rows[i][1 + rank] = made.joins ? 3 : below(4);
  }
  const auto [net, inputs] =
      test::seeded(seed, [&] { return std::pair(Branches(), at::randn({length, kMaxRanks, kSamples, 5})); });
  made.net = net;
  made.inputs = inputs;
  return made;
}

// The gradients after each step of this rank, "<step>.<parameter>", and the buffers after each that reduces.
checkpoint::TensorMap run_sequence(const Sequence& sequence, const comm::Group& group) {
  auto net = std::make_shared<BranchesImpl>();
  {
    const at::NoGradGuard no_grad;
    const auto copy = [](const auto& from, auto to) {
      for (const auto& entry : from) to[entry.key()].copy_(entry.value());
    };
    copy(sequence.net->named_parameters(), net->named_parameters());
    copy(sequence.net->named_buffers(), net->named_buffers());
  }
  net->to(sequence.type);
  DistributedOptions options;
  options.find_unused_parameters = true;
  options.gradient_as_bucket_view = sequence.as_view;
  DistributedDataParallel<std::shared_ptr<BranchesImpl>> model(net, group, options);
  const auto rank = group.rank();
  checkpoint::TensorMap found;
  const auto run_step = [&](std::int64_t number) {
    const auto row = sequence.steps[number];
    const auto call = row[0].item<std::int64_t>(), parts = row[1 + rank].item<std::int64_t>();
    const at::Tensor x = sequence.inputs[number][rank].to(sequence.type);
    switch (call) {
      case kTrain:
        model.forward(x, parts).square().mean().backward();
        break;
      case kTrainAfterMetric: {
        const at::Tensor loss = model.forward(x, parts).square().mean();
        if (rank == number % group.size()) {
          net->eval();
          model.forward(x, parts ^ (1 + number % 3));
          net->train();
        }
        loss.backward();
        break;
      }
      case kNoSync: {
        const auto silent = model.no_sync();
        model.forward(x, parts).square().mean().backward();
        break;
      }
      case kSkip:
        model.forward(x, parts);
        break;
      case kEval:
        net->eval();
        model.forward(x, parts);
        net->train();
        break;
      case kEvalNoGrad: {
        const at::NoGradGuard no_grad;
        model.forward(x, parts);
        break;
      }
      default:
        net->zero_grad(call == kZero);
    }
    for (const auto& entry : net->named_parameters()) {
      const at::Tensor& gradient = entry.value().grad();
      if (gradient.defined()) found.emplace_back(base::concat(number, ".", entry.key()), gradient.clone());
    }
    if (sequence.joins || (call != kTrain && call != kTrainAfterMetric)) return;
    for (const auto& entry : net->named_buffers()) {
      found.emplace_back(base::concat(number, ".buffer.", entry.key()), entry.value().clone());
    }
  };
  const auto run_all = [&] {
    for (std::int64_t i = 0; i < sequence.steps.size(0); ++i) {
      if (!sequence.joins || i % (rank + 2) != 1) run_step(i);
    }
  };
  sequence.joins ? model.join(run_all) : run_all();
  return found;
}

TEST(DdpSequencesTest, RandomSequencesHaveTheGradientsAndBuffersOfPyTorch) {
  COHORT_NEED_PYTHON();
  const test::TempDir folder;
  std::vector<Sequence> sequences;
  checkpoint::TensorMap plan{{"count", at::full({}, num_sequences(), at::kLong)}};
  for (int i = 0; i < num_sequences(); ++i) {
    const Sequence& made = sequences.emplace_back(make_sequence(1000 + static_cast<std::uint64_t>(i)));
    const auto add = [&](const std::string& name, const at::Tensor& tensor) {
      plan.emplace_back(base::concat(i, ".", name), tensor);
    };
    const auto type = std::ranges::find(kTypes, made.type) - kTypes.begin();
    add("type", at::full({}, type, at::kLong));
    add("options", at::tensor({made.as_view ? 1 : 0, made.joins ? 1 : 0}, at::kLong));
    add("steps", made.steps);
    add("inputs", made.inputs);
    for (const auto& [name, tensor] : checkpoint::module_state(*made.net)) add("start." + name, tensor);
  }
  checkpoint::save_safetensors(folder / "plan.safetensors", plan);
  for (const int size : {2, 3}) {
    test::run_ranks(size, "gloo", [&](comm::Group& group) {
      checkpoint::TensorMap found;
      for (std::size_t i = 0; i < sequences.size(); ++i) {
        for (auto& [name, gradient] : run_sequence(sequences[i], group)) {
          found.emplace_back(base::concat(i, ".", name), std::move(gradient));
        }
      }
      checkpoint::save_safetensors(folder / base::concat("ranks", size, group.rank(), ".safetensors"), found);
    });
  }
  EXPECT_EQ(test::run_python({test::source_dir() / "tests/parallel/ddp/ddp_sequences.py", folder.path()}), 0);
}

}  // namespace
}  // namespace cohort::parallel
