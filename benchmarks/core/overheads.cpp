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

#include "cohort/bench/timeit.h"
#include "cohort/core/allocator.h"
#include "cohort/core/nested.h"
#include "cohort/core/random.h"
#include "cohort/core/timeline.h"

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
namespace core = cohort::core;

using cohort::bench::keep;
using cohort::bench::Measurement;

Measurement measure(c10::function_ref<void(std::int64_t)> body, std::int64_t calls, int rounds = 301) {
  return cohort::bench::measure(body, cohort::bench::TimeitOptions().calls(calls).rounds(rounds));
}

// In nanoseconds.
void print(const char* what, const Measurement& figures, const Measurement& baseline) {
  std::printf("%-44s %10.1f %10.1f %10.1f %8.2fx\n", what, 1e9 * figures.best(), 1e9 * figures.median(),
              1e9 * figures.percentile(0.99), figures.median() / baseline.median());
}

void timeline() {
  const auto with_scope = [](std::int64_t calls) {
    for (std::int64_t i = 0; i < calls; ++i) {
      const core::TimelineScope scope("work");
      keep(i);
    }
  };
  const Measurement bare = measure(
      [](std::int64_t calls) {
        for (std::int64_t i = 0; i < calls; ++i) keep(i);
      },
      10000);
  const Measurement off = measure(with_scope, 10000);
  const Measurement clocks = measure(
      [](std::int64_t calls) {
        for (std::int64_t i = 0; i < calls; ++i) {
          keep(Clock::now());
          keep(Clock::now());
        }
      },
      1000);
  core::Timeline::start(1 << 20);
  const Measurement on = measure(with_scope, 1000);
  core::Timeline::stop();
  print("empty loop", bare, bare);
  print("timeline scope, stopped", off, bare);
  print("two clock reads", clocks, clocks);
  print("timeline scope, recording", on, clocks);
}

void random_streams() {
  const Measurement python_like = measure(
      [](std::int64_t calls) {
        for (std::int64_t i = 0; i < calls; ++i) {
          std::mt19937_64 generator(static_cast<std::uint64_t>(i));
          keep(generator() + generator());
        }
      },
      1000);
  const Measurement ours = measure(
      [](std::int64_t calls) {
        for (std::int64_t i = 0; i < calls; ++i) {
          core::RandomStream stream(1, 0, static_cast<std::uint64_t>(i), core::Purpose::kTransform);
          keep(stream.next_u64() + stream.next_u64());
        }
      },
      1000);
  print("mt19937_64 per sample, two draws", python_like, python_like);
  print("random stream per sample, two draws", ours, python_like);
}

void visitor() {
  const samples::Sample sample{at::ones({4}), at::ones({1}), std::vector<at::Tensor>(6, at::ones({2})),
                               "name"};
  const auto by_hand = [&](std::int64_t calls) {
    for (std::int64_t i = 0; i < calls; ++i) {
      std::int64_t total = sample.image.numel() + sample.label.numel();
      for (const at::Tensor& box : sample.boxes) total += box.numel();
      keep(total);
    }
  };
  const auto visited = [&](std::int64_t calls) {
    for (std::int64_t i = 0; i < calls; ++i) {
      std::int64_t total = 0;
      core::visit_tensors(sample, [&](const at::Tensor& tensor) { total += tensor.numel(); });
      keep(total);
    }
  };
  const Measurement hand = measure(by_hand, 10000);
  print("struct of 8 tensors, by hand", hand, hand);
  print("struct of 8 tensors, visit_tensors", measure(visited, 10000), hand);
}

// One process per setting: malloc's limits cannot be taken back.
void allocator_child() {
  at::set_num_threads(1);
  core::tune_allocator();
  const at::Tensor x = at::rand({4 << 20});
  const auto chain = [&](std::int64_t calls) {
    for (std::int64_t i = 0; i < calls; ++i) keep(x.mul(1.5).add(0.5).sigmoid().mul(x));
  };
  chain(3);
  for (const double seconds : measure(chain, 1, 101).seconds) std::printf("%.9f\n", seconds);
}

Measurement allocator(const std::string& program, const std::string& setting) {
  Measurement figures;
  FILE* pipe = ::popen(("COHORT_ALLOCATOR=" + setting + " '" + program + "' --allocator-child").c_str(), "r");
  double seconds = 0;
  while (pipe != nullptr && std::fscanf(pipe, "%lf", &seconds) == 1) figures.seconds.push_back(seconds);
  if (pipe != nullptr) ::pclose(pipe);
  if (figures.seconds.empty()) std::fprintf(stderr, "the child process for the allocator failed\n");
  return figures;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc > 1 && std::string(argv[1]) == "--allocator-child") {
    allocator_child();
    return 0;
  }
  at::set_num_threads(1);
  std::printf("%-44s %10s %10s %10s %9s\n", "1 thread, nanoseconds per call", "min", "median", "p99",
              "ratio");
  timeline();
  random_streams();
  visitor();
  const Measurement system = allocator(argv[0], "system");
  print("4 operators on 4 M floats, system malloc", system, system);
  print("4 operators on 4 M floats, tuned malloc", allocator(argv[0], "tuned"), system);
}
