// One model in every mode of two cores, in turn in one run: a training step (forward, backward, SGD with
// momentum) of ResNet-18, as the Markdown table of docs/parallel.md: images/s, ratio to one core, peak bytes.
// Run: OMP_NUM_THREADS=1 parallel_modes [batch, 32] [size, 64] [rounds, 3] [steps, 4]
#include <ATen/ATen.h>
#include <ATen/Parallel.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "cohort/comm/group.h"
#include "cohort/core/allocator.h"
#include "cohort/core/error.h"
#include "cohort/core/memory_watch.h"
#include "cohort/launch/spawn.h"
#include "cohort/models/layers.h"
#include "cohort/models/memory_format.h"
#include "cohort/models/resnet.h"
#include "cohort/models/stack.h"
#include "cohort/optim/sgd.h"
#include "cohort/parallel/data_parallel.h"
#include "cohort/parallel/distributed.h"
#include "cohort/parallel/placed.h"
#include "cohort/pipeline/pipeline.h"

namespace {

using namespace cohort;
using Clock = std::chrono::steady_clock;

struct Sizes {
  int batch = 32, size = 64, rounds = 3, steps = 4;
};

models::ResNet make_net() {
  at::manual_seed(1);
  models::ModelOptions options;
  options.name = "resnet18";
  options.num_classes = 10;
  models::ResNet net(options);
  models::set_memory_format(*net, at::MemoryFormat::ChannelsLast);
  return net;
}

at::Tensor make_images(int count, int size) {
  return at::randn({count, 3, size, size}).contiguous(at::MemoryFormat::ChannelsLast);
}

at::Tensor cross_entropy(const at::Tensor& output, const at::Tensor& target) {
  return at::cross_entropy_loss(output, target);
}

models::Stack part_of(const models::ResNet& net, bool first) {
  models::Stack part;
  bool in_first = true;
  for (const auto& [name, layer] : models::layers_of(net.ptr())) {
    in_first = in_first && name != "layer3.0";
    if (in_first == first) part->add(layer);
  }
  return part;
}

struct TwoPartsImpl : torch::nn::Module {
  TwoPartsImpl(const models::ResNet& net, const std::string& on_first, const std::string& on_second)
      : first(register_module("first", part_of(net, true)), core::Placement::parse(on_first)),
        second(register_module("second", part_of(net, false)), core::Placement::parse(on_second)) {}
  at::Tensor forward(const at::Tensor& images) { return second.forward(first.forward(images)); }

  parallel::Placed<models::Stack> first, second;
};
TORCH_MODULE(TwoParts);

// A step with any way to call the model.
std::function<void()> step_of(const models::ResNet& net, std::function<at::Tensor(const at::Tensor&)> forward,
                              const at::Tensor& images) {
  auto sgd = std::make_shared<optim::SGD>(net->parameters(), optim::SGDOptions(0.01).momentum(0.9));
  return [=, target = at::randint(10, {images.size(0)}, at::kLong)] {
    sgd->zero_grad();
    cross_entropy(forward(images), target).backward();
    sgd->step();
  };
}

std::function<void()> make_mode(const std::string& mode, const Sizes& sizes) {
  const at::Tensor images = make_images(sizes.batch, sizes.size);
  models::ResNet net = make_net();
  if (mode == "data_parallel") {
    auto model = std::make_shared<parallel::DataParallel<models::ResNet>>(
        net, parallel::DataParallelOptions{.device_ids = core::parse_placements("cpu:0,cpu:1")});
    return step_of(net, [model](const at::Tensor& x) { return model->forward(x); }, images);
  }
  if (mode == "model parallel") {
    TwoParts model(net, "cpu:0", "cpu:1");
    return step_of(net, [model](const at::Tensor& x) mutable { return model->forward(x); }, images);
  }
  if (mode == "pipeline") {
    pipeline::PipelineOptions options;
    options.placements = {"cpu:0", "cpu:1"};
    options.num_micro_batches = 4;
    auto pipe = std::make_shared<pipeline::Pipeline>(
        std::vector<pipeline::Stage>{core::AnyLayer(part_of(net, true)), core::AnyLayer(part_of(net, false))},
        options);
    auto sgd = std::make_shared<optim::SGD>(net->parameters(), optim::SGDOptions(0.01).momentum(0.9));
    return [=, target = at::randint(10, {images.size(0)}, at::kLong)] {
      sgd->zero_grad();
      pipe->step(images, target, cross_entropy);
      sgd->step();
    };
  }
  return step_of(net, [net](const at::Tensor& x) mutable { return net->forward(x); }, images);
}

struct Result {
  std::vector<double> images_per_second;
  std::int64_t peak = 0;                     // of all tensors, of all ranks
  std::map<std::string, std::int64_t> made;  // by a placement's thread
};

// The step on as many threads as the mode has.
void run_step(const std::string& mode, const std::function<void()>& step) {
  if (mode == "two threads") {
    at::set_num_threads(2);
    step();
    at::set_num_threads(1);
  } else if (mode == "single") {
    const core::ScopedPin pin(core::Placement::parse("cpu:0").cpus);
    step();
  } else {
    step();
  }
}

// Makes the mode and measures its memory, which makes its first steps too.
std::function<void()> begin(const std::string& mode, const Sizes& sizes, Result& result) {
  core::MemoryWatch watch;
  std::function<void()> step = make_mode(mode, sizes);
  run_step(mode, step);
  run_step(mode, step);
  watch.begin();
  run_step(mode, step);
  result.peak = watch.total().peak;
  if (mode == "single" || mode == "two threads") return step;
  for (const char* name : {"cpu:0", "cpu:1"}) {
    const auto worker = parallel::PlacementWorker::of(core::Placement::parse(name));
    result.made[name] = watch.made_by(worker->run("who", [] { return std::this_thread::get_id(); })).peak;
  }
  return step;
}

double measure(const std::string& mode, const std::function<void()>& step, const Sizes& sizes) {
  run_step(mode, step);
  const auto start = Clock::now();
  for (int i = 0; i < sizes.steps; ++i) run_step(mode, step);
  return sizes.batch * sizes.steps / std::chrono::duration<double>(Clock::now() - start).count();
}

// One rank of the modes that have several: half of the batch on one core. Writes images/s of both and their
// peak bytes to `file`.
void run_rank(const std::string& mode, const Sizes& sizes, const std::string& file) {
  comm::Group group = comm::init_process_group();
  const std::string core_name = core::concat("cpu:", group.rank());
  const core::ScopedPin pin(core::Placement::parse(core_name).cpus);
  core::MemoryWatch watch;
  const at::Tensor images = make_images(sizes.batch / group.size(), sizes.size);
  models::ResNet net = make_net();
  std::function<void()> step;
  if (mode == "ddp") {
    auto ddp = std::make_shared<parallel::DistributedDataParallel<models::ResNet>>(net, group);
    step = step_of(net, [ddp](const at::Tensor& x) { return ddp->forward(x); }, images);
  } else {
    TwoParts model(net, core_name + "/a", core_name + "/b");
    auto ddp = std::make_shared<parallel::DistributedDataParallel<TwoParts>>(model, group);
    step = step_of(net, [ddp](const at::Tensor& x) { return ddp->forward(x); }, images);
  }
  step();
  step();
  watch.begin();
  step();
  at::Tensor peak = at::full({1}, watch.total().peak, at::kLong);
  group.all_reduce(peak).wait();
  group.barrier();
  const auto start = Clock::now();
  for (int i = 0; i < sizes.steps; ++i) step();
  group.barrier();
  const double seconds = std::chrono::duration<double>(Clock::now() - start).count();
  if (group.rank() == 0) {
    std::ofstream(file) << sizes.batch * sizes.steps / seconds << " " << peak.item<std::int64_t>() << "\n";
  }
}

void measure_ranks(const char* program, const std::string& mode, const Sizes& sizes, Result& result) {
  const std::string file = core::concat("/tmp/parallel_modes.", Clock::now().time_since_epoch().count());
  const std::string command = core::concat(program, " ", sizes.batch, " ", sizes.size, " ", sizes.rounds, " ",
                                           sizes.steps, " \"", mode, "\" ", file);
  if (std::system(command.c_str()) != 0) throw Error("parallel_modes", mode + " failed");
  double images_per_second = 0;
  std::ifstream(file) >> images_per_second >> result.peak;
  std::remove(file.c_str());
  result.images_per_second.push_back(images_per_second);
}

double median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}

