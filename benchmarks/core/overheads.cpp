// What core's units cost, each beside what one would write without them, in one process and on one core:
//   a timeline scope, off and on; a random stream per sample; the visitor over a struct; the tuned allocator.
// Run: OMP_NUM_THREADS=1 core_overheads
#include <ATen/ATen.h>
#include <ATen/Parallel.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <functional>
#include <random>
#include <string>
#include <vector>

#include "cohort/core/allocator.h"
#include "cohort/core/nested.h"
#include "cohort/core/random.h"
#include "cohort/core/timeline.h"

namespace bench {

struct Sample {
  at::Tensor image;
  at::Tensor label;
  std::vector<at::Tensor> boxes;
  std::string name;
};
COHORT_NESTED(Sample, image, label, boxes, name)

}  // namespace bench

namespace {

using Clock = std::chrono::steady_clock;
namespace core = cohort::core;

template <typename T>
void keep(const T& value) {
  asm volatile("" : : "g"(&value) : "memory");
}

struct Figures {
  double min = 0;
  double median = 0;
  double p99 = 0;
};

// Nanoseconds per call, over `rounds` rounds of `calls` calls.
Figures measure(const std::function<void(int)>& body, int calls, int rounds = 301) {
  std::vector<double> times;
  for (int round = 0; round < rounds; ++round) {
    const auto begin = Clock::now();
    body(calls);
    times.push_back(std::chrono::duration<double, std::nano>(Clock::now() - begin).count() / calls);
  }
  std::sort(times.begin(), times.end());
  const auto at = [&](double share) { return times[static_cast<std::size_t>(share * (rounds - 1))]; };
  return {times.front(), at(0.5), at(0.99)};
}

void print(const char* what, const Figures& figures, const Figures& baseline) {
  std::printf("%-44s %10.1f %10.1f %10.1f %8.2fx\n", what, figures.min, figures.median, figures.p99,
              figures.median / baseline.median);
}

void timeline() {
  const auto with_scope = [](int calls) {
    for (int i = 0; i < calls; ++i) {
      const core::TimelineScope scope("work");
      keep(i);
    }
  };
  const Figures bare = measure(
      [](int calls) {
        for (int i = 0; i < calls; ++i) keep(i);
      },
      10000);
  const Figures off = measure(with_scope, 10000);
  const Figures clocks = measure(
      [](int calls) {
        for (int i = 0; i < calls; ++i) {
          keep(Clock::now());
          keep(Clock::now());
        }
      },
      1000);
  core::Timeline::start(1 << 20);
  const Figures on = measure(with_scope, 1000);
  core::Timeline::stop();
  print("empty loop", bare, bare);
  print("timeline scope, stopped", off, bare);
  print("two clock reads", clocks, clocks);
  print("timeline scope, recording", on, clocks);
}

void random_streams() {
  const Figures python_like = measure(
      [](int calls) {
        for (int i = 0; i < calls; ++i) {
          std::mt19937_64 generator(static_cast<std::uint64_t>(i));
          keep(generator() + generator());
        }
      },
      1000);
  const Figures ours = measure(
      [](int calls) {
        for (int i = 0; i < calls; ++i) {
          core::RandomStream stream(1, 0, static_cast<std::uint64_t>(i), core::Purpose::kTransform);
          keep(stream.next_u64() + stream.next_u64());
        }
      },
      1000);
  print("mt19937_64 per sample, two draws", python_like, python_like);
  print("random stream per sample, two draws", ours, python_like);
}

void visitor() {
  const bench::Sample sample{at::ones({4}), at::ones({1}), std::vector<at::Tensor>(6, at::ones({2})), "name"};
  const auto by_hand = [&](int calls) {
    for (int i = 0; i < calls; ++i) {
      std::int64_t total = sample.image.numel() + sample.label.numel();
      for (const at::Tensor& box : sample.boxes) total += box.numel();
      keep(total);
    }
  };
  const auto visited = [&](int calls) {
    for (int i = 0; i < calls; ++i) {
      std::int64_t total = 0;
      core::visit_tensors(sample, [&](const at::Tensor& tensor) { total += tensor.numel(); });
      keep(total);
    }
  };
  const Figures hand = measure(by_hand, 10000);
  print("struct of 8 tensors, by hand", hand, hand);
  print("struct of 8 tensors, visit_tensors", measure(visited, 10000), hand);
}

// One process per setting: malloc's limits cannot be taken back.
void allocator_child() {
  at::set_num_threads(1);
  core::tune_allocator();
  const at::Tensor x = at::rand({4 << 20});
  const auto chain = [&](int calls) {
    for (int i = 0; i < calls; ++i) keep(x.mul(1.5).add(0.5).sigmoid().mul(x));
  };
  chain(3);
  const Figures figures = measure(chain, 1, 101);
  std::printf("%.1f %.1f %.1f\n", figures.min, figures.median, figures.p99);
}

Figures allocator(const std::string& program, const std::string& setting) {
  Figures figures;
  FILE* pipe = ::popen(("COHORT_ALLOCATOR=" + setting + " '" + program + "' --allocator-child").c_str(), "r");
  if (pipe == nullptr || std::fscanf(pipe, "%lf %lf %lf", &figures.min, &figures.median, &figures.p99) != 3) {
    std::fprintf(stderr, "the child process for the allocator failed\n");
  }
  if (pipe != nullptr) ::pclose(pipe);
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
  const Figures system = allocator(argv[0], "system");
  print("4 operators on 4 M floats, system malloc", system, system);
  print("4 operators on 4 M floats, tuned malloc", allocator(argv[0], "tuned"), system);
}
