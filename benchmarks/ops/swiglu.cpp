// ops::swiglu beside silu(gate) * up in LibTorch's operators: forward alone, and forward with backward, in
// turns in one process. The shapes are (rows, hidden width) of a feed-forward part. Run: OMP_NUM_THREADS=1
// ops_swiglu [rounds, 15] [f32|bf16] [cpu: count CPU time]
#include "cohort/ops/swiglu.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include <cstdio>
#include <cstdlib>
#include <string>

#include "cohort/bench/compare.h"
#include "cohort/memory/allocator.h"

namespace {

namespace bench = cohort::bench;
using Way = at::Tensor (*)(const at::Tensor&, const at::Tensor&);

at::Tensor composite(const at::Tensor& gate, const at::Tensor& up) {
  return at::silu(gate) * up;
}

bench::Variant forward(const std::string& name, Way way, at::ScalarType dtype) {
  return {name, [way, dtype](const bench::Shape& shape) {
            const at::Tensor gate = at::randn(shape).to(dtype), up = at::randn(shape).to(dtype);
            return [=] {
              const at::NoGradGuard no_grad;
              bench::keep(way(gate, up));
            };
          }};
}

bench::Variant training(const std::string& name, Way way, at::ScalarType dtype) {
  return {name, [way, dtype](const bench::Shape& shape) {
            const at::Tensor gate = at::randn(shape).to(dtype).requires_grad_();
            const at::Tensor up = at::randn(shape).to(dtype).requires_grad_();
            const at::Tensor gradient = at::randn(shape).to(dtype);
            return [=] {
              gate.mutable_grad() = at::Tensor();
              up.mutable_grad() = at::Tensor();
              way(gate, up).backward(gradient);
            };
          }};
}

}  // namespace

int main(int argc, char** argv) {
  cohort::memory::tune_allocator();
  at::manual_seed(1);
  const auto dtype = argc > 2 && std::string(argv[2]) == "bf16" ? at::kBFloat16 : at::kFloat;
  const auto options = bench::CompareOptions()
                           .shapes({{1, 64}, {16, 512}, {128, 1024}, {512, 4096}})
                           .timeit(bench::TimeitOptions()
                                       .rounds(argc > 1 ? std::atoi(argv[1]) : 15)
                                       .clock(argc > 3 ? bench::cpu_clock() : bench::Clock()));
  const auto print = [](const char* what, const bench::Comparison& figures) {
    std::printf("%s\n\n%s\n", what, figures.markdown().c_str());
  };
  print("forward", bench::compare({forward("silu(gate) * up", composite, dtype),
                                   forward("ops::swiglu", cohort::ops::swiglu, dtype)},
                                  options));
  print("forward and backward", bench::compare({training("silu(gate) * up", composite, dtype),
                                                training("ops::swiglu", cohort::ops::swiglu, dtype)},
                                               options));
}
