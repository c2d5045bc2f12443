#include "cohort/net/internal/loop/address_list.h"

#include <gtest/gtest.h>

#include <string>
#include <vector>

namespace cohort::net::node_detail {
namespace {

AddressList list_of(const std::vector<std::string>& names) {
  std::vector<SocketAddress> addresses;
  for (const std::string& name : names) addresses.emplace_back().text = name;
  return AddressList(std::move(addresses));
}

TEST(AddressListTest, AddressesAreTriedInTurn) {
  AddressList list = list_of({"a", "b"});
  EXPECT_EQ(list.current().text, "a");
  EXPECT_EQ(list.current().text, "a") << "nothing has failed";
  list.note_failure(false);
  EXPECT_EQ(list.current().text, "b");
  list.skip();
  EXPECT_EQ(list.current().text, "a");
}

TEST(AddressListTest, AllAreRejectedOnceEachWasInARow) {
  AddressList list = list_of({"a", "b"});
  EXPECT_FALSE(list.all_rejected());
  list.note_failure(true);
  EXPECT_FALSE(list.all_rejected());
  list.note_failure(false);
  list.note_failure(true);
  EXPECT_FALSE(list.all_rejected()) << "b may be there";
  list.note_failure(true);
  EXPECT_TRUE(list.all_rejected());
  EXPECT_FALSE(AddressList().all_rejected()) << "of a peer that this side does not call";
}

TEST(AddressListTest, ALinkForgetsTheRejectionsBeforeItAndItsAddressIsTheNext) {
  AddressList list = list_of({"a", "b"});
  list.note_failure(true);
  list.note_link();
  EXPECT_EQ(list.current().text, "b");
  list.note_failure(true);
  EXPECT_FALSE(list.all_rejected()) << "a may be there by now";
  list.note_failure(true);
  EXPECT_TRUE(list.all_rejected());
}

// A host without IPv6: the other address alone says whether the process is there.
TEST(AddressListTest, AnAddressWithoutASocketIsSkipped) {
  AddressList list = list_of({"a", "b"});
  for (int i = 0; i < 2; ++i) {
    EXPECT_FALSE(list.all_rejected());
    list.skip();
    list.note_failure(true);
  }
  EXPECT_TRUE(list.all_rejected());
}

}  // namespace
}  // namespace cohort::net::node_detail
