#include "cohort/base/text/layer_entry.h"

#include <gtest/gtest.h>

namespace cohort::base {
namespace {

TEST(LayerEntryTest, TheLongestNameThatCoversALayerIsItsEntry) {
  const std::map<std::string, int> places = {{"layer4", 1}, {"layer4.0", 2}, {"fc", 3}};
  EXPECT_EQ(entry_of_layer(places, "layer4.0.conv1")->second, 2);
  EXPECT_EQ(entry_of_layer(places, "layer4.1")->second, 1);
  EXPECT_EQ(entry_of_layer(places, "fc")->second, 3);
  EXPECT_EQ(entry_of_layer(places, "layer41"), nullptr);
  EXPECT_EQ(entry_of_layer(places, ""), nullptr);
}

}  // namespace
}  // namespace cohort::base
