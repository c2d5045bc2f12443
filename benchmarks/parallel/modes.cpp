// One model in every mode of two cores, in turn in one run: a training step (forward, backward, SGD with
// momentum) of ResNet-18, as the Markdown table of docs/guide/parallel.md: images/s, ratio to one core, peak
// bytes. Run: OMP_NUM_THREADS=1 parallel_modes [batch, 32] [size, 64] [rounds, 3] [steps, 4]
#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "cohort/base/error.h"
#include "cohort/bench/compare.h"
#include "cohort/comm/group.h"
#include "cohort/comm/init.h"
#include "cohort/launch/spawn.h"
#include "cohort/memory/allocation_profiler.h"
#include "cohort/memory/allocator.h"
#include "cohort/models/layers.h"
#include "cohort/models/memory_format.h"
#include "cohort/models/resnet.h"
#include "cohort/models/stack.h"
#include "cohort/optim/sgd.h"
#include "cohort/parallel/data_parallel.h"
#include "cohort/parallel/device_mapped.h"
#include "cohort/parallel/distributed.h"
#include "cohort/pipeline/pipeline.h"
#include "cohort/rpc/dist_optimizer.h"
#include "cohort/rpc/remote_module.h"

namespace {

using namespace cohort;

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
      : first(register_module("first", part_of(net, true)), base::Placement::parse(on_first)),
        second(register_module("second", part_of(net, false)), base::Placement::parse(on_second)) {}
  at::Tensor forward(const at::Tensor& images) { return second.forward(first.forward(images)); }

  parallel::DeviceMapped<models::Stack> first, second;
};
TORCH_MODULE(TwoParts);

std::shared_ptr<models::StackImpl> make_second_part() {
  return part_of(make_net(), false).ptr();
}
COHORT_REMOTE(make_second_part);
COHORT_REMOTE_MODULE(models::StackImpl);

// The first part in this process, the second one on the other worker.
std::function<void()> rpc_step(const at::Tensor& images) {
  constexpr int kMicroBatches = 4;
  models::Stack first = part_of(make_net(), true);
  const auto second = rpc::remote_module<make_second_part>("w1");
  std::vector<rpc::RRef<at::Tensor>> parameters = second.parameters();
  for (const at::Tensor& parameter : first->parameters()) parameters.push_back(rpc::make_rref(parameter));
  const optim::OptimizerOptions sgd{.name = "sgd", .lr = 0.01, .momentum = 0.9};
  auto optimizer = std::make_shared<rpc::DistributedOptimizer>(parameters, sgd);
  return [=, target = at::randint(10, {images.size(0)}, at::kLong)]() mutable {
    rpc::dist_autograd::Context context;
    std::vector<rpc::Future<at::Tensor>> futures;
    for (const at::Tensor& part : images.chunk(kMicroBatches)) {
      futures.push_back(second.forward_async(first->forward(part)));
    }
    std::vector<at::Tensor> outputs;
    for (auto& future : futures) outputs.push_back(future.get());
    rpc::dist_autograd::backward(context, {cross_entropy(at::cat(outputs), target)});
    optimizer->step(context);
  };
}

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
        net, parallel::DataParallelOptions{.device_ids = base::parse_placements("cpu:0,cpu:1")});
    return step_of(net, [model](const at::Tensor& x) { return model->forward(x); }, images);
  }
  if (mode == "model parallel") {
    TwoParts model(net, "cpu:0", "cpu:1");
    return step_of(net, [model](const at::Tensor& x) mutable { return model->forward(x); }, images);
  }
  if (mode == "pipeline") {
    pipeline::PipelineOptions options;
    options.placements = base::parse_placements("cpu:0,cpu:1");
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

struct Memory {
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
    const base::ScopedPin pin(base::Placement::parse("cpu:0").cpus);
    step();
  } else {
    step();
  }
}

// Makes the mode and measures its memory, which makes its first steps too.
std::function<void()> begin(const std::string& mode, const Sizes& sizes, Memory& result) {
  memory::AllocationProfiler profiler;
  std::function<void()> step = make_mode(mode, sizes);
  run_step(mode, step);
  run_step(mode, step);
  profiler.begin();
  run_step(mode, step);
  result.peak = profiler.total().peak;
  if (mode == "single" || mode == "two threads") return step;
  for (const char* name : {"cpu:0", "cpu:1"}) {
    const auto worker = parallel::PlacementWorker::of(base::Placement::parse(name));
    result.made[name] = profiler.made_by(worker->run("who", [] { return std::this_thread::get_id(); })).peak;
  }
  return step;
}

