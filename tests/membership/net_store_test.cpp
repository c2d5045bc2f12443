#include "cohort/membership/net_store.h"

#include <gtest/gtest.h>

#include <chrono>
#include <future>
#include <memory>
#include <random>
#include <thread>
#include <utility>
#include <vector>

#include "cohort/membership/internal/store_message.h"
#include "cohort/net/node.h"
#include "tests/support/comes_true.h"
#include "tests/support/patience.h"
#include "tests/support/throws.h"

namespace cohort::membership {
namespace {

using test::patience;

struct StoreOfTest {
  NetStoreServer server{{}};
  std::unique_ptr<NetStore> client() {
    return std::make_unique<NetStore>(NetStoreOptions{.address = server.address()});
  }
};

TEST(StoreMessageTest, MessagesAreReadAsTheyWereWritten) {
  const std::string bytes("\0\xff any", 6);
  for (const StoreRequest& request :
       {StoreRequest{StoreRequest::Type::kSet, 3, 0, {bytes}, bytes},
        StoreRequest{StoreRequest::Type::kAdd, 4, -7, {"a"}, ""},
        StoreRequest{StoreRequest::Type::kWait, 5, 0, {"a", bytes}, ""},
        StoreRequest{StoreRequest::Type::kCompareSet, 6, 0, {"a"}, bytes, "b"},
        StoreRequest{StoreRequest::Type::kAppend, 7, 0, {"a"}, bytes},
        StoreRequest{StoreRequest::Type::kCancel, std::uint64_t{1} << 62, 0, {}, ""}}) {
    EXPECT_EQ(parse_store_request(message_of(request)), request);
  }
  const StoreReply reply{StoreReply::Status::kMissing, 9, -1, {"", bytes}};
  EXPECT_EQ(parse_store_reply(message_of(reply)), reply);
}

TEST(StoreMessageTest, WhatIsNoMessageIsRejected) {
  net::Message message = message_of(StoreRequest{StoreRequest::Type::kSet, 3, 0, {"a"}, "b"});
  message.payloads.pop_back();
  COHORT_EXPECT_THROW_WITH(parse_store_request(message), CommError, "has no key and value");
  message = message_of(StoreRequest{StoreRequest::Type::kCompareSet, 3, 0, {"a"}, "b", "c"});
  message.payloads.pop_back();
  COHORT_EXPECT_THROW_WITH(parse_store_request(message), CommError, "has no key and two values");
  message.header = R"({"type":2,"number":1})";
  COHORT_EXPECT_THROW_WITH(parse_store_request(message), CommError, "has no value");
  message.header = R"({"type":9,"number":1,"value":0})";
  COHORT_EXPECT_THROW_WITH(parse_store_request(message), CommError, "type is not");
  message.header = "[";
  COHORT_EXPECT_THROW_WITH(parse_store_reply(message), CommError, "no JSON");
}

TEST(NetStoreTest, WhatOneClientSetsAnotherOneGets) {
  StoreOfTest store;
  const auto a = store.client(), b = store.client();
  const std::string bytes("\0\xff", 2);
  a->set("key", bytes);
  EXPECT_EQ(b->get("key"), bytes);
  EXPECT_FALSE(b->has("other"));
  COHORT_EXPECT_THROW_WITH(b->get("other"), MissingKey, "lacks one of 1 keys: other");
  EXPECT_EQ(a->add("count", 5), 5);
  EXPECT_EQ(b->add("count", -2), 3);
  COHORT_EXPECT_THROW_WITH(b->add("key", 1), UsageError, "cannot be added");
  EXPECT_TRUE(a->has_all({"key", "count"}));
  EXPECT_EQ(a->get_all({"count", "key"}), (std::vector<std::string>{"3", bytes}));
  a->remove("key");
  EXPECT_FALSE(b->has("key"));
}

TEST(NetStoreTest, AValueIsSetWhereTheKeyHasWhatIsExpected) {
  StoreOfTest store;
  const auto a = store.client(), b = store.client();
  EXPECT_EQ(a->compare_set("key", "x", "y"), "x");
  EXPECT_FALSE(a->has("key"));
  std::thread waiter([&] { EXPECT_TRUE(b->wait({"key"}, patience())); });
  EXPECT_EQ(a->compare_set("key", "", "x"), "x");
  waiter.join();
  EXPECT_EQ(b->compare_set("key", "", "y"), "x");
  EXPECT_EQ(b->compare_set("key", "x", "y"), "y");
  EXPECT_EQ(a->get("key"), "y");
  EXPECT_TRUE(a->erase("key"));
  EXPECT_FALSE(a->erase("key"));
}

// The same bytes again are more bytes.
TEST(NetStoreTest, NoneOfManyAppendsIsLost) {
  StoreOfTest store;
  const auto client = store.client();
  constexpr int kThreads = 2, kRounds = 100;
  std::vector<std::thread> threads;
  for (int i = 0; i < kThreads; ++i) {
    threads.emplace_back([&] {
      for (int round = 0; round < kRounds; ++round) client->append("key", "d");
    });
  }
  EXPECT_TRUE(store.client()->wait({"key"}, patience()));
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(client->get("key"), std::string(kThreads * kRounds, 'd'));
}

TEST(NetStoreTest, AWaitEndsWhenTheLastKeyComes) {
  StoreOfTest store;
  const auto a = store.client(), b = store.client();
  EXPECT_FALSE(b->wait({"x", "y"}, base::Deadline(std::chrono::milliseconds(1))));
  std::thread waiter([&] { EXPECT_TRUE(b->wait({"x", "y"}, patience())); });
  a->set("y", "");
  a->add("x", 1);
  waiter.join();
  EXPECT_TRUE(a->wait({"x"}, patience()));
}

TEST(NetStoreTest, ARequestEndsAtItsDeadline) {
  StoreOfTest store;
  const auto client = store.client();
  const base::Deadline deadline(std::chrono::milliseconds(1));
  NetStore soon = client->until(deadline);
  EXPECT_FALSE(soon.wait({"key"}, patience()));
  COHORT_EXPECT_THROW_WITH(soon.set("key", ""), TimeoutError, "timed out before the store at");
  EXPECT_FALSE(client->has("key"));
  client->until(patience()).set("key", "");
  EXPECT_TRUE(client->has("key"));
  soon.close();
  COHORT_EXPECT_THROW_WITH(client->has("key"), CommError, "was closed");
}

// Somebody may still finish its step there.
TEST(NetStoreTest, KeysOfTheGenerationBeforeTheNewestStay) {
  StoreOfTest store;
  const auto a = store.client(), b = store.client();
  a->set("generation/6/address/0", "old");
  a->set("generation/7/address/0", "new");
  std::thread waiter([&] { EXPECT_TRUE(b->wait({"generation/6/address/1"}, patience())); });
  a->set("generation/6/address/1", "late");
  waiter.join();
  EXPECT_EQ(a->get("generation/6/address/0"), "old");
  EXPECT_FALSE(a->has("generation/8/address/0"));
  COHORT_EXPECT_THROW_WITH(a->get("generation/6/address/0"), StaleGeneration, "generation/6/address/0");
  EXPECT_EQ(a->get("generation/7/address/0"), "new");
}

TEST(NetStoreTest, KeysOfGenerationsBeforeThatAreDropped) {
  StoreOfTest store;
  const auto a = store.client(), b = store.client();
  a->set("generation/6/address/0", "old");
  a->set("stays", "");
  std::thread waiter([&] {
    COHORT_EXPECT_THROW_WITH(b->wait({"generation/6/address/1"}, patience()), StaleGeneration,
                             "of a generation that has ended");
  });
  a->set("generation/10/address/0", "new");
  waiter.join();
  EXPECT_EQ(store.server.num_keys(), 2U);
  EXPECT_TRUE(a->has("stays"));
  COHORT_EXPECT_THROW_WITH(b->set("generation/6/address/1", ""), StaleGeneration, "generation/6/address/1");
  EXPECT_EQ(store.server.num_keys(), 2U);
  EXPECT_EQ(b->get("generation/10/address/0"), "new");
}

TEST(NetStoreTest, TheStoresEndEndsCalls) {
  auto server = std::make_unique<NetStoreServer>(NetStoreServerOptions{});
  NetStore client({.address = server->address()});
  client.set("key", "");
  std::thread waiter([&] { COHORT_EXPECT_THROW_WITH(client.wait({"x"}, patience()), CommError, "is gone"); });
  server.reset();
  waiter.join();
  EXPECT_TRUE(client.is_down());
  COHORT_EXPECT_THROW_WITH(client.has("key"), CommError, "is gone");
}

// Holds its node's thread, as a busy host does.
struct HeldServer : net::Handler {
  void on_message(const std::shared_ptr<net::Peer>&, net::Message) override { may_continue.wait(); }
  std::promise<void> release;
  std::shared_future<void> may_continue = release.get_future().share();
};

TEST(NetStoreTest, AStoreThatIsSilentIsGivenUpAfterTheClientsSilence) {
  const auto held = std::make_shared<HeldServer>();
  net::NodeOptions held_node;
  held_node.name = "a held server";
  net::Node node(held_node, held);
  NetStoreOptions options{.address = node.listen("127.0.0.1:0"), .silence = std::chrono::milliseconds(500)};
  NetStore impatient(options);
  options.silence = std::chrono::seconds(60);
  NetStore patient(options);
  const base::Deadline less_than_the_default(std::chrono::milliseconds(1'500));
  COHORT_EXPECT_THROW_WITH(impatient.set("key", ""), CommError, "the store is gone");
  EXPECT_FALSE(less_than_the_default.expired());
  EXPECT_FALSE(patient.is_down());
  held->release.set_value();
}

TEST(NetStoreTest, CloseEndsAWait) {
  StoreOfTest store;
  const auto a = store.client();
  std::thread waiter([&] { COHORT_EXPECT_THROW_WITH(a->wait({"x"}, patience()), CommError, "was closed"); });
  a->close();
  waiter.join();
}

TEST(NetStoreTest, OnlyWhoHasTheSecretUsesIt) {
  const base::Secret secret = base::Secret::make();
  NetStoreServer server({.secret = secret});
  NetStore friendly({.address = server.address(), .secret = secret});
  friendly.set("key", "");
  COHORT_EXPECT_THROW_WITH(NetStore({.address = server.address(),
                                     .secret = base::Secret::make(),
                                     .timeout = std::chrono::milliseconds(300)}),
                           Error, "");
}

// Many clients at once: no key is lost, and each wait ends.
TEST(NetStoreTest, ManyClientsMeet) {
  StoreOfTest store;
  constexpr int kClients = 8, kRounds = 20;
  std::vector<std::thread> threads;
  for (int self = 0; self < kClients; ++self) {
    threads.emplace_back([&, self] {
      const auto client = store.client();
      for (int round = 1; round <= kRounds; ++round) {
        const auto key = [&](int who) { return base::concat("generation/", round, "/address/", who); };
        std::vector<std::string> keys;
        for (int who = 0; who < kClients; ++who) keys.push_back(key(who));
        client->set(key(self), std::to_string(self * round));
        ASSERT_TRUE(client->wait(keys, patience()));
        const std::vector<std::string> values = client->get_all(keys);
        for (int who = 0; who < kClients; ++who) {
          EXPECT_EQ(values[static_cast<std::size_t>(who)], std::to_string(who * round));
        }
        ASSERT_GT(client->add("arrived", 1), 0);
        ASSERT_TRUE(test::comes_true([&] { return client->add("arrived", 0) >= kClients * round; }));
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(store.server.num_keys(), 2U * kClients + 1U) << "those of the last two rounds";
}

}  // namespace
}  // namespace cohort::membership
