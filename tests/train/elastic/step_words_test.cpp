#include "cohort/train/internal/elastic/step_words.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "cohort/base/error.h"
#include "tests/support/throws.h"

namespace cohort::train {
namespace {

StepWords words_of(double loss, double weight, std::int64_t share) {
  MeterSet meters;
  meters.add({{"loss", loss, weight}});
  return {.sums = meters.sums(), .samples = {{share, {share * 10, share * 10 + 1}}}, .requests = {}};
}

TEST(StepWordsTest, WordsOfAllAreTheSameInAnyOrderOfProcesses) {
  // A sum that rounds differently in another order.
  const std::vector<std::string> texts = {words_of(1e16, 3, 0).to_text(), words_of(1, 3, 1).to_text(),
                                          words_of(-1e16, 3, 2).to_text()};
  const StepWords words = StepWords::of_all(texts);
  EXPECT_EQ(words.sums.at("loss").weighted, 3);
  EXPECT_EQ(words.sums.at("loss").weight, 9);
  EXPECT_EQ(words.samples.at(2), (std::vector<std::int64_t>{20, 21}));
  EXPECT_EQ(StepWords::of_all({texts[2], texts[0], texts[1]}).to_text(), words.to_text());
  EXPECT_EQ(StepWords::of_all({words.to_text()}).to_text(), words.to_text());
}

TEST(StepWordsTest, ARequestOfOneProcessIsOneOfAll) {
  StepWords asks = words_of(1, 1, 0);
  asks.requests = {.stop_signal = 15, .save_now = false, .save_due = true};
  const StepWords words = StepWords::of_all({words_of(1, 1, 1).to_text(), asks.to_text()});
  EXPECT_EQ(words.requests.stop_signal, 15);
  EXPECT_FALSE(words.requests.save_now);
  EXPECT_TRUE(words.requests.save_due);
}

TEST(StepWordsTest, WhatIsWrittenIsWhatTheProcessSaysThatWritesIt) {
  StepWords first = words_of(1, 1, 0);
  first.num_listed = 7;
  first.is_opened = true;
  const StepWords words = StepWords::of_all({first.to_text(), words_of(1, 1, 1).to_text()});
  EXPECT_EQ(words.num_listed, 7);
  EXPECT_TRUE(words.is_opened);
}

TEST(StepWordsTest, NumbersThatAreNotFiniteTravelToo) {
  const double infinity = std::numeric_limits<double>::infinity();
  const StepWords words = StepWords::of_all({words_of(infinity, 1, 0).to_text()});
  EXPECT_EQ(words.sums.at("loss").exact().value(), infinity);
  EXPECT_TRUE(
      std::isnan(StepWords::of_all({words_of(infinity, 1, 0).to_text(), words_of(-infinity, 1, 1).to_text()})
                     .sums.at("loss")
                     .exact()
                     .value()));
}

TEST(StepWordsTest, ATextThatCannotBeReadIsAnError) {
  for (const char* text : {"", "{", "{}", R"({"metrics":{},"samples":[[0]],"requests":[0,false,false]})"}) {
    COHORT_EXPECT_THROW_WITH(StepWords::of_all({text}), CommError,
                             "what a process tells of its part of a step cannot be read");
  }
}

}  // namespace
}  // namespace cohort::train
