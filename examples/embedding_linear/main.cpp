// An embedding table on one placement, the linear layer that reads it on another: the table may be larger
// than the memory of the device that computes, and its gradient is sparse, a row per index that was used.
//
//   Run:      embedding_linear [TABLE] [HEAD] [STEPS]     by default cpu:0/table cpu:0/head 100
//   Expect:   a line per 20 steps with the loss, falling unevenly from about 2; then two lines,
//             "rows without a gradient: 80 of 100, unchanged" and "the same as on one device"
//
#include <torch/torch.h>

#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <exception>

#include "cohort/parallel/device_mapped.h"

namespace {

using cohort::base::Placement;
constexpr std::int64_t kRows = 100, kUsed = 20, kWidth = 16, kClasses = 5;

torch::nn::EmbeddingBag table() {
  return torch::nn::EmbeddingBag(
      torch::nn::EmbeddingBagOptions(kRows, kWidth).mode(torch::kSum).sparse(true));
}

// Embedding and Linear are the modules, or their DeviceMapped.
template <typename Embedding, typename Linear>
struct HybridImpl : torch::nn::Module {
  HybridImpl(Embedding embedding, Linear linear) : embedding_(embedding), linear_(linear) {
    register_module("embedding", embedding_.ptr());
    register_module("linear", linear_.ptr());
  }
  at::Tensor forward(const at::Tensor& words, const at::Tensor& offsets) {
    return linear_.forward(embedding_.forward(words, offsets));
  }

  Embedding embedding_;
  Linear linear_;
};

// A holder whose forward is called as DeviceMapped's is.
template <typename M>
struct Plain {
  template <typename... Args>
  at::Tensor forward(const Args&... args) {
    return module->forward(args...);
  }
  std::shared_ptr<torch::nn::Module> ptr() const { return module.ptr(); }
  M module;
};

template <typename Model>
double train(Model& model, int steps, bool print) {
  torch::optim::SGD optimizer(model.parameters(), 0.1);  // takes sparse gradients too
  torch::manual_seed(2);
  double last = 0;
  for (int step = 1; step <= steps; ++step) {
    const at::Tensor words = torch::randint(kUsed, {32}), offsets = torch::arange(0, 32, 4);  // 8 bags of 4
    const at::Tensor target = words.view({8, 4}).select(1, 0).remainder(kClasses);
    optimizer.zero_grad();
    const at::Tensor output = model.forward(words, offsets);
    const at::Tensor loss = torch::cross_entropy_loss(output, target.to(output.device()));
    loss.backward();  // the head's on its thread, then the table's on its own
    optimizer.step();
    last = loss.template item<double>();
    if (print && (step == 1 || step % 20 == 0)) std::printf("step %3d  loss %.5f\n", step, last);
  }
  return last;
}

}  // namespace

int main(int argc, char** argv) {
  try {
    using cohort::parallel::DeviceMapped;
    const Placement on_table = Placement::parse(argc > 1 ? argv[1] : "cpu:0/table");
    const Placement on_head = Placement::parse(argc > 2 ? argv[2] : "cpu:0/head");
    const int steps = argc > 3 ? std::atoi(argv[3]) : 100;
    torch::set_num_threads(1);

    torch::manual_seed(1);
    const torch::nn::EmbeddingBag embedding = table();
    const at::Tensor before = embedding->weight.detach().clone();
    HybridImpl model(DeviceMapped(embedding, on_table),
                     DeviceMapped(torch::nn::Linear(kWidth, kClasses), on_head));
    torch::manual_seed(1);
    const torch::nn::EmbeddingBag same_embedding = table();
    HybridImpl on_one_device(Plain<torch::nn::EmbeddingBag>{same_embedding},
                             Plain<torch::nn::Linear>{torch::nn::Linear(kWidth, kClasses)});

    const double loss = train(model, steps, true), expected = train(on_one_device, steps, false);
    const auto moved = (embedding->weight.detach().cpu() != before).any(1).sum().item<std::int64_t>();
    std::printf("rows without a gradient: %d of %d, unchanged\n", int(kRows - moved), int(kRows));
    const bool is_same = std::abs(loss - expected) < 1e-5 && moved <= kUsed;
    std::printf(is_same ? "the same as on one device\n" : "one device has %.6f\n", expected);
    return is_same ? 0 : 1;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "error: %s\n", error.what());
    return 1;
  }
}
