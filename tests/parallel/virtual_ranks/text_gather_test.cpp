#include "cohort/parallel/virtual_ranks/text_gather.h"

#include <gtest/gtest.h>

#include "tests/support/ranks.h"

namespace cohort::parallel {
namespace {

TEST(TextGatherTest, AllHaveTheTextsOfAllInTheirOrder) {
  EXPECT_EQ(all_gather_texts(nullptr, "alone"), std::vector<std::string>{"alone"});
  for (int processes = 2; processes <= 4; ++processes) {
    test::run_ranks(processes, "gloo", [&](comm::Group& group) {
      const auto exchange = make_slice_exchange(group);
      const auto text_of = [&](int process) {
        return std::string(static_cast<std::size_t>(process * 7 % 5), static_cast<char>('a' + process));
      };
      std::vector<std::string> expected;
      for (int process = 0; process < processes; ++process) expected.push_back(text_of(process));
      EXPECT_EQ(all_gather_texts(exchange.get(), text_of(group.rank())), expected) << "one is empty";
      EXPECT_EQ(all_gather_texts(exchange.get(), ""), std::vector<std::string>(expected.size())) << "all are";
      // Other transfers may come between the two halves.
      TextGather gather(exchange.get(), text_of(group.rank()));
      EXPECT_EQ(all_gather_texts(exchange.get(), "between").back(), "between");
      gather.send_text();
      EXPECT_EQ(gather.receive(), expected);
    });
  }
}

}  // namespace
}  // namespace cohort::parallel
