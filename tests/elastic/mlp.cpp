#include "tests/elastic/mlp.h"

#include <ATen/Parallel.h>
#include <ATen/ops/mse_loss.h>
#include <ATen/ops/randn.h>
#include <torch/nn/module.h>
#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/dropout.h>
#include <torch/nn/modules/linear.h>

#include <chrono>
#include <thread>
#include <utility>
#include <vector>

#include "cohort/base/env.h"
#include "cohort/base/error.h"
#include "cohort/base/internal/fault_points.h"
#include "cohort/base/random.h"
#include "cohort/elastic/run.h"
#include "cohort/elastic/state_of.h"
#include "cohort/optim/sgd.h"

namespace cohort::test {
namespace {

constexpr std::uint64_t kSeed = 7, kSlowSteps = 80;

struct MlpImpl : torch::nn::Module {
  explicit MlpImpl(int hidden)
      : in(register_module("in", torch::nn::Linear(16, hidden))),
        norm(register_module("norm", torch::nn::BatchNorm1d(hidden))),
        dropout(register_module("dropout", torch::nn::Dropout(0.3))),
        middle(register_module("middle", torch::nn::Linear(hidden, hidden))),
        out(register_module("out", torch::nn::Linear(hidden, 4))) {}
  at::Tensor forward(const at::Tensor& x) {
    return out->forward(middle->forward(dropout->forward(norm->forward(in->forward(x)).relu())).tanh());
  }
  torch::nn::Linear in;
  torch::nn::BatchNorm1d norm;
  torch::nn::Dropout dropout;
  torch::nn::Linear middle, out;
};

/// Remembers the memory that it gives.
class RememberingExchange : public parallel::SliceExchange {
 public:
  RememberingExchange(std::shared_ptr<parallel::SliceExchange> exchange, std::vector<at::Tensor>& memory)
      : exchange_(std::move(exchange)), memory_(memory) {}
  int rank() const override { return exchange_->rank(); }
  int size() const override { return exchange_->size(); }
  at::Tensor empty(std::int64_t numel, const at::TensorOptions& options) override {
    memory_.push_back(exchange_->empty(numel, options));
    return memory_.back();
  }
  Transfer all_to_all(at::Tensor output, const at::Tensor& input,
                      const std::vector<std::int64_t>& output_bytes,
                      const std::vector<std::int64_t>& input_bytes) override {
    return exchange_->all_to_all(std::move(output), input, output_bytes, input_bytes);
  }
  Transfer all_gather(at::Tensor output, const at::Tensor& input) override {
    return exchange_->all_gather(std::move(output), input);
  }
  Transfer broadcast(at::Tensor bytes) override { return exchange_->broadcast(std::move(bytes)); }

 private:
  const std::shared_ptr<parallel::SliceExchange> exchange_;
  std::vector<at::Tensor>& memory_;
};

void append_bytes(std::string& bytes, const at::Tensor& tensor) {
  const at::Tensor plain = tensor.detach().contiguous();
  bytes.append(static_cast<const char*>(plain.const_data_ptr()), static_cast<std::size_t>(plain.nbytes()));
}

std::string bytes_of(const MlpImpl& net, optim::SGD& optimizer) {
  std::string bytes;
  for (const at::Tensor& tensor : net.parameters()) append_bytes(bytes, tensor);
  for (const at::Tensor& tensor : net.buffers()) append_bytes(bytes, tensor);
  for (const auto& [name, tensor] : optimizer.state().tensors) append_bytes(bytes, tensor);
  return bytes;
}

}  // namespace

std::string run_mlp(const MlpRun& run) {
  at::set_num_threads(static_cast<int>(base::env_int("TEST_THREADS").value_or(1)));
  // Drawn differently in each process: the session gives all the same.
  at::manual_seed(run.session == nullptr ? kSeed : base::env_int("TEST_INITIAL_SEED").value_or(kSeed));
  const auto net = std::make_shared<MlpImpl>(run.hidden);
  const auto optimizer =
      std::make_shared<optim::SGD>(net->parameters(), optim::SGDOptions(0.05).momentum(0.9));
  parallel::VirtualRankSync sync({},
                                 {.num_virtual_ranks = run.virtual_ranks, .bucket_bytes = run.bucket_bytes});
  sync.begin({.modules = {{"", net}}, .optimizers = {{"", optimizer, nullptr}}});
  const bool writes_again = base::env_string("TEST_PLANT") == "memory is written again";
  const bool has_slow_process = base::env_string("TEST_PLANT") == "slow";
  std::vector<at::Tensor> memory;
  elastic::StateAccess state = elastic::state_of(net, optimizer);
  if (base::env_string("TEST_PLANT") == "no load") state.load = [](const elastic::StateSnapshot&) {};
  if (base::env_string("TEST_PLANT") == "reject") {
    state.load = [load = state.load, is_first = true](const elastic::StateSnapshot& given) mutable {
      if (std::exchange(is_first, false)) throw DataError("test", "rejected");
      load(given);
    };
  }
  const auto last = elastic::run(
      {.total_steps = run.total_steps,
       .session = run.session,
       .sync = &sync,
       .on_enter =
           [&](const elastic::GenerationInfo& info) {
             memory.clear();
             if (writes_again && info.num_processes > 1)
               sync.set_exchange(std::make_shared<RememberingExchange>(run.session->exchange(), memory));
             if (run.on_enter) run.on_enter(info);
           },
       .on_commit =
           [&](const elastic::GenerationInfo& info) {
             if (run.on_commit) run.on_commit(info.steps, [&] { return bytes_of(*net, *optimizer); });
           }},
      state, [&](elastic::StepContext& context) {
        if (run.before_step) run.before_step(context.step());
        if (has_slow_process) {
          const bool is_slow = context.info().process == 1 && context.step() < kSlowSteps;
          std::this_thread::sleep_for(std::chrono::milliseconds(is_slow ? 8 : 4));
        }
        sync.begin_step();
        const parallel::ShareRange shares = sync.shares();
        double last = 0;
        for (std::int64_t share = shares.first; share < shares.first + shares.count; ++share) {
          const auto samples =
              static_cast<std::int64_t>(6 + (static_cast<std::uint64_t>(share) + context.step()) % 3);
          at::manual_seed(base::generator_seed(kSeed, context.step(), static_cast<std::uint64_t>(share)));
          sync.begin_share(share, samples);
          last = static_cast<double>(samples);
          const at::Tensor loss =
              at::mse_loss(net->forward(at::randn({samples, 16})), at::randn({samples, 4}));
          if (share + 1 == shares.first + shares.count) {
            sync.end_shares();
            sync.prepare(*optimizer, last, true);
          }
          loss.backward();
        }
        try {
          sync.average(*optimizer, last, true);
        } catch (const elastic::GenerationEnded&) {
          for (at::Tensor& tensor : memory) tensor.view(at::kByte).fill_(0x41);
          throw;
        }
        context.begin_changes();
        optimizer->step();
        base::reach_fault_point("stepped");
      });
  if (!last) return "";  // it was in no generation at the end
  return bytes_of(*net, *optimizer);
}

}  // namespace cohort::test
