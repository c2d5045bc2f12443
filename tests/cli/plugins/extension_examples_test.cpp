// The blocks of code in CONTRIBUTING.md, "Extending it", compiled and used. Each stands here as it stands
// there. The blocks of docs/guide/plugin_examples.md are whole sources, plugin_*.cpp, which a library for
// `--load` has too.
#include <ATen/ATen.h>
#include <gtest/gtest.h>
#include <torch/nn/cloneable.h>
#include <torch/nn/modules/container/any.h>
#include <torch/nn/modules/linear.h>

#include <atomic>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <limits>
#include <thread>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/csrc/distributed/c10d/Work.hpp>
#include <torch/csrc/distributed/c10d/comm.hpp>

#include "cohort/base/error.h"
#include "cohort/base/log.h"
#include "cohort/checkpoint/tensor_format.h"
#include "cohort/comm/backend.h"
#include "cohort/comm/group.h"
#include "cohort/data/dataset.h"
#include "cohort/data/sampler_factory.h"
#include "cohort/data/transforms/transform_registry.h"
#include "cohort/models/registry.h"
#include "cohort/ops/operator.h"
#include "cohort/optim/factory.h"
#include "cohort/optim/schedule_factory.h"
#include "cohort/optim/sgd.h"
#include "cohort/parallel/average.h"
#include "cohort/parallel/comm_hook.h"
#include "cohort/parallel/gradient_sync.h"
#include "cohort/parallel/model_runner.h"
#include "cohort/pipeline/simulate.h"
#include "cohort/train/callback.h"
#include "cohort/train/task.h"
#include "tests/support/ranks.h"
#include "tests/support/source_dir.h"
#include "tests/support/temp_dir.h"
#include "tests/support/throws.h"

