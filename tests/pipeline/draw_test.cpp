#include "cohort/pipeline/draw.h"

#include <gtest/gtest.h>

namespace cohort::pipeline {
namespace {

std::size_t count(const std::string& text, const std::string& part) {
  std::size_t found = 0;
  for (std::size_t at = text.find(part); at != std::string::npos; at = text.find(part, at + 1)) ++found;
  return found;
}

TEST(DrawTest, HasABoxForEachComputationOfEachBand) {
  const Plan plan = make_plan({Schedule::kZeroBubble, 2, 0, 3});
  const Simulation simulation = simulate(plan);
  const std::string one_band = draw_svg({{"plan", simulation.actions, ""}}, 2, 2);
  EXPECT_EQ(count(one_band, "<title>"), 2u * 3u * 3u);
  EXPECT_EQ(count(one_band, "<title>W1.2 "), 1u);
  const std::string two_bands =
      draw_svg({{"plan", simulation.actions, ""}, {"a < b", simulation.actions, " ms"}}, 2, 2);
  EXPECT_EQ(count(two_bands, "<title>"), 2u * 2u * 3u * 3u);
  EXPECT_NE(two_bands.find("a &lt; b"), std::string::npos);
  EXPECT_NE(two_bands.find(" ms</title>"), std::string::npos);
  EXPECT_EQ(count(two_bands, "<svg"), count(two_bands, "</svg>"));
}

TEST(DrawTest, NothingStandsOutsideOfTheDrawing) {
  const std::string svg = draw_svg({{"nothing", {{}, {}}, ""}}, 2, 2);
  EXPECT_EQ(svg.find("nan"), std::string::npos);
  EXPECT_EQ(svg.find("inf"), std::string::npos);
}

}  // namespace
}  // namespace cohort::pipeline
