#include <ATen/ops/ones.h>
#include <gtest/gtest.h>
#include <torch/nn/modules/activation.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/linear.h>

#include <map>
#include <nlohmann/json.hpp>
#include <string>
#include <thread>
#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <vector>

#include "cohort/base/threads/serial_queue.h"
#include "cohort/bench/profile.h"
#include "cohort/parallel/reducer.h"
#include "cohort/pipeline/pipeline.h"
#include "cohort/pipeline/synthetic.h"

namespace cohort::bench {
namespace {

using namespace std::chrono_literals;

constexpr double kClocks = 1000;  // us by which the timeline's clock and LibTorch's may differ

struct Span {
  double begin, end;
  bool within(const Span& other) const {
    return begin >= other.begin - kClocks && end <= other.end + kClocks;
  }
};

/// The spans of a trace, by the name of their row and their own.
std::map<std::string, std::map<std::string, std::vector<Span>>> spans_of(const Profile& profile) {
  const nlohmann::json trace = nlohmann::json::parse(profile.trace());
  std::map<std::int64_t, std::string> rows;
  for (const auto& event : trace.at("traceEvents")) {
    if (event.at("ph") == "M" && event.at("name") == "thread_name") {
      rows[event.at("tid")] = event.at("args").at("name");
    }
  }
  std::map<std::string, std::map<std::string, std::vector<Span>>> spans;
  for (const auto& event : trace.at("traceEvents")) {
    if (event.at("ph") != "X") continue;
    const double begin = event.at("ts");
    spans[rows[event.at("tid")]][event.at("name")].push_back({begin, begin + event.at("dur").get<double>()});
  }
  return spans;
}

TEST(PlacementsTraceTest, OperatorsOfAThreadThatWasThereBeforeLieWithinItsWork) {
  base::SerialQueue thread({.name = "worker"});
  const at::Tensor x = at::ones({64});
  const auto work = [&] {
    const auto sleep_and_work = [&] {
      std::this_thread::sleep_for(5ms);
      x.neg();
      std::this_thread::sleep_for(5ms);
    };
    thread.submit("work", sleep_and_work).get(base::Deadline(30s));
  };
  work();
  auto spans = spans_of(profile(work, ProfileOptions().warm_up(0).steps(3)));
  const auto& operators = spans.at("operators of worker").at("aten::neg");
  ASSERT_EQ(operators.size(), 3u);
  for (std::size_t step = 0; step < 3; ++step) {
    const Span& scope = spans.at("worker").at("work").at(step);
    EXPECT_TRUE(operators[step].within({scope.begin + 5000, scope.end - 5000}));
  }
}

TEST(PlacementsTraceTest, OperatorsOfAPipelineLieWithinItsActionsOnTheirPlacements) {
  const auto placements = base::parse_placements("cpu:0/first,cpu:0/second");
  const pipeline::SleepingLayer sleep(pipeline::SleepTimes{3ms, 3ms, 3ms});
  std::vector<pipeline::Stage> stages;
  for (int i = 0; i < 2; ++i) {
    // Its tanh is far from the begin and the end of its actions, forward and backward.
    stages.emplace_back(torch::nn::Sequential(torch::nn::Linear(16, 16), sleep, torch::nn::Tanh(), sleep));
  }
  pipeline::PipelineOptions options;
  options.placements = placements;
  options.num_micro_batches = 2;
  pipeline::Pipeline pipe(stages, options);
  const at::Tensor input = at::ones({8, 16}), target = at::ones({8, 16});
  const auto loss = [](const at::Tensor& output, const at::Tensor& wanted) {
    return (output - wanted).square().mean();
  };
  auto spans = spans_of(profile([&] { pipe.step(input, target, loss); }, ProfileOptions().warm_up(1)));
  for (int stage = 0; stage < 2; ++stage) {
    const std::string& name_of_placement = placements[static_cast<std::size_t>(stage)].name;
    SCOPED_TRACE(name_of_placement);
    auto& actions = spans[name_of_placement];
    auto& operators = spans["operators of " + name_of_placement];
    for (const auto& [name, kind] : {std::pair("aten::tanh", "F"), std::pair("TanhBackward0", "B")}) {
      std::vector<Span> all = operators[name];
      for (const char* micro_batch : {".0", ".1"}) {
        const auto& action = actions[kind + std::to_string(stage) + micro_batch];
        ASSERT_EQ(action.size(), 1u) << name;
        EXPECT_GE(std::erase_if(all, [&](const Span& span) { return span.within(action.front()); }), 1u)
            << name;
      }
      EXPECT_TRUE(all.empty()) << name << " beside the actions of its stage";
    }
  }
}

TEST(PlacementsTraceTest, BucketsOfAReducerStandBesideTheOperatorsOfBackward) {
  const comm::Group group = comm::make_group(c10::make_intrusive<c10d::HashStore>(), 0, 2, "fake", 1min,
                                             "127.0.0.1", comm::ConsistencyCheck::kOff);
  std::vector<parallel::NamedParameter> parameters;
  for (const char* name : {"a", "b"}) parameters.push_back({name, at::ones({1000}).requires_grad_()});
  parallel::Reducer reducer(group, parameters, {.first_bucket_bytes = 1, .bucket_cap_bytes = 1});
  const Profile seen = profile([&] {
    for (auto& parameter : parameters) parameter.tensor.mutable_grad() = at::Tensor();
    reducer.prepare();
    (parameters[0].tensor * parameters[1].tensor).sum().backward();
    reducer.finish();
  });
  std::vector<Span> buckets, nodes, steps;
  for (const auto& [row, names] : spans_of(seen)) {
    for (const auto& [name, spans] : names) {
      if (name == "all_reduce") buckets.insert(buckets.end(), spans.begin(), spans.end());
      if (name == "MulBackward0") nodes.insert(nodes.end(), spans.begin(), spans.end());
      if (name == "step") steps.insert(steps.end(), spans.begin(), spans.end());
    }
  }
  ASSERT_EQ(steps.size(), 1u) << seen.trace();
  ASSERT_EQ(nodes.size(), 1u);
  ASSERT_EQ(buckets.size(), 2u) << seen.trace();
  for (const Span& bucket : buckets) {
    EXPECT_TRUE(bucket.within(steps.front()));
    EXPECT_GE(bucket.begin, nodes.front().begin - kClocks);
  }
}

}  // namespace
}  // namespace cohort::bench
