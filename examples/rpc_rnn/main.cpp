// A language model on three workers: embedding and decoder lie on parameter servers, the LSTM on the trainer.
// After "Distributed RPC: a recurrent network", one of PyTorch's tutorials.
//
//   Run:      rpc_rnn [STEPS]      or: cohort run --nproc-per-node 3 -- rpc_rnn
//   Expect:   a line per 5 steps with a falling loss; then how many steps a second takes, and
//             "losses and parameters are those of one process, bit for bit"
#include <torch/torch.h>

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <exception>

#include "cohort/comm/job.h"
#include "cohort/launch/spawn.h"
#include "cohort/optim/factory.h"
#include "cohort/rpc/dist_optimizer.h"
#include "cohort/rpc/remote_module.h"

namespace {

namespace nn = torch::nn;
namespace optim = cohort::optim;
namespace rpc = cohort::rpc;

constexpr std::int64_t kTokens = 50, kWidth = 16, kLength = 12, kBatch = 4;

struct EmbedderImpl : nn::Module {
  EmbedderImpl() { table = register_module("table", nn::Embedding(kTokens, kWidth)); }
  at::Tensor forward(const at::Tensor& tokens) { return table(tokens); }
  nn::Embedding table{nullptr};
};

struct DecoderImpl : nn::Module {
  DecoderImpl() { linear = register_module("linear", nn::Linear(kWidth, kTokens)); }
  at::Tensor forward(const at::Tensor& hidden) { return linear(hidden); }
  nn::Linear linear{nullptr};
};

std::shared_ptr<EmbedderImpl> make_embedder(std::int64_t seed) {
  torch::manual_seed(static_cast<std::uint64_t>(seed));
  return std::make_shared<EmbedderImpl>();
}
std::shared_ptr<DecoderImpl> make_decoder(std::int64_t seed) {
  torch::manual_seed(static_cast<std::uint64_t>(seed));
  return std::make_shared<DecoderImpl>();
}
nn::LSTM make_lstm() {
  torch::manual_seed(3);
  return nn::LSTM(nn::LSTMOptions(kWidth, kWidth));
}

// What other workers may call.
COHORT_REMOTE(make_embedder);
COHORT_REMOTE(make_decoder);
COHORT_REMOTE_MODULE(EmbedderImpl);
COHORT_REMOTE_MODULE(DecoderImpl);

const optim::OptimizerOptions kOptimizer{.name = "sgd", .lr = 0.5, .momentum = 0.9};

// Sentences in which each token follows from the one before: [kLength + 1, kBatch].
at::Tensor sentences(std::int64_t step) {
  const at::Tensor places = at::arange(kLength + 1, at::kLong).unsqueeze(1);
  return at::remainder(places * 7 + at::arange(kBatch, at::kLong) * 3 + step, kTokens);
}

// The loss of a step. Embedder and decoder may be modules of this process or of another one.
template <typename Embedder, typename Decoder>
at::Tensor loss_of(Embedder& embedder, nn::LSTM& lstm, Decoder& decoder, std::int64_t step) {
  const at::Tensor tokens = sentences(step);
  const at::Tensor hidden = std::get<0>(lstm(embedder.forward(tokens.slice(0, 0, kLength))));
  const at::Tensor logits = decoder.forward(hidden);
  return at::cross_entropy_loss(logits.view({-1, kTokens}), tokens.slice(0, 1).reshape({-1}));
}

// Trains in this process alone. Returns the losses, and all parameters at the end.
std::pair<std::vector<double>, std::vector<at::Tensor>> train_alone(std::int64_t steps) {
  const auto embedder = make_embedder(1);
  const auto decoder = make_decoder(2);
  nn::LSTM lstm = make_lstm();
  std::vector<at::Tensor> parameters;
  for (const nn::Module* module :
       {static_cast<nn::Module*>(embedder.get()), static_cast<nn::Module*>(decoder.get()),
        static_cast<nn::Module*>(lstm.ptr().get())}) {
    for (const at::Tensor& parameter : module->parameters()) parameters.push_back(parameter);
  }
  const auto optimizer = optim::make_optimizer(kOptimizer, {{.params = parameters}});
  std::vector<double> losses;
  for (std::int64_t step = 0; step < steps; ++step) {
    optimizer->zero_grad();
    const at::Tensor loss = loss_of(*embedder, lstm, *decoder, step);
    losses.push_back(loss.item<double>());
    loss.backward();
    optimizer->step();
  }
  return {losses, parameters};
}

void train(std::int64_t steps) {
  auto embedder = rpc::remote_module<make_embedder>("ps/1", 1);
  auto decoder = rpc::remote_module<make_decoder>("ps/2", 2);
  nn::LSTM lstm = make_lstm();
  std::vector<rpc::RRef<at::Tensor>> parameters = embedder.parameters();
  for (auto& parameter : decoder.parameters()) parameters.push_back(parameter);
  for (const at::Tensor& parameter : lstm->parameters()) parameters.push_back(rpc::make_rref(parameter));
  rpc::DistributedOptimizer optimizer(parameters, kOptimizer);

  const auto [losses, alone] = train_alone(steps);
  bool is_same = true;
  double seconds = 0;
  const std::int64_t warm_up = steps / 10;  // these steps are not timed
  for (std::int64_t step = 0; step < steps; ++step) {
    const auto begin = std::chrono::steady_clock::now();
    rpc::dist_autograd::Context context;
    const at::Tensor loss = loss_of(embedder, lstm, decoder, step);
    rpc::dist_autograd::backward(context, {loss});
    optimizer.step(context);
    const std::chrono::duration<double> elapsed = std::chrono::steady_clock::now() - begin;
    if (step >= warm_up) seconds += elapsed.count();
    const double value = loss.item<double>();
    is_same = is_same && value == losses.at(static_cast<std::size_t>(step));
    if ((step + 1) % 5 == 0) std::printf("step %ld  loss %.4f\n", long(step + 1), value);
  }
  for (std::size_t i = 0; i < parameters.size(); ++i) {
    is_same = is_same && at::equal(parameters[i].to_here(), alone[i]);
  }
  std::printf("%.0f steps a second; losses and parameters are %sthose of one process, bit for bit\n",
              static_cast<double>(steps - warm_up) / seconds, is_same ? "" : "NOT ");
  TORCH_CHECK(is_same, "the numbers are not those of one process");
}

void work(std::int64_t steps) {
  const int rank = cohort::comm::job_from_environment().rank;
  rpc::init_rpc(rank == 0 ? "trainer/0" : "ps/" + std::to_string(rank));
  if (rank == 0) train(steps);
  rpc::shutdown();
}

}  // namespace

int main(int count, char** arguments) {
  try {
    const std::int64_t steps = count > 1 ? std::atol(arguments[1]) : 20;
    cohort::launch::spawn_unless_launched([steps](int) { work(steps); }, 3);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
  }
}
