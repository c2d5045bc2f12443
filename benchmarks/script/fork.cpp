// Two independent chains of matrix products, one after the other and with script::fork, on one thread each.
// Run: OMP_NUM_THREADS=1 script_fork, on two free cores.
#include "cohort/script/fork.h"

#include <ATen/ATen.h>

#include <cstdio>

#include "cohort/bench/compare.h"

namespace {

namespace bench = cohort::bench;
namespace script = cohort::script;

at::Tensor chain(at::Tensor x, const at::Tensor& weights) {
  for (int i = 0; i < 8; ++i) x = x.matmul(weights);
  return x;
}

// What makes the work of a width: both chains, by `run`.
bench::Variant variant(const char* name, void (*run)(const at::Tensor& x, const at::Tensor& weights)) {
  return {name, [run](const bench::Shape& shape) {
            const at::Tensor x = at::rand({shape[0], shape[0]}), weights = at::rand({shape[0], shape[0]});
            return [=] { run(x, weights); };
          }};
}

}  // namespace

int main() {
  const at::NoGradGuard no_grad;
  const auto figures = bench::compare(
      {variant("in order",
               [](const at::Tensor& x, const at::Tensor& weights) {
                 chain(x, weights);
                 chain(x, weights);
               }),
       variant("forked",
               [](const at::Tensor& x, const at::Tensor& weights) {
                 auto left = script::fork(chain, x, weights), right = script::fork(chain, x, weights);
                 script::wait(left);
                 script::wait(right);
               })},
      bench::CompareOptions().shapes({{16}, {64}, {256}, {512}}).threads({1}));
  std::puts(figures.markdown().c_str());
}
