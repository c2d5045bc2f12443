#include "cohort/planner/memory_plan.h"

#include <gtest/gtest.h>
#include <torch/nn/modules/linear.h>

#include <cmath>
#include <functional>
#include <mutex>

#include "cohort/base/error.h"
#include "cohort/parallel/model_runner.h"
#include "cohort/planner/internal/memory_probe.h"
#include "tests/support/throws.h"

namespace cohort::planner {
namespace {

constexpr const char* kResNet = R"(
model: {name: resnet18, num_classes: 10, width: 0.5}
data: {type: synthetic, image_size: 64}
train: {batch_size: 24, device: cpu}
distributed: {gradients: none}
)";

MemoryPlan plan_of(const std::vector<std::string>& overrides, const MemoryOptions& options = {}) {
  return plan_memory(config::load_config_text(kResNet, "test.yaml", overrides), options);
}

void expect_near(const std::optional<std::int64_t>& predicted, const std::optional<std::int64_t>& measured,
                 double tolerance) {
  ASSERT_TRUE(predicted && measured);
  EXPECT_GT(*measured, 0);
  EXPECT_NEAR(double(*predicted) / double(*measured), 1, tolerance)
      << *predicted << " predicted, " << *measured << " measured";
}

struct Optimizer {
  const char* name;
  std::vector<std::string> overrides;
  int states;
};

class OptimizersTest : public testing::TestWithParam<Optimizer> {};

TEST_P(OptimizersTest, ModelGradientsAndStateAreExact) {
  const MemoryPlan plan = plan_of(GetParam().overrides, {.measure = true});
  const PlaceMemory& place = plan.places.back();
  EXPECT_EQ(plan.places.size(), 1U);
  EXPECT_EQ(place.predicted.model, place.measured.model);
  EXPECT_EQ(place.predicted.model, plan.parameters + plan.buffers);
  EXPECT_EQ(place.predicted.gradients, place.measured.gradients);
  EXPECT_EQ(place.predicted.gradients, plan.parameters);
  EXPECT_EQ(place.predicted.optimizer, GetParam().states * plan.parameters);
  // A number or two per group of parameters, such as the count of steps.
  EXPECT_NEAR(double(*place.measured.optimizer), double(*place.predicted.optimizer), 64);
  EXPECT_EQ(place.predicted.batch, place.measured.batch);
}

INSTANTIATE_TEST_SUITE_P(Optimizers, OptimizersTest,
                         testing::Values(Optimizer{"sgd", {"optim.momentum=0"}, 0},
                                         Optimizer{"momentum", {"optim.momentum=0.9"}, 1},
                                         Optimizer{"adam", {"optim.name=adam"}, 2}),
                         [](const auto& info) { return std::string(info.param.name); });

// The kept bytes are exact. The peak is that of the kernels which LibTorch picks for 4 samples: 2 %.
TEST(MemoryPlanTest, ActivationsOfAResNetAreExactAndItsPeakNear) {
  const MemoryPlan plan = plan_of({}, {.measure = true});
  const PlaceMemory& place = plan.places.back();
  EXPECT_EQ(place.predicted.activations, place.measured.activations);
  expect_near(place.predicted.peak, place.measured.peak, 0.02);
  std::int64_t parameters = 0, activations = 0;
  for (const MemoryPlan::Layer& layer : plan.layers) {
    parameters += layer.parameters;
    activations += layer.activations;
  }
  EXPECT_EQ(parameters, plan.parameters);
  EXPECT_NEAR(double(activations), double(*place.predicted.activations), 32);
}

TEST(MemoryPlanTest, ActivationsOfAVggAreExactAndItsPeakNear) {
  const MemoryPlan plan =
      plan_of({"model.name=vgg11", "model.width=0.25", "train.batch_size=16"}, {.measure = true});
  const PlaceMemory& place = plan.places.back();
  EXPECT_EQ(place.predicted.activations, place.measured.activations);
  expect_near(place.predicted.peak, place.measured.peak, 0.02);
}

TEST(MemoryPlanTest, Bfloat16KeepsLessOfActivationsAndCopiesOfWeights) {
  const auto f32 = plan_of({}), bf16 = plan_of({"train.precision=bf16"}, {.measure = true});
  const PlaceMemory& place = bf16.places.back();
  expect_near(place.predicted.activations, place.measured.activations, 0.01);
  EXPECT_LT(*place.predicted.activations, *f32.places.back().predicted.activations);
}

TEST(MemoryPlanTest, AStepInPartsKeepsThoseOfOnePart) {
  const auto whole = plan_of({"train.batch_size=12"});
  const auto parts = plan_of({"train.batch_size=12", "train.accumulate=2"}, {.measure = true});
  const MemoryUse& use = parts.places.back().predicted;
  EXPECT_EQ(use.activations, whole.places.back().predicted.activations);
  EXPECT_EQ(use.batch, whole.places.back().predicted.batch);
  EXPECT_EQ(use.batch, parts.places.back().measured.batch);
  EXPECT_EQ(use.activations, parts.places.back().measured.activations);
  // Where samples may be skipped the whole batch is read at once.
  const auto read_whole =
      plan_of({"train.batch_size=12", "train.accumulate=2", "data.on_error=skip"}, {.measure = true});
  EXPECT_EQ(*read_whole.places.back().predicted.batch, 2 * *use.batch);
  EXPECT_EQ(read_whole.places.back().predicted.batch, read_whole.places.back().measured.batch);
}

TEST(MemoryPlanTest, ReplicasShareTheModelAndKeepTheirPart) {
  const auto plan =
      plan_of({"distributed.model=data_parallel", "distributed.devices=cpu:0/a cpu:0/b"}, {.measure = true});
  ASSERT_EQ(plan.places.size(), 4U);
  const PlaceMemory &shared = plan.places[0], &second = plan.places[2], &all = plan.places[3];
  EXPECT_EQ(shared.predicted.model, plan.parameters + plan.buffers);
  EXPECT_EQ(second.name, "replica 1 on cpu:0/b");
  EXPECT_EQ(second.samples, 12);
  EXPECT_EQ(second.predicted.model, plan.buffers);
  EXPECT_EQ(second.predicted.gradients, plan.parameters);
  for (const PlaceMemory* replica : {&plan.places[1], &plan.places[2]}) {
    expect_near(replica->predicted.activations, replica->measured.activations, 0.02);
  }
  expect_near(all.predicted.activations, all.measured.activations, 0.02);
  EXPECT_EQ(all.predicted.gradients, all.measured.gradients);
  EXPECT_GT(*all.predicted.peak, *all.measured.peak * 9 / 10);
}

TEST(MemoryPlanTest, LayersOnPlacementsOfTheirOwnAreCountedThere) {
  MemoryOptions options{.measure = true};
  options.device_map["layer1"] = base::Placement::parse("cpu:0/a");
  options.device_map["layer4"] = base::Placement::parse("cpu:0/b");
  const auto plan = plan_of({}, options);
  ASSERT_EQ(plan.places.size(), 4U);
  std::int64_t model = 0, activations = 0;
  for (std::size_t i = 0; i < 3; ++i) {
    model += *plan.places[i].predicted.model;
    activations += *plan.places[i].predicted.activations;
  }
  EXPECT_EQ(model, plan.parameters + plan.buffers);
  EXPECT_NEAR(double(activations), double(*plan.places[3].predicted.activations), 32);
  for (std::size_t i = 1; i < 3; ++i) {
    expect_near(plan.places[i].predicted.activations, plan.places[i].measured.activations, 0.02);
    EXPECT_EQ(plan.places[i].predicted.gradients, plan.places[i].measured.gradients) << plan.places[i].name;
  }
}

TEST(MemoryPlanTest, RanksHaveBucketsOrChunksBeside) {
  const auto single = plan_of({"train.batch_size=12"});
  const auto ddp =
      plan_of({"train.batch_size=12", "distributed.gradients=ddp", "distributed.nproc_per_node=2"});
  const auto average = plan_of(
      {"train.global_batch_size=24", "distributed.gradients=average", "distributed.nproc_per_node=2"});
  EXPECT_EQ(ddp.places[0].name, "each of 2 ranks");
  EXPECT_FALSE(ddp.places[0].predicted.averages);
  EXPECT_EQ(average.batch_size, 12);
  EXPECT_EQ(average.places[0].predicted.averages, average.parameters);
  for (const MemoryPlan* plan : {&ddp, &average}) {
    EXPECT_EQ(*plan->places[0].predicted.peak, *single.places[0].predicted.peak + plan->parameters);
  }
}

TEST(MemoryPlanTest, IsPrintedAsATableAndAsJson) {
  const auto plan = plan_of({"model.num_classes=12"});
  const std::string text = to_text(plan);
  EXPECT_NE(text.find("resnet18, plain, gradients none, 1 rank, 24 samples at once; MiB"), std::string::npos)
      << text;
  EXPECT_NE(text.find("layer1.0"), std::string::npos) << text;
  EXPECT_NE(text.find("  activations "), std::string::npos) << text;
  EXPECT_NE(to_json(plan).find("\"activations\": " + std::to_string(*plan.places[0].predicted.activations)),
            std::string::npos);
}

TEST(MemoryPlanTest, AStepThatReportsNoLayersIsOneLine) {
  torch::nn::Linear linear(8, 4);
  const StepMemory step = probe_step(
      *linear, [&](const at::Tensor& input) { return linear->forward(input).square().sum(); },
      [](std::int64_t samples) { return at::zeros({samples, 8}); });
  ASSERT_EQ(step.layers.size(), 1U);
  EXPECT_EQ(step.activations(100), 100 * 4 * 4 + 4);  // what is squared, and the sum
  EXPECT_FALSE(linear->weight.grad().defined());
}

struct Pipelined {
  const char* name;
  const char* schedule;
  std::vector<std::string> overrides = {};
};

// Two stages; interleaved_1f1b has two on each placement. What is handed over is less than a tenth of what a
// stage holds: how much of it is under way at the peak is a matter of who is faster.
std::vector<std::string> pipeline_of(const Pipelined& of) {
  std::vector<std::string> overrides{"distributed.model=pipeline", "model.width=0.25", "train.batch_size=64"};
  overrides.push_back(std::string("distributed.schedule=") + of.schedule);
  const bool interleaved = std::string(of.schedule) == "interleaved_1f1b";
  const auto place = [&](const char* layer, bool second) {
    overrides.push_back(std::string("distributed.device_map.") + layer + (second ? "=cpu:1/a" : "=cpu:0/a"));
  };
  for (const char* layer : {"conv1", "bn1", "layer1.0"}) place(layer, false);
  place("layer1", true);
  for (const char* layer : {"layer2", "layer3"}) place(layer, !interleaved);
  for (const char* layer : {"layer4", "fc"}) place(layer, true);
  overrides.insert(overrides.end(), of.overrides.begin(), of.overrides.end());
  return overrides;
}

// How much too much is planned for stages that hold little: what is under way, in the plan at its most, is a
// larger part. 14.5 % was seen.
constexpr double kSmallStages = 0.25;

// Not much too much, and nothing missing but work space of kernels.
void expect_enough(const std::optional<std::int64_t>& predicted, const std::optional<std::int64_t>& measured,
                   double too_much = 0.1) {
  expect_near(predicted, measured, too_much);
  EXPECT_GE(double(*predicted), 0.98 * double(*measured))
      << *predicted << " predicted, " << *measured << " measured";
}

class PipelinesTest : public testing::TestWithParam<Pipelined> {};

// What is exact wherever the model is cut.
void expect_exact_everywhere(const MemoryPlan& plan, std::size_t num_placements) {
  ASSERT_EQ(plan.places.size(), num_placements + 1);
  std::int64_t model = 0, gradients = 0;
  for (std::size_t i = 0; i < num_placements; ++i) {
    const PlaceMemory& place = plan.places[i];
    SCOPED_TRACE(place.name);
    model += *place.predicted.model;
    gradients += *place.predicted.gradients;
    EXPECT_EQ(place.predicted.gradients, place.measured.gradients);
  }
  EXPECT_EQ(model, plan.parameters + plan.buffers);
  EXPECT_EQ(gradients, plan.parameters);
  const PlaceMemory& all = plan.places.back();
  EXPECT_EQ(all.predicted.model, all.measured.model);
  EXPECT_EQ(all.predicted.batch, all.measured.batch);
  // Of peaks that need not come at the same time.
  EXPECT_GE(*all.predicted.peak, *all.measured.peak);
}

// What a stage's thread asks for, without the model, which would hide an error of it.
void expect_near_everywhere(const MemoryPlan& plan, std::size_t num_placements, double too_much = 0.1) {
  ASSERT_NO_FATAL_FAILURE(expect_exact_everywhere(plan, num_placements));
  for (std::size_t i = 0; i < num_placements; ++i) {
    const PlaceMemory& place = plan.places[i];
    SCOPED_TRACE(place.name);
    expect_enough(place.predicted.activations, place.measured.activations, too_much);
    const std::int64_t made_before = *place.predicted.model + *place.predicted.optimizer;
    expect_enough(*place.predicted.peak - made_before, *place.measured.peak - made_before, too_much);
  }
}

TEST_P(PipelinesTest, EachPlacementsPeakIsNear) {
  expect_near_everywhere(plan_of(pipeline_of(GetParam()), {.measure = true}), 2);
}

INSTANTIATE_TEST_SUITE_P(
    Pipelines, PipelinesTest,
    testing::Values(Pipelined{"fill_drain", "fill_drain"}, Pipelined{"one_f_one_b", "1f1b"},
                    Pipelined{"interleaved", "interleaved_1f1b"}, Pipelined{"zero_bubble", "zb_h1"},
                    Pipelined{"bf16", "1f1b", {"train.precision=bf16", "train.batch_size=32"}},
                    Pipelined{"zero_bubble_bf16", "zb_h1", {"train.precision=bf16", "train.batch_size=32"}},
                    Pipelined{"accumulating", "1f1b", {"train.accumulate=2", "train.batch_size=32"}},
                    Pipelined{"ragged", "fill_drain", {"train.batch_size=27"}}),
    [](const auto& info) { return std::string(info.param.name); });

TEST(MemoryPlanTest, APipelineOverFourPlacementsIsPlannedForEach) {
  std::vector<std::string> overrides = pipeline_of({"", "1f1b"});
  for (const char* moved : {"layer2=cpu:0/b", "layer3=cpu:1/b", "layer4=cpu:1/b", "fc=cpu:1/b"}) {
    overrides.push_back(std::string("distributed.device_map.") + moved);
  }
  expect_near_everywhere(plan_of(overrides, {.measure = true}), 4, kSmallStages);
}

TEST(MemoryPlanTest, APipelineThatIsCutByMeasuringIsPlannedAsItWasCut) {
  // Where it is cut depends on how busy the machine is, and with that how near a small stage's peak is.
  expect_exact_everywhere(
      plan_of({"distributed.model=pipeline", "distributed.schedule=1f1b", "model.width=0.25",
               "distributed.devices=cpu:0/a cpu:1/a", "train.batch_size=64"},
              {.measure = true}),
      2);
}

TEST(MemoryPlanTest, APipelineOfGpusIsPlannedOnTheCpu) {
  std::vector<std::string> on_cores = pipeline_of({"", "1f1b", {"train.batch_size=16"}}), on_gpus = on_cores;
  for (std::string& text : on_gpus) {
    if (text.ends_with("=cpu:0/a")) text.replace(text.find("=cpu"), std::string::npos, "=cuda:0");
    if (text.ends_with("=cpu:1/a")) text.replace(text.find("=cpu"), std::string::npos, "=cuda:1");
  }
  const MemoryPlan cores = plan_of(on_cores), gpus = plan_of(on_gpus);
  EXPECT_EQ(gpus.batch_size, 4);
  ASSERT_EQ(gpus.places.size(), 3U);
  EXPECT_EQ(gpus.places[1].name, "cuda:1");
  EXPECT_EQ(gpus.places[1].predicted.activations, cores.places[1].predicted.activations);
  COHORT_EXPECT_THROW_WITH(plan_of(on_gpus, {.measure = true}), UsageError, "only CPU memory is measured");
}

// A runner "two_copies": the model twice, each with half of the batch; one "as_plain"; and one that does not
// say what it keeps.
void register_runners() {
  static std::once_flag once;
  std::call_once(once, [] {
    parallel::ModelRunnerType type;
    type.make = [](torch::nn::AnyModule, const parallel::ModelRunnerOptions&) {
      return parallel::ModelRunner{};
    };
    type.plan_memory = [](const parallel::PlainMemory& plain, const parallel::ModelRunnerOptions& options) {
      EXPECT_EQ(options.name, "two_copies");
      EXPECT_EQ(options.batch_size, plain.samples);
      const std::int64_t samples = plain.samples / 2;
      parallel::MemoryUse half = plain.use;
      half.batch.reset();
      half.activations = plain.activations(samples);
      half.peak = *plain.use.model + *plain.use.optimizer + plain.peak(samples);
      return std::vector<parallel::PlannedPlace>{{"first", samples, half}, {"second", samples, half}};
    };
    parallel::register_model_runner("two_copies", type);
    type.plan_memory = [](const parallel::PlainMemory& plain, const parallel::ModelRunnerOptions&) {
      return std::vector<parallel::PlannedPlace>{{"cpu", plain.samples, plain.use}};
    };
    parallel::register_model_runner("as_plain", type);
    type.plan_memory = nullptr;
    parallel::register_model_runner("silent", type);
  });
}

TEST(MemoryPlanTest, ARunnerOfAPluginSaysItselfWhatItTakes) {
  register_runners();
  const MemoryPlan plan = plan_of({"distributed.model=two_copies"}), plain = plan_of({});
  const MemoryUse& whole = plain.places.back().predicted;
  ASSERT_EQ(plan.places.size(), 3U);
  EXPECT_EQ(plan.places[0].name, "first");
  EXPECT_EQ(plan.places[0].samples, 12);
  EXPECT_EQ(plan.places[1].predicted.model, whole.model);
  EXPECT_EQ(plan.places[2].name, "all");
  EXPECT_EQ(*plan.places[2].predicted.model, 2 * *whole.model);
  EXPECT_EQ(*plan.places[2].predicted.activations, 2 * *plan.places[0].predicted.activations);
  EXPECT_FALSE(plan.places[2].predicted.batch) << "no place said any";
  COHORT_EXPECT_THROW_WITH(plan_of({"distributed.model=two_copies"}, {.measure = true}), UsageError,
                           "is not measured");
  COHORT_EXPECT_THROW_WITH(plan_of({"distributed.model=two_copys"}), UsageError, "two_copies");
}

// Registers a runner whose plan is one place, on a core of its own, and which is measured as `run` says.
void register_measured(const char* name,
                       const std::function<parallel::MeasuredRun(const parallel::PlainMemory&)>& run,
                       bool says_model = true) {
  parallel::ModelRunnerType type;
  type.make = [](torch::nn::AnyModule, const parallel::ModelRunnerOptions&) {
    return parallel::ModelRunner{};
  };
  type.plan_is_measured = true;
  type.plan_memory = [=](const parallel::PlainMemory& plain, const parallel::ModelRunnerOptions&) {
    parallel::PlannedPlace place{.name = "core",
                                 .samples = plain.samples,
                                 .use = plain.use,
                                 .placement = base::Placement::parse("cpu:0/a")};
    if (!says_model) place.use.model.reset();
    return parallel::RunnerMemory({place}, run(plain));
  };
  parallel::register_model_runner(name, type);
}

parallel::ModelRunner run_as_plain(const torch::nn::AnyModule& model) {
  return parallel::make_model_runner(model, {});
}

TEST(MemoryPlanTest, FunctionsThatARunnerKeepsAreValidWhileItsPlanIsMeasured) {
  bool was_measured = false;
  register_measured("keeps_functions", [&](const parallel::PlainMemory& plain) {
    const std::int64_t activations = plain.activations(8), peak = plain.peak(8), batch = plain.batch_bytes(8);
    parallel::MeasuredRun measured;
    measured.make = [=, &was_measured](const torch::nn::AnyModule& model, const auto& /*after_forward*/) {
      was_measured = true;
      EXPECT_EQ(plain.activations(8), activations);
      EXPECT_EQ(plain.peak(8), peak);
      EXPECT_EQ(plain.batch_bytes(8), batch);
      EXPECT_EQ(plain.part([](const std::string&) { return true; }).model, plain.use.model);
      plain.step(run_as_plain(plain.model), 2);
      EXPECT_TRUE(plain.model.ptr()->parameters().front().grad().defined());
      return run_as_plain(model);
    };
    return measured;
  });
  plan_of({"distributed.model=keeps_functions"}, {.measure = true});
  EXPECT_TRUE(was_measured);
}

TEST(MemoryPlanTest, AMeasuredRunThatDoesNotFitItsPlacesIsRejectedNamingTheRunner) {
  register_measured(
      "adds_nothing",
      [](const parallel::PlainMemory&) { return parallel::MeasuredRun{.adds_model_to_peak = true}; }, false);
  COHORT_EXPECT_THROW_WITH(plan_of({"distributed.model=adds_nothing"}, {.measure = true}), UsageError,
                           "adds_nothing adds the model to measured peaks, and does not say what of model "
                           "and optimizer is on core");
  register_measured("tells_of_others", [](const parallel::PlainMemory&) {
    parallel::MeasuredRun measured;
    measured.make = [](const torch::nn::AnyModule& model, const auto& after_forward) {
      after_forward(0, 0);
      after_forward(1, 0);
      return run_as_plain(model);
    };
    return measured;
  });
  COHORT_EXPECT_THROW_WITH(plan_of({"distributed.model=tells_of_others"}, {.measure = true}), UsageError,
                           "tells_of_others told of a forward on placement 1, and planned 1");
}

// Whatever a step is made of, a runner that does what plain does can say so.
TEST(MemoryPlanTest, ARunnerThatTakesWhatPlainTakesIsPlannedAsPlain) {
  register_runners();
  for (const char* accumulate : {"1", "3"}) {
    for (const char* gradients : {"none", "average", "ddp"}) {
      std::vector<std::string> keys = {base::concat("train.accumulate=", accumulate),
                                       base::concat("distributed.gradients=", gradients), "model.name=lenet5",
                                       "model.width=1", "data.image_size=28"};
      const MemoryUse plain = plan_of(keys).places.back().predicted;
      keys.emplace_back("distributed.model=as_plain");
      const MemoryUse own = plan_of(keys).places.back().predicted;
      SCOPED_TRACE(keys[0] + " " + keys[1]);
      EXPECT_EQ(own.model, plain.model);
      EXPECT_EQ(own.batch, plain.batch);
      EXPECT_EQ(own.averages, plain.averages);
      EXPECT_EQ(own.peak, plain.peak);
      EXPECT_GT(own.peak.value_or(0), own.model.value_or(0));
    }
  }
}

TEST(MemoryPlanTest, ARunnerThatDoesNotSayWhatItKeepsIsPlannedAsPlainAndThePlanSaysSo) {
  register_runners();
  const std::string line = "model runner silent does not say what it keeps; planned as plain";
  const MemoryPlan silent = plan_of({"distributed.model=silent"}), plain = plan_of({});
  EXPECT_EQ(silent.runner, "silent");
  ASSERT_EQ(silent.places.size(), 1U);
  EXPECT_EQ(silent.places[0].predicted.peak, plain.places[0].predicted.peak);
  EXPECT_NE(to_text(silent).find(line + "\n"), std::string::npos) << to_text(silent);
  EXPECT_NE(to_json(silent).find("\"note\": \"" + line + "\""), std::string::npos) << to_json(silent);
  EXPECT_EQ(plain.note, "");
  EXPECT_EQ(to_json(plain).find("note"), std::string::npos);
}

TEST(MemoryPlanTest, RejectsARunnerThatCannotBePlannedBeforeDataIsRead) {
  register_runners();
  const auto without_data = [](const char* runner, const MemoryOptions& options = {}) {
    return plan_of({"data.type=image_folder", "data.path=no_such_folder", runner}, options);
  };
  COHORT_EXPECT_THROW_WITH(without_data("distributed.model=plain"), DataError, "there is no training data");
  COHORT_EXPECT_THROW_WITH(without_data("distributed.model=model_parallel"), UsageError,
                           "[planner.plan_memory] distributed.model is model_parallel, and "
                           "distributed.device_map does not say which layers are where");
  COHORT_EXPECT_THROW_WITH(without_data("distributed.model=two_copies", {.measure = true}), UsageError,
                           "the plan of two_copies is its own, and is not measured");
}

TEST(MemoryPlanTest, RejectsGpusToMeasureBeforeAModelIsMade) {
  const std::string no_model = "model.name=no_such_model";
  for (const std::vector<std::string>& keys : std::vector<std::vector<std::string>>{
           {"distributed.model=pipeline", "distributed.device_map.fc=cuda:0"},
           {"distributed.model=pipeline", "distributed.devices=cuda:0 cuda:1"},
           {"distributed.model=model_parallel", "distributed.device_map.fc=cuda:0"},
           {"distributed.model=data_parallel", "distributed.devices=cuda:0 cuda:1"}}) {
    SCOPED_TRACE(keys[1]);
    std::vector<std::string> overrides = keys;
    overrides.push_back(no_model);
    COHORT_EXPECT_THROW_WITH(plan_of(overrides), UsageError, "no_such_model");
    COHORT_EXPECT_THROW_WITH(plan_of(overrides, {.measure = true}), UsageError,
                             "only CPU memory is measured: got placement cuda:0");
  }
}

TEST(MemoryPlanTest, RejectsWhatItCannotPlan) {
  COHORT_EXPECT_THROW_WITH(plan_of({"distributed.model=model_parallel"}), UsageError,
                           "does not say which layers are where");
  COHORT_EXPECT_THROW_WITH(plan_of({"distributed.model=data_parallel", "distributed.nproc_per_node=2"}),
                           UsageError, "is planned for one process");
  MemoryOptions options{.measure = true};
  options.device_map["layer4"] = base::Placement::parse("cuda:0");
  COHORT_EXPECT_THROW_WITH(plan_of({}, options), UsageError, "only CPU memory is measured");
  options.measure = false;
  COHORT_EXPECT_THROW_WITH(plan_of({"distributed.model=data_parallel"}, options), UsageError,
                           "layers on placements of their own, and data_parallel");
  COHORT_EXPECT_THROW_WITH(plan_of(pipeline_of({"", "1f1b"}), options), UsageError,
                           "layers on placements of their own, and pipeline");
}

}  // namespace
}  // namespace cohort::planner