namespace {

using namespace cohort;

// clang-format off

struct TinyImpl : torch::nn::Cloneable<TinyImpl> {
  explicit TinyImpl(std::int64_t num_classes) : num_classes(num_classes) { reset(); }
  void reset() override { linear = register_module("linear", torch::nn::Linear(16, num_classes)); }
  at::Tensor forward(at::Tensor x) { return linear->forward(x.flatten(1)); }
  std::int64_t num_classes;
  torch::nn::Linear linear{nullptr};
};
COHORT_REGISTER_MODEL("tiny", [](const models::ModelOptions& options) {
  return torch::nn::AnyModule(std::make_shared<TinyImpl>(options.num_classes));
});

struct Squares : data::ExampleDataset {
  std::int64_t size() const override { return 1000; }
  std::vector<at::Tensor> get(std::int64_t i, base::RandomStream&) const override {
    return {at::full({1}, double(i)), at::full({1}, double(i * i))};
  }
  std::string fingerprint() const override { return "squares of 0 to 999"; }
};
COHORT_REGISTER_DATASET(squares, [](const data::DatasetArgs&) {
  return std::make_shared<const Squares>();
});

struct TopHalf : data::Transform {
  data::ImageSize output_size(data::ImageSize in) const override {
    return {in.height / 2, in.width};
  }
  data::CropResizeOp plan(data::ImageSize in, base::RandomStream&) const override {
    return {.region = {0, 0, in.height / 2, in.width}, .size = output_size(in)};
  }
};
const bool is_registered = (data::register_transform("TopHalf", "", [](data::TransformArgs&) {
  return std::make_unique<TopHalf>(); }), true);

at::Tensor scale(const at::Tensor& x, double by) { return x * by; }
TORCH_LIBRARY(mine, library) {
  ops::define(library, "scale(Tensor x, float by) -> Tensor")
      .composite(&scale)
      .backward([](const ops::Call& call, const std::vector<at::Tensor>& gradients) {
        return std::vector<at::Tensor>{gradients[0] * call.argument<double>(1)};
      });
}

struct SignSGD : optim::Optimizer {
  SignSGD(auto groups, double lr) : Optimizer(std::move(groups)) { fill_options({.lr = lr}); }
  std::string type() const override { return "sign_sgd"; }
  void step() override {
    for (const at::NoGradGuard no_grad; auto& group : param_groups())
      for (auto& p : group.params) if (p.grad().defined()) p.add_(p.grad().sign(), -group.lr);
  }
};
COHORT_REGISTER_OPTIMIZER("sign_sgd", [](auto& options, auto groups) {
  return std::make_unique<SignSGD>(std::move(groups), options.lr.value_or(0.01)); });

COHORT_REGISTER_SCHEDULE("square_root", [](const optim::ScheduleOptions& options) {
  const double every = options.extra.number("every", 1);
  return optim::lambda([every](std::int64_t step) { return 1 / std::sqrt(1 + step / every); },
                       options.name);
});

struct Reversed : data::SequentialSampler {
  using SequentialSampler::SequentialSampler;
  std::vector<std::int64_t> order(std::int64_t epoch) const override {
    const std::vector<std::int64_t> ascending = SequentialSampler::order(epoch);
    return {ascending.rbegin(), ascending.rend()};
  }
};
COHORT_REGISTER_SAMPLER("reversed", [](const data::SamplerOptions& options) {
  return std::make_shared<const Reversed>(options.size);
});

COHORT_REGISTER_PIPELINE_SCHEDULE("eager_1f1b", {
  .order = [](const pipeline::PlaceInPipeline& place) {
    return pipeline::ActionOrder{.group = place.num_micro_batches,
                                 .warm_up = place.num_placements - place.placement};
  },
  .max_stages = 1});

COHORT_REGISTER_MODEL_RUNNER("halves", {
  .make = [](torch::nn::AnyModule model, const parallel::ModelRunnerOptions&) {
    return parallel::ModelRunner{[model](const at::Tensor& input) mutable {
      std::vector<at::Tensor> halves = input.chunk(2);
      for (at::Tensor& half : halves) half = model.forward(half);
      return at::cat(halves);
    }};
  },
  .plan_memory = [](const parallel::PlainMemory& plain, const parallel::ModelRunnerOptions&) {
    return std::vector<parallel::PlannedPlace>{{"the process", plain.samples, plain.use}}; }});

struct Averaging : parallel::ReplicatedSync {
  explicit Averaging(const comm::Group& group) : ReplicatedSync(group), averager(group) {}
  std::string name() const override { return "averaging"; }
  parallel::AverageReport average(const optim::Optimizer& o, double samples, bool finite) override {
    return averager.average(o.parameters(), samples, finite);
  }
  parallel::GradientAverager averager;
};
COHORT_REGISTER_GRADIENT_SYNC("averaging", {
  .make = [](auto& group, auto&) { return std::make_shared<Averaging>(group); }});

COHORT_REGISTER_COMM_HOOK("sum", [] {
  return parallel::CommHook([](const parallel::HookBucket& bucket) {
    return parallel::all_reduce(bucket.group, bucket.bucket.getBuffer(), bucket.timeout);
  });
});

struct Alone : c10d::Backend {
  struct Done : c10d::Work { Done() { finish(); } };
  explicit Alone(const comm::BackendOptions& job) : Backend(job.rank, job.size) {}
  const std::string getBackendName() const override { return "alone"; }
  c10::intrusive_ptr<c10d::Work> allreduce(std::vector<at::Tensor>&,
                                           const c10d::AllreduceOptions&) override {
    return c10::make_intrusive<Done>();
  }
};
COHORT_REGISTER_BACKEND("alone", {.make = [](auto& options) {
  return comm::BackendInstance{.backend = c10::make_intrusive<Alone>(options)}; }});

COHORT_REGISTER_TENSOR_FORMAT("labelled", {
  .extension = "labelled",
  .write = [](const std::filesystem::path& path, const checkpoint::TensorMap& tensors) {
    return checkpoint::write_new_safetensors(path, tensors, {{"written_by", "me"}});
  },
  .read = [](const std::shared_ptr<const checkpoint::MappedFile>& file) {
    return checkpoint::SafetensorsFile::from_mapping(file).tensors();
  }});

struct Regression : train::Task {
  Regression() { add_module("", net.ptr()); add_optimizer("", sgd); }
  train::StepMetrics train_step(data::Batch& batch) override {
    const at::Tensor loss = at::mse_loss(net->forward(batch.input()), batch.target());
    sgd->zero_grad(); loss.backward(); average_gradients(*sgd, batch.size); step_if_finite(*sgd);
    return {{"loss", loss, double(batch.size)}};
  }
  torch::nn::Linear net{1, 1};
  std::shared_ptr<optim::SGD> sgd = std::make_shared<optim::SGD>(net->parameters());
};

struct LogLoss : train::Callback {
  void on_epoch_end(const train::EpochReport& report) override {
    const auto found = report.metrics.find("val_loss");
    if (found != report.metrics.end()) base::log_info(base::concat("loss ", found->second));
  }
};

// clang-format on

// The blocks of C++ in `text`.
std::vector<std::string> blocks_of(const std::string& text) {
  const std::string open = "\n```cpp\n", close = "```\n";
  std::vector<std::string> blocks;
  for (std::size_t at = text.find(open); at != std::string::npos; at = text.find(open, at)) {
    at += open.size();
    blocks.push_back(text.substr(at, text.find(close, at) - at));
  }
  return blocks;
}

TEST(ExtensionExamplesTest, StandHereAsTheyStandInCONTRIBUTING) {
  const std::string here =
      test::read_file(test::source_dir() / "tests/cli/plugins/extension_examples_test.cpp");
  const std::string page = test::read_file(test::source_dir() / "CONTRIBUTING.md");
  const std::size_t begin = page.find("\n## Extending it\n");
  const std::vector<std::string> blocks =
      blocks_of(page.substr(begin, page.find("\n## ", begin + 1) - begin));
  EXPECT_EQ(blocks.size(), 15u);
  std::size_t at = 0;
  for (const std::string& block : blocks) {
    const std::size_t found = here.find("\n" + block, at);
    EXPECT_NE(found, std::string::npos) << block;
    if (found != std::string::npos) at = found + block.size();
  }
}

TEST(ExtensionExamplesTest, WholePlugInsStandInTheGuideAsTheyAreCompiled) {
  const std::vector<std::string> blocks =
      blocks_of(test::read_file(test::source_dir() / "docs/guide/plugin_examples.md"));
  const std::vector<std::string> sources = {"plugin_store_backend.cpp", "plugin_lion.cpp",
                                            "plugin_scaled_fp16.cpp", "plugin_triangular.cpp"};
  ASSERT_EQ(blocks.size(), sources.size());
  for (std::size_t i = 0; i < sources.size(); ++i) {
    EXPECT_EQ(blocks[i], test::read_file(test::source_dir() / "tests/cli/plugins" / sources[i]))
        << sources[i];
  }
}

TEST(ExtensionExamplesTest, OfInputMakeSamplesTransformsAndOrders) {
  base::RandomStream random(1, 2, 3, base::Purpose::kTransform);
  EXPECT_EQ(data::make_dataset("squares", data::DatasetArgs())->size(), 1000);
  const auto half = data::make_transform({.name = "TopHalf", .args = {}});
  EXPECT_EQ(half->plan({8, 6}, random).region.height, 4);
  EXPECT_EQ(data::make_sampler({.name = "reversed", .size = 3})->order(0),
            (std::vector<std::int64_t>{2, 1, 0}));
}

TEST(ExtensionExamplesTest, OfTrainingComputeWhatTheySay) {
  models::ModelOptions options;
  options.name = "tiny";
  options.num_classes = 3;
  const at::Tensor x = at::ones({4, 1, 4, 4});
  torch::nn::AnyModule model = models::make_model(options);
  const auto runner = parallel::make_model_runner(model, {.name = "halves"});
  EXPECT_TRUE(at::allclose(runner.forward(x), model.forward<at::Tensor>(x)));
  const pipeline::Plan plan = pipeline::make_plan({pipeline::parse_schedule("eager_1f1b"), 2, 0, 3});
  EXPECT_EQ(pipeline::simulate(plan).peak_memory.at(0), 3);
  parallel::PlainMemory plain;
  plain.samples = 4;
  EXPECT_EQ(parallel::model_runner_type("halves").plan_memory(plain, {}).places.front().samples, 4);

  at::Tensor p = at::zeros({2}).requires_grad_();
  p.mutable_grad() = at::tensor({3.0f, -2.0f});
  optim::make_optimizer({.name = "sign_sgd", .lr = 0.5}, {{.params = {p}}})->step();
  EXPECT_TRUE(at::equal(p.detach(), at::tensor({-0.5f, 0.5f})));
  EXPECT_EQ(optim::make_schedule({.name = "square_root", .total_steps = 9})->lr(3, 1.0), 0.5);

  static const auto op = ops::find<at::Tensor(const at::Tensor&, double)>("mine::scale");
  at::Tensor y = at::ones({2}).requires_grad_();
  op.call(y, 3.0).sum().backward();
  EXPECT_TRUE(at::equal(y.grad(), at::full({2}, 3.0f)));
}

TEST(ExtensionExamplesTest, ATaskMakesOneUpdate) {
  Regression task;
  data::Batch batch;
  batch.fields = {at::ones({4, 1}), at::ones({4, 1})};
  batch.size = 4;
  const at::Tensor before = task.net->weight.detach().clone();
  EXPECT_EQ(task.train_step(batch).front().name, "loss");
  EXPECT_FALSE(at::equal(task.net->weight, before));
}

TEST(ExtensionExamplesTest, OfRanksAndFilesAreKnownByTheirNames) {
  EXPECT_TRUE(parallel::make_comm_hook("sum"));
  const comm::Group group = comm::make_group(c10::make_intrusive<c10d::HashStore>(), 0, 1, "alone",
                                             test::kSlowdown * std::chrono::seconds(10));
  at::Tensor sum = at::ones({2});
  group.all_reduce(sum).wait();
  EXPECT_TRUE(at::equal(sum, at::ones({2})));
  EXPECT_TRUE(parallel::gradient_sync_type("averaging").make != nullptr);
  const test::TempDir folder;
  const checkpoint::TensorFormat format = checkpoint::tensor_format("labelled");
  const std::filesystem::path path = folder.path() / "model.labelled";
  format.write(path, {{"w", at::ones({2})}});
  const checkpoint::TensorMap read = format.read(checkpoint::MappedFile::open(path));
  ASSERT_EQ(read.size(), 1u);
  EXPECT_EQ(read[0].first, "w");
  EXPECT_TRUE(at::equal(read[0].second, at::ones({2})));
  LogLoss().on_epoch_end({});
}

TEST(ExtensionExamplesTest, RanksOverTheStoreReduceBroadcastGatherAndWaitForEachOther) {
  std::atomic<int> num_come = 0;
  test::run_ranks(2, "over_store", [&](comm::Group& group) {
    const at::Tensor own = at::full({3}, group.rank() + 1.0f);
    at::Tensor sum = own.clone(), largest = own.clone(), of_1 = own.clone(), all = at::empty({2, 3});
    group.all_reduce(sum).wait();
    EXPECT_TRUE(at::equal(sum, at::full({3}, 3.0f)));
    group.all_reduce(largest, comm::ReduceOp::MAX).wait();
    EXPECT_TRUE(at::equal(largest, at::full({3}, 2.0f)));
    group.broadcast(of_1, 1).wait();
    EXPECT_TRUE(at::equal(of_1, at::full({3}, 2.0f)));
    group.all_gather(all, own).wait();
    EXPECT_TRUE(at::equal(all, at::stack({at::full({3}, 1.0f), at::full({3}, 2.0f)})));
    COHORT_EXPECT_THROW_WITH(group.all_reduce(sum, comm::ReduceOp::MIN).wait(), UsageError,
                             "over_store has only sums and maxima");

    const auto backend = group.process_group()->getBackend(c10::kCPU);
    if (group.rank() == 1) std::this_thread::sleep_for(std::chrono::milliseconds(50));
    ++num_come;
    EXPECT_TRUE(backend->barrier()->wait());
    EXPECT_EQ(num_come.load(), 2);
  });
}

TEST(ExtensionExamplesTest, AnOptimizerCountsSavesAndRestoresItsTensorOfState) {
  const auto make = [](const at::Tensor& parameter) {
    return optim::make_optimizer({.name = "lion", .lr = 0.5, .weight_decay = 0.1}, {{.params = {parameter}}});
  };
  at::Tensor p = at::ones({2}).requires_grad_();
  const auto lion = make(p);
  EXPECT_EQ(lion->state_bytes(lion->param_groups()[0], p), 8);
  p.mutable_grad() = at::tensor({3.0f, -2.0f});
  lion->step();
  EXPECT_TRUE(at::allclose(p.detach(), at::tensor({0.45f, 1.45f})));
  EXPECT_TRUE(at::allclose(lion->state().tensors.at("state.0.exp_avg"), at::tensor({0.03f, -0.02f})));

  at::Tensor q = p.detach().clone().requires_grad_();
  const auto restored = make(q);
  restored->load_state(lion->state());
  for (at::Tensor* parameter : {&p, &q}) parameter->mutable_grad() = at::tensor({-0.1f, 0.1f});
  lion->step();
  restored->step();
  // The average outweighs a small gradient of the other sign.
  EXPECT_TRUE(at::allclose(p.detach(), at::tensor({-0.0725f, 1.8775f})));
  EXPECT_TRUE(at::equal(p.detach(), q.detach()));
}

TEST(ExtensionExamplesTest, AScheduleGoesUpAndDownInUnits) {
  optim::ScheduleOptions options{.name = "triangular", .total_steps = 200};
  options.extra = {{"half", "4"}, {"lowest", "0.5"}};
  const auto steps = optim::make_schedule(options);
  for (const std::int64_t cycle : {0, 8, 80}) {
    EXPECT_EQ(steps->lr(cycle, 2.0), 1.0);
    EXPECT_EQ(steps->lr(cycle + 2, 2.0), 1.5);
    EXPECT_EQ(steps->lr(cycle + 4, 2.0), 2.0);
    EXPECT_EQ(steps->lr(cycle + 7, 2.0), 1.25);
  }
  options.unit_steps = 10;
  options.warmup_steps = 5;
  const auto epochs = optim::make_schedule(options);
  EXPECT_EQ(epochs->lr(5, 2.0), 1.0);
  EXPECT_EQ(epochs->lr(14, 2.0), 1.0) << "constant within a unit";
  EXPECT_EQ(epochs->lr(45, 2.0), 2.0);
  options.extra = {{"half", "0"}};
  COHORT_EXPECT_THROW_WITH(optim::make_schedule(options), ConfigError, "half");
}

TEST(ExtensionExamplesTest, AHookOfTwoCollectivesSumsWhatHalfCannotHold) {
  test::run_ranks(2, "over_store", [](comm::Group& group) {
    const parallel::CommHook hook = parallel::make_comm_hook("scaled_fp16");
    const auto sum = [&](const at::Tensor& flat) {
      c10d::GradBucket bucket(0, 1, flat, {0}, {3}, {flat.sizes()}, {}, std::nullopt);
      const auto reduction = hook({bucket, group, std::chrono::milliseconds(0)});
      EXPECT_TRUE(reduction->advance()) << "no second collective";
      EXPECT_FALSE(reduction->advance());
      return flat;
    };
    const float is_1 = group.rank() == 1 ? 1.0f : 0.0f;
    EXPECT_TRUE(at::equal(sum(at::tensor({1e6f, -2e6f * is_1, 0.0f})), at::tensor({2e6f, -2e6f, 0.0f})));
    EXPECT_TRUE(at::equal(sum(at::zeros({3})), at::zeros({3})));
    const float bad = is_1 == 1.0f ? std::numeric_limits<float>::quiet_NaN() : 1.0f;
    EXPECT_FALSE(at::isfinite(sum(at::tensor({bad, 1.0f, 1.0f}))).any().item<bool>());
  });
}

}  // namespace
