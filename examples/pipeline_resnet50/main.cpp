// ResNet-50 in two parts on two cores: one placement, model parallel, and a pipeline over split sizes. The
// experiment of PyTorch's tutorial on model parallelism: batches of 120 images, one-hot labels, squared
// error.
//
//   Run:      pipeline_resnet50 [--images 120] [--size 128] [--batches 3] [--repeats 3] [--split 12,20]
//                               [--schedule zb_h1] [--curve split.svg]
//   Expect:   seconds per repeat: "one placement"; "model parallel, published cut"; "pipeline, published cut,
//             split" 20, faster; "best split"; balance()'s cut with its "predicted step"; what "a step took";
//             its "bound": what two cores do over one, times what the schedule leaves busy
#include <torch/torch.h>

#include <cstdio>
#include <future>
#include <sstream>
#include <string>
#include <string_view>

#include "cohort/base/error.h"
#include "cohort/memory/allocator.h"
#include "cohort/pipeline/balance.h"
#include "cohort/train/sinks/curves.h"
#include "experiment.h"

namespace {

using namespace cohort;

constexpr const char* kUsage =
    "usage: pipeline_resnet50 [--images 120] [--size 128] [--batches 3] [--repeats 3] [--split 12,20]\n"
    "                         [--schedule zb_h1] [--curve split.svg]\n";

Arguments parse(int argc, char** argv) {
  Arguments result;
  const auto read = [&result](const std::string& option, const std::string& value) {
    if (option == "--images") {
      result.images = std::stoll(value);
    } else if (option == "--size") {
      result.size = std::stoll(value);
    } else if (option == "--batches") {
      result.batches = std::stoll(value);
    } else if (option == "--repeats") {
      result.repeats = std::stoi(value);
    } else if (option == "--schedule") {
      result.schedule = pipeline::parse_schedule(value);
    } else if (option == "--curve") {
      result.curve = value;
    } else if (option == "--split") {
      result.split.clear();
      std::stringstream list(value);
      for (std::string each; std::getline(list, each, ',');) result.split.push_back(std::stoll(each));
    } else {
      throw UsageError("pipeline_resnet50", base::concat("there is no option ", option), kUsage);
    }
  };
  for (int i = 1; i < argc; i += 2) {
    if (i + 1 == argc) throw UsageError("pipeline_resnet50", base::concat(argv[i], " wants a value"), kUsage);
    read(argv[i], argv[i + 1]);
  }
  if (result.split.empty() || result.images < 2 || result.batches < 1 || result.repeats < 1) {
    throw UsageError("pipeline_resnet50", "there is nothing to measure", kUsage);
  }
  return result;
}

void print(const char* what, Seconds time, double baseline) {
  std::printf("%-34s %8.3f s  (deviation %.3f)  %.2fx\n", what, time.mean, time.deviation,
              baseline / time.mean);
  std::fflush(stdout);
}

// What two cores do at once over what one does alone: half of the images on each, with nothing in common but
// the machine. No pipeline of two stages is faster than this, times what its schedule leaves busy.
double two_cores_over_one(Arguments half, Seconds single) {
  const auto images = static_cast<double>(half.images);
  half.images /= 2;
  const auto pace = [&single, half, images](const std::string& placement) {  // of one core's alone
    at::set_num_threads(1);
    Experiment experiment(half);
    const Seconds time = experiment.run({experiment.layers()}, half.images, placement);
    return static_cast<double>(half.images) / time.mean * single.mean / images;
  };
  auto other = std::async(std::launch::async, pace, "cpu:1");
  const double own = pace("cpu:0");
  return own + other.get();
}

void run(const Arguments& arguments) {
  memory::tune_allocator();
  at::set_num_threads(1);  // the optimizer's; stages have their placements'
  torch::manual_seed(1);
  Experiment experiment(arguments);
  const Seconds single = experiment.run({experiment.layers()}, arguments.images);
  print("one placement", single, single.mean);
  const Seconds parallel = experiment.run(experiment.published(), arguments.images);
  print("model parallel, published cut", parallel, single.mean);
  train::CurveSeries curve{"published cut", {}, {}, 0};
  std::int64_t best = arguments.split.front();
  double least = 1e30;
  for (const std::int64_t split : arguments.split) {
    const Seconds time = experiment.run(experiment.published(), split);
    print(base::concat("pipeline, published cut, split ", split).c_str(), time, single.mean);
    curve.x.push_back(static_cast<double>(split));
    curve.y.push_back(time.mean);
    if (time.mean < least) least = time.mean, best = split;
  }
  std::printf("best split %lld: %.2fx model parallel\n", static_cast<long long>(best), parallel.mean / least);
  const auto profile =
      pipeline::profile_layers(experiment.layers(), experiment.images(best),
                               {.placements = base::parse_placements(kPlacements),
                                .repeats = 3,
                                .split = arguments.schedule == pipeline::Schedule::kZeroBubble});
  const int micro_batches = static_cast<int>((arguments.images + best - 1) / best);
  const auto cut = pipeline::balance(
      profile, {.num_stages = 2, .num_micro_batches = micro_batches, .schedule = arguments.schedule});
  std::fputs(cut.text().c_str(), stdout);
  const Seconds balanced = experiment.run(cut.stages(experiment.layers()), best);
  print(base::concat("pipeline, balanced cut, split ", best).c_str(), balanced, single.mean);
  std::printf("%.2fx model parallel; a step took %.3f ms, predicted %.3f ms\n", parallel.mean / balanced.mean,
              1000 * balanced.mean / static_cast<double>(arguments.batches), cut.step);
  const double cores = two_cores_over_one(arguments, single), bound = cores * (1 - cut.bubble);
  std::printf("two cores over one: %.2fx; bound of this cut: %.2fx one placement; reached: %.0f %% of it\n",
              cores, bound, 100 * single.mean / balanced.mean / bound);
  if (arguments.curve.empty()) return;
  const train::CurvePanel panel{"seconds per repeat", "s", {curve}};
  train::write_curves(arguments.curve, {"ResNet-50 in two stages", "", "split size", {panel}});
}

}  // namespace

int main(int argc, char** argv) {
  if (argc == 2 && std::string_view(argv[1]) == "--help") {
    std::fputs(kUsage, stdout);
    return 0;
  }
  try {
    run(parse(argc, argv));
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
  }
}