// One rank of the modes that have several: half of the batch, or half of the model, on one core. Writes
// seconds of a step and peak bytes of both to `file`.
void run_rank(const std::string& mode, const Sizes& sizes, const std::string& file) {
  comm::Group group = comm::init_process_group();
  const std::string core_name = base::concat("cpu:", group.rank());
  const base::ScopedPin pin(base::Placement::parse(core_name).cpus);
  memory::AllocationProfiler profiler;
  const bool is_rpc = mode == "rpc";
  const at::Tensor images = make_images(is_rpc ? sizes.batch : sizes.batch / group.size(), sizes.size);
  models::ResNet net{nullptr};
  if (!is_rpc) net = make_net();
  std::function<void()> step;
  if (is_rpc) {
    rpc::RpcOptions options;
    options.agent.num_threads = 1;  // one micro-batch at a time
    rpc::init_rpc(base::concat("w", group.rank()), options);
    step = group.rank() == 0 ? rpc_step(images) : [] {};
  } else if (mode == "ddp") {
    auto ddp = std::make_shared<parallel::DistributedDataParallel<models::ResNet>>(net, group);
    step = step_of(net, [ddp](const at::Tensor& x) { return ddp->forward(x); }, images);
  } else {
    TwoParts model(net, core_name + "/a", core_name + "/b");
    auto ddp = std::make_shared<parallel::DistributedDataParallel<TwoParts>>(model, group);
    step = step_of(net, [ddp](const at::Tensor& x) { return ddp->forward(x); }, images);
  }
  group.barrier();
  step();
  step();
  group.barrier();
  profiler.begin();
  step();
  if (is_rpc) group.barrier();  // the other rank's memory is used in the step of the first
  at::Tensor peak = at::full({1}, profiler.total().peak, at::kLong);
  group.all_reduce(peak).wait();
  group.barrier();
  const double seconds = bench::seconds_of([&] {
    for (int i = 0; i < sizes.steps; ++i) step();
    group.barrier();
  });
  if (group.rank() == 0)
    std::ofstream(file) << seconds / sizes.steps << " " << peak.item<std::int64_t>() << "\n";
  step = nullptr;
  if (is_rpc) rpc::shutdown();
}

double measure_ranks(const char* program, const std::string& mode, const Sizes& sizes, Memory& memory) {
  const std::string file = base::concat("/tmp/parallel_modes.", ::getpid());
  const std::string command = base::concat(program, " ", sizes.batch, " ", sizes.size, " ", sizes.rounds, " ",
                                           sizes.steps, " \"", mode, "\" ", file);
  if (std::system(command.c_str()) != 0) throw Error("parallel_modes", mode + " failed");
  double seconds = 0;
  std::ifstream(file) >> seconds >> memory.peak;
  std::remove(file.c_str());
  return seconds;
}

void print(const bench::Comparison& figures, std::map<std::string, Memory>& memory, int batch) {
  std::printf(
      "| mode | images/s, median | least | most | to one core | peak MiB | of it by cpu:0, cpu:1 |\n"
      "| --- | --- | --- | --- | --- | --- | --- |\n");
  const auto mib = [](std::int64_t bytes) { return double(bytes) / (1 << 20); };
  for (const auto& row : figures.rows) {
    const bench::Measurement& measurement = row.measurement;
    Memory& own = memory[measurement.label];
    std::printf("| %s | %.1f | %.1f | %.1f | %.2f | %.0f | ", measurement.label.c_str(),
                batch / measurement.median(), batch / measurement.percentile(1), batch / measurement.best(),
                row.ratio, mib(own.peak));
    if (own.made.empty()) {
      std::printf("|\n");
    } else {
      std::printf("%.0f, %.0f |\n", mib(own.made["cpu:0"]), mib(own.made["cpu:1"]));
    }
  }
}

}  // namespace

int main(int argc, char** argv) {
  memory::tune_allocator();
  at::set_num_threads(1);
  const auto number = [&](int index, int otherwise) {
    return argc > index ? std::atoi(argv[index]) : otherwise;
  };
  const Sizes sizes{number(1, 32), number(2, 64), number(3, 3), number(4, 4)};
  if (argc > 6) {
    launch::spawn_unless_launched([&](int) { run_rank(argv[5], sizes, argv[6]); }, 2);
    return 0;
  }
  std::map<std::string, Memory> memory;
  std::vector<bench::Variant> modes;
  for (const std::string mode : {"single", "two threads", "data_parallel", "model parallel", "pipeline"}) {
    modes.push_back(bench::Variant::sampled(mode, [mode, sizes, step = begin(mode, sizes, memory[mode])] {
      run_step(mode, step);
      const auto some = [&] {
        for (int i = 0; i < sizes.steps; ++i) run_step(mode, step);
      };
      return bench::seconds_of(some) / sizes.steps;
    }));
  }
  for (const std::string mode : {"ddp", "ddp + model parallel", "rpc"}) {
    modes.push_back(bench::Variant::sampled(
        mode, [&, mode] { return measure_ranks(argv[0], mode, sizes, memory[mode]); }));
  }
  const auto figures =
      bench::compare(modes, bench::CompareOptions().timeit(
                                bench::TimeitOptions().rounds(sizes.rounds).calls(sizes.steps).warm_up(0)));
  std::printf("ResNet-18, batch %d of %d x %d, channels-last, %d rounds of %d steps\n\n", sizes.batch,
              sizes.size, sizes.size, sizes.rounds, sizes.steps);
  print(figures, memory, sizes.batch);
  return 0;
}
