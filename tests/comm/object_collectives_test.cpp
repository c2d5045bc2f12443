#include "cohort/comm/object_collectives.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <nlohmann/json.hpp>

#include "cohort/base/error.h"
#include "cohort/comm/text_collectives.h"
#include "tests/support/ranks.h"
#include "tests/support/throws.h"

namespace cohort::comm {
namespace {

using nlohmann::json;
using test::run_ranks;

TEST(ObjectCollectivesTest, AnObjectArrivesWithEveryBitAndByte) {
  const json object = {{"loss", 0.1 + 0.2},
                       {"bad", std::nan("")},
                       {"far", -std::numeric_limits<double>::infinity()},
                       {"path", std::string("/tmp/\xff\xfe\0x", 9)},
                       {"none", nullptr},
                       {"numbers", {1, -2, std::uint64_t{1} << 63}}};
  run_ranks(3, "gloo", [&](Group& group) {
    for (const int root : {0, 2}) {
      const json got = broadcast_object(group, group.rank() == root ? object : json(), root);
      EXPECT_EQ(got.at("loss").get<double>(), 0.1 + 0.2);
      EXPECT_TRUE(std::isnan(got.at("bad").get<double>()));
      EXPECT_EQ(got.at("far"), object.at("far"));
      EXPECT_EQ(got.at("path"), object.at("path"));
      EXPECT_TRUE(got.at("none").is_null());
      EXPECT_EQ(got.at("numbers"), object.at("numbers"));
    }
    const std::vector<json> all = all_gather_object(group, {{"rank", group.rank()}});
    ASSERT_EQ(all.size(), 3u);
    for (int rank = 0; rank < 3; ++rank) EXPECT_EQ(all[static_cast<std::size_t>(rank)].at("rank"), rank);
  });
}

TEST(ObjectCollectivesTest, AFailureOfRank0IsOneOfAllRanksAtOnce) {
  run_ranks(2, "gloo", [](Group& group) {
    EXPECT_EQ(run_on_rank0_and_broadcast(group, [&] { return json(group.rank() + 40); }), 40);
    const auto fails = [&](const auto& error) {
      return run_on_rank0_and_broadcast(group, [&]() -> json { throw error; });
    };
    if (group.rank() == 0) {
      COHORT_EXPECT_THROW_WITH(fails(DataError("a.b", "no file")), DataError, "[a.b] no file");
      COHORT_EXPECT_THROW_WITH(fails(SystemError("a.b", "disk full")), SystemError, "disk full");
    } else {
      COHORT_EXPECT_THROW_WITH(fails(DataError("a.b", "no file")), UsageError,
                               "rank 0 failed: [a.b] no file");
      COHORT_EXPECT_THROW_WITH(fails(SystemError("a.b", "disk full")), PeerError,
                               "rank 0 failed: [a.b] disk");
    }
  });
}

TEST(ObjectCollectivesTest, BytesThatAreNoObjectAreAnError) {
  run_ranks(2, "gloo", [](Group& group) {
    if (group.rank() == 0) {
      broadcast_text(group, "\xff\xff");
    } else {
      COHORT_EXPECT_THROW_WITH(broadcast_object(group, {}), CommError, "what rank 0 sent is no object");
    }
  });
}

}  // namespace
}  // namespace cohort::comm
