// What ranks compare before they train together: each option of TrainerOptions, or a reason why not.
#include "cohort/train/internal/fit/compatibility.h"

#include <gtest/gtest.h>

#include <functional>
#include <map>
#include <regex>

#include "tests/support/source_dir.h"
#include "tests/support/temp_dir.h"

namespace cohort::train {
namespace {

/// Another value of each option than its default.
const std::map<std::string, std::function<void(TrainerOptions&)>> kOther = {
    {"epochs", [](auto& o) { o.epochs(2); }},
    {"max_steps", [](auto& o) { o.max_steps(2); }},
    {"max_eval_batches", [](auto& o) { o.max_eval_batches(2); }},
    {"seed", [](auto& o) { o.seed(2); }},
    {"gradient_sync", [](auto& o) { o.gradient_sync(std::make_shared<parallel::GradientSync>()); }},
    {"session", [](auto&) {}},
    {"common", [](auto& o) { o.common("text"); }},
    {"run_dir", [](auto& o) { o.run_dir("run"); }},
    {"resume", [](auto& o) { o.resume("auto"); }},
    {"keep_optimizer_options", [](auto& o) { o.keep_optimizer_options(true); }},
    {"keep_best", [](auto& o) { o.keep_best(false); }},
    {"description", [](auto& o) { o.description("text"); }},
    {"save_every", [](auto& o) { o.save_every(2); }},
    {"save_every_steps", [](auto& o) { o.save_every_steps(2); }},
    {"save_every_minutes", [](auto& o) { o.save_every_minutes(2); }},
    {"keep", [](auto& o) { o.keep(2); }},
    {"checkpoint_format", [](auto& o) { o.checkpoint_format("other"); }},
    {"best_metric", [](auto& o) { o.best_metric("val_loss"); }},
    {"best_is_highest", [](auto& o) { o.best_is_highest(false); }},
    {"eval_every", [](auto& o) { o.eval_every(2); }},
    {"check_eval_batches", [](auto& o) { o.check_eval_batches(2); }},
    {"log_every", [](auto& o) { o.log_every(2); }},
    {"trace_steps", [](auto& o) { o.trace_steps(2); }},
    {"stop_on_non_finite", [](auto& o) { o.stop_on_non_finite(false); }},
    {"handle_signals", [](auto& o) { o.handle_signals(true); }},
};

TEST(CompatibilityTest, EachOptionOfATrainerIsComparedBetweenRanksOrSaidNotToBe) {
  const std::string header = test::read_file(test::source_dir() / "cohort/train/trainer_options.h");
  const std::regex option(R"(TORCH_ARG\(.*, (\w+)\))");
  std::vector<std::string> declared, compared;
  for (std::sregex_iterator found(header.begin(), header.end(), option), end; found != end; ++found) {
    declared.push_back(found->str(1));
  }
  for (const ComparedOption& each : compared_options()) compared.emplace_back(each.name);
  EXPECT_FALSE(declared.empty());
  EXPECT_EQ(compared, declared) << "a new option belongs in compared_options() too";
}

TEST(CompatibilityTest, AnotherValueOfAnOptionThatIsComparedIsSeen) {
  for (const ComparedOption& each : compared_options()) {
    ASSERT_TRUE(kOther.contains(each.name)) << each.name;
    TrainerOptions changed;
    kOther.at(each.name)(changed);
    std::string seen;
    for (const ComparedOption& other : compared_options()) {
      if (other.text != nullptr && other.text(changed) != other.text(TrainerOptions())) seen += other.name;
    }
    EXPECT_EQ(seen, each.text == nullptr ? "" : each.name);
  }
}

}  // namespace
}  // namespace cohort::train
