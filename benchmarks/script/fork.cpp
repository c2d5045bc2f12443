// Two independent chains of matrix products, one after the other and with script::fork, on one thread each;
// and replays of both. Run: OMP_NUM_THREADS=1 script_fork [ROUNDS], on two free cores.
#include "cohort/script/fork.h"

#include <ATen/ATen.h>

#include <cstdio>
#include <cstdlib>

#include "cohort/bench/compare.h"
#include "cohort/script/script.h"

namespace {

namespace bench = cohort::bench;
namespace script = cohort::script;

at::Tensor chain(at::Tensor x, const at::Tensor& weights) {
  for (int i = 0; i < 8; ++i) x = x.matmul(weights);
  return x;
}

at::Tensor in_order(const at::Tensor& x, const at::Tensor& weights) {
  return chain(x, weights) + chain(x, weights);
}

at::Tensor forked(const at::Tensor& x, const at::Tensor& weights) {
  auto left = script::fork(chain, x, weights), right = script::fork(chain, x, weights);
  return script::wait(left) + script::wait(right);
}

// What makes the work of a width, by a function that `make` returns.
template <typename Make>
bench::Variant variant(const char* name, Make make) {
  return {name, [make](const bench::Shape& shape) {
            const at::Tensor x = at::rand({shape[0], shape[0]}), weights = at::rand({shape[0], shape[0]});
            auto run = make();
            return [=]() mutable { run(x, weights); };
          }};
}

}  // namespace

int main(int argc, char** argv) {
  const at::NoGradGuard no_grad;
  const auto figures = bench::compare(
      {variant("in order", [] { return &in_order; }), variant("forked", [] { return &forked; }),
       variant("in order, replayed", [] { return script::script(&in_order); }),
       variant("forked, replayed", [] { return script::script(&forked); })},
      bench::CompareOptions()
          .shapes({{16}, {64}, {256}, {512}})
          .threads({1})
          .timeit(bench::TimeitOptions().rounds(argc > 1 ? std::atoi(argv[1]) : 7)));
  std::puts(figures.markdown().c_str());
}
