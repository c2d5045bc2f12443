// What core's units cost, each beside what one would write without them, in one process and on one core:
//   a timeline scope, off and on; a random stream per sample; the visitor over a struct; the tuned allocator.
// Run: OMP_NUM_THREADS=1 core_overheads
#include <ATen/ATen.h>
#include <ATen/Parallel.h>

#include <chrono>
#include <cstdio>
#include <random>
#include <string>
#include <vector>

#include "cohort/base/error.h"
#include "cohort/base/random.h"
#include "cohort/base/timeline.h"
#include "cohort/bench/compare.h"
#include "cohort/core/nested.h"
#include "cohort/memory/allocator.h"

namespace samples {

struct Sample {
  at::Tensor image;
  at::Tensor label;
  std::vector<at::Tensor> boxes;
  std::string name;
};
COHORT_NESTED(Sample, image, label, boxes, name)

}  // namespace samples

namespace {

using Clock = std::chrono::steady_clock;
namespace bench = cohort::bench;
namespace base = cohort::base;
namespace core = cohort::core;
namespace memory = cohort::memory;

using bench::keep;

void compare(const std::vector<bench::Variant>& variants, std::int64_t calls, int rounds = 301) {
  const auto options = bench::TimeitOptions().calls(calls).rounds(rounds);
  std::printf("%s\n", bench::compare(variants, bench::CompareOptions().timeit(options)).text().c_str());
}

/// `body(i)` in a loop that the compiler sees through: a call of std::function would cost more than some.
template <typename Body>
bench::Variant loop(const char* name, Body body) {
  return {name, [body](std::int64_t calls) {
            for (std::int64_t i = 0; i < calls; ++i) body(i);
          }};
}

void timeline() {
  const auto scope = [](std::int64_t i) {
    const base::TimelineScope scope("work");
    keep(i);
  };
  compare({loop("empty loop", [](std::int64_t i) { keep(i); }), loop("timeline scope, stopped", scope)},
          10000);
  base::Timeline::start(1 << 20);
  compare({loop("two clock reads",
                [](std::int64_t) {
                  keep(Clock::now());
                  keep(Clock::now());
                }),
           loop("timeline scope, recording", scope)},
          1000);
  base::Timeline::stop();
}

void random_streams() {
  compare({loop("mt19937_64 per sample, two draws",
                [](std::int64_t i) {
                  std::mt19937_64 generator(static_cast<std::uint64_t>(i));
                  keep(generator() + generator());
                }),
           loop("random stream per sample, two draws",
                [](std::int64_t i) {
                  base::RandomStream stream(1, 0, static_cast<std::uint64_t>(i), base::Purpose::kTransform);
                  keep(stream.next_u64() + stream.next_u64());
                })},
          1000);
}

void visitor() {
  const samples::Sample sample{at::ones({4}), at::ones({1}), std::vector<at::Tensor>(6, at::ones({2})),
                               "name"};
  compare({loop("struct of 8 tensors, by hand",
                [&](std::int64_t) {
                  std::int64_t total = sample.image.numel() + sample.label.numel();
                  for (const at::Tensor& box : sample.boxes) total += box.numel();
                  keep(total);
                }),
           loop("struct of 8 tensors, visit_tensors",
                [&](std::int64_t) {
                  std::int64_t total = 0;
                  core::visit_tensors(sample, [&](const at::Tensor& tensor) { total += tensor.numel(); });
                  keep(total);
                })},
          10000);
}

// One process per setting: malloc's limits cannot be taken back.
void allocator_child() {
  memory::tune_allocator();
  const at::Tensor x = at::rand({4 << 20});
  const auto figures = bench::timeit([&] { return x.mul(1.5).add(0.5).sigmoid().mul(x); },
                                     bench::TimeitOptions().calls(1).rounds(21).warm_up(3));
  std::printf("%.9f\n", figures.median());
}

bench::Variant allocator(const std::string& program, const std::string& setting) {
  const std::string command = "COHORT_ALLOCATOR=" + setting + " '" + program + "' --allocator-child";
  return bench::Variant::sampled("4 operators on 4 M floats, " + setting + " malloc", [command] {
    double seconds = 0;
    FILE* pipe = ::popen(command.c_str(), "r");
    const bool read = pipe != nullptr && std::fscanf(pipe, "%lf", &seconds) == 1;
    if (pipe == nullptr || ::pclose(pipe) != 0 || !read) throw cohort::Error("core_overheads", command);
    return seconds;
  });
}

}  // namespace

int main(int argc, char** argv) {
  at::set_num_threads(1);
  if (argc > 1 && std::string(argv[1]) == "--allocator-child") {
    allocator_child();
    return 0;
  }
  timeline();
  random_streams();
  visitor();
  compare({allocator(argv[0], "system"), allocator(argv[0], "tuned")}, 1, 7);
}