void print(const std::vector<std::string>& modes, std::map<std::string, Result>& results) {
  std::printf(
      "| mode | images/s, median | least | most | to one core | peak MiB | of it by cpu:0, cpu:1 |\n"
      "| --- | --- | --- | --- | --- | --- | --- |\n");
  const double base = median(results["single"].images_per_second);
  const auto mib = [](std::int64_t bytes) { return double(bytes) / (1 << 20); };
  for (const std::string& mode : modes) {
    Result& result = results[mode];
    const auto [least, most] = std::ranges::minmax(result.images_per_second);
    const double middle = median(result.images_per_second);
    std::printf("| %s | %.1f | %.1f | %.1f | %.2f | %.0f | ", mode.c_str(), middle, least, most,
                middle / base, mib(result.peak));
    if (result.made.empty()) {
      std::printf("|\n");
    } else {
      std::printf("%.0f, %.0f |\n", mib(result.made["cpu:0"]), mib(result.made["cpu:1"]));
    }
  }
}

}  // namespace

int main(int argc, char** argv) {
  core::tune_allocator();
  at::set_num_threads(1);
  const auto number = [&](int index, int otherwise) {
    return argc > index ? std::atoi(argv[index]) : otherwise;
  };
  const Sizes sizes{number(1, 32), number(2, 64), number(3, 3), number(4, 4)};
  if (argc > 6) {
    launch::spawn_unless_launched([&](int) { run_rank(argv[5], sizes, argv[6]); }, 2);
    return 0;
  }
  const std::vector<std::string> alone{"single", "two threads", "data_parallel", "model parallel",
                                       "pipeline"};
  const std::vector<std::string> ranks{"ddp", "ddp + model parallel"};
  std::map<std::string, Result> results;
  std::map<std::string, std::function<void()>> steps;
  for (const std::string& mode : alone) steps[mode] = begin(mode, sizes, results[mode]);
  for (int round = 0; round < sizes.rounds; ++round) {
    for (const std::string& mode : alone) {
      results[mode].images_per_second.push_back(measure(mode, steps[mode], sizes));
    }
    for (const std::string& mode : ranks) measure_ranks(argv[0], mode, sizes, results[mode]);
  }
  std::printf("ResNet-18, batch %d of %d x %d, channels-last, %d rounds of %d steps\n\n", sizes.batch,
              sizes.size, sizes.size, sizes.rounds, sizes.steps);
  std::vector<std::string> modes = alone;
  modes.insert(modes.end(), ranks.begin(), ranks.end());
  print(modes, results);
  return 0;
}
