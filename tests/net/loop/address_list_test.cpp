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
  list.note_failure(Outcome::kOther);
  EXPECT_EQ(list.current().text, "b");
  list.note_failure(Outcome::kNoWay);
  EXPECT_EQ(list.current().text, "a");
}

TEST(AddressListTest, BeforeALinkEachAddressIsToBeRejected) {
  AddressList list = list_of({"a", "b"});
  EXPECT_FALSE(list.is_rejected());
  list.note_failure(Outcome::kRejected);
  EXPECT_FALSE(list.is_rejected());
  for (int i = 0; i < 3; ++i) {  // no descriptor is left whenever b is tried
    list.note_failure(Outcome::kOther);
    list.note_failure(Outcome::kRejected);
    EXPECT_FALSE(list.is_rejected()) << "b may be there";
  }
  list.note_failure(Outcome::kRejected);
  EXPECT_TRUE(list.is_rejected());
  EXPECT_FALSE(AddressList().is_rejected()) << "of a peer that this side does not call";
}

// A host without IPv6: the other address alone says whether the process is there.
TEST(AddressListTest, AnAddressWithoutAWayDoesNotCount) {
  AddressList list = list_of({"a", "b"});
  list.note_failure(Outcome::kNoWay);
  EXPECT_FALSE(list.is_rejected());
  list.note_failure(Outcome::kRejected);
  EXPECT_TRUE(list.is_rejected());
  AddressList unreachable = list_of({"a"});
  unreachable.note_failure(Outcome::kNoWay);
  EXPECT_FALSE(unreachable.is_rejected()) << "nobody has said anything";
}

TEST(AddressListTest, AfterALinkItsAddressAlone) {
  AddressList list = list_of({"a", "b"});
  list.note_failure(Outcome::kRejected);
  list.note_link();
  EXPECT_EQ(list.current().text, "b");
  list.note_failure(Outcome::kOther);
  list.note_failure(Outcome::kRejected);
  EXPECT_FALSE(list.is_rejected()) << "it listens at b";
  list.note_failure(Outcome::kRejected);
  EXPECT_TRUE(list.is_rejected());
  list.note_link();
  EXPECT_FALSE(list.is_rejected());
}

TEST(AddressListTest, OnlySilenceSaysThatNobodyMayBeThere) {
  AddressList list = list_of({"a", "b", "c"});
  EXPECT_TRUE(list.has_no_answer()) << "no try has ended";
  list.note_failure(Outcome::kRejected);
  list.note_failure(Outcome::kNoAnswer);
  EXPECT_TRUE(list.has_no_answer());
  EXPECT_FALSE(list.is_rejected());
  list.note_failure(Outcome::kOther);
  EXPECT_FALSE(list.has_no_answer()) << "no descriptor was left, or the process has closed the connection";
  list.note_failure(Outcome::kRejected);
  EXPECT_FALSE(list.has_no_answer());
}

TEST(AddressListTest, WhereThisHostHasNoWayNobodyWasAsked) {
  AddressList list = list_of({"a", "b"});
  list.note_failure(Outcome::kNoWay);
  EXPECT_TRUE(list.has_no_answer()) << "the try of b is under way";
  list.note_failure(Outcome::kNoWay);
  EXPECT_FALSE(list.has_no_answer());
}

TEST(AddressListTest, WhatAnErrnoSays) {
  SocketAddress v4, v6, local;
  v4.storage.ss_family = AF_INET;
  v6.storage.ss_family = AF_INET6;
  EXPECT_EQ(outcome_of(ECONNREFUSED, v4), Outcome::kRejected);
  for (const int error : {EAFNOSUPPORT, EADDRNOTAVAIL, ENETUNREACH}) {
    EXPECT_EQ(outcome_of(error, v6), Outcome::kNoWay);
    EXPECT_NE(outcome_of(error, v4), Outcome::kRejected) << "a network that is down for a while";
    EXPECT_NE(outcome_of(error, v4), Outcome::kNoWay);
  }
  local.storage.ss_family = AF_UNIX;
  for (const int error : {ETIMEDOUT, EHOSTUNREACH, EHOSTDOWN}) {
    EXPECT_EQ(outcome_of(error, v4), Outcome::kNoAnswer);
    EXPECT_EQ(outcome_of(error, local), Outcome::kOther) << "it was connected, so a process has it";
  }
  for (const int error : {0, EMFILE, ENFILE, ENOMEM, EADDRNOTAVAIL, ECONNRESET, ENETUNREACH, ENETDOWN})
    EXPECT_EQ(outcome_of(error, v4), Outcome::kOther) << "this host's network, or the other side";
}

}  // namespace
}  // namespace cohort::net::node_detail
