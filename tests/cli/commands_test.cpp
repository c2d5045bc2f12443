#include "cohort/cli/internal/commands.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <string>
#include <vector>

namespace cohort::cli {
namespace {

using Words = std::vector<std::string>;

TEST(CommandsTest, ARepeatableOptionTakesOneValueEachTime) {
  for (const Words& given : {Words{"a=1"}, Words{"a=1", "b=2"}, Words{"a=1", "b=2", "a=3"}}) {
    CLI::App app;
    Words values, images;
    repeatable(app.add_option("--set", values, "Changes one setting"), "KEY=VALUE");
    app.add_option("images", images)->required();
    Words words;
    for (const std::string& value : given) words.insert(words.end(), {"--set", value});
    words.insert(words.end(), {"one.png", "two.png"});
    std::reverse(words.begin(), words.end());  // as CLI11 takes them
    app.parse(words);
    EXPECT_EQ(values, given);
    EXPECT_EQ(images, (Words{"one.png", "two.png"}));
    const std::string help = app.help();
    EXPECT_NE(help.find("--set KEY=VALUE  "), std::string::npos) << help;  // without the " ..." of a list
    EXPECT_NE(help.find("Changes one setting; may be given several times"), std::string::npos) << help;
  }
}

}  // namespace
}  // namespace cohort::cli
