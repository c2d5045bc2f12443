#include "cohort/elastic/internal/generation_store.h"

#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <exception>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "cohort/comm/internal/deadline_store.h"
#include "cohort/elastic/internal/store_client.h"
#include "cohort/elastic/session.h"
#include "tests/support/throws.h"

namespace cohort::elastic {
namespace {

using Bytes = std::vector<std::uint8_t>;
using std::chrono::milliseconds;

/// A generation that ends as the test says.
struct EndOfTest : comm::GroupOwner {
  std::exception_ptr end() const override { return error; }
  std::exception_ptr wait_for_end() const override {
    ++num_waits;
    return error;
  }
  std::exception_ptr error;
  mutable std::atomic<int> num_waits{0};
};

struct StoreOfGeneration {
  membership::NetStoreServer server{{}};
  std::shared_ptr<membership::NetStore> client =
      std::make_shared<membership::NetStore>(membership::NetStoreOptions{.address = server.address()});
  std::shared_ptr<EndOfTest> owner = std::make_shared<EndOfTest>();

  c10::intrusive_ptr<c10d::Store> at(std::uint64_t generation, milliseconds timeout = milliseconds(20'000)) {
    return c10::make_intrusive<GenerationStore>([this] { return client; }, owner,
                                                base::concat("generation/", generation, "/"), timeout);
  }
};

TEST(GenerationStoreTest, ItDoesWhatBackendsAskOfAStore) {
  StoreOfGeneration of_test;
  const auto store = of_test.at(7), clone = store->clone();
  EXPECT_EQ(clone->getTimeout(), store->getTimeout());
  const Bytes bytes{0, 255, 'x'};
  store->set("bytes", bytes);
  EXPECT_EQ(clone->get("bytes"), bytes);
  EXPECT_EQ(of_test.client->get("generation/7/bytes"), std::string("\0\xffx", 3));
  EXPECT_TRUE(store->check({"bytes"}));
  EXPECT_FALSE(store->check({"bytes", "other"}));
  EXPECT_EQ(store->add("count", 5), 5);
  EXPECT_EQ(clone->add("count", -2), 3);
  EXPECT_EQ(store->compareSet("word", "a", "b"), "a") << "it is not there";
  EXPECT_FALSE(store->check({"word"}));
  EXPECT_EQ(store->compareSet("word", "", "a"), "a");
  EXPECT_EQ(clone->compareSet("word", "b", "c"), "a");
  EXPECT_EQ(clone->compareSet("word", "a", "b"), "b");
  EXPECT_EQ(store->get_to_str("word"), "b");
  store->append("word", Bytes{'c'});
  store->append("new", Bytes{'d'});
  clone->append("new", Bytes{'d'});
  EXPECT_TRUE(store->hasExtendedApi());
  EXPECT_EQ(store->multiGet({"new", "word"}), (std::vector<Bytes>{{'d', 'd'}, {'b', 'c'}}));
  store->multiSet({"x", "y"}, {{1}, {2}});
  EXPECT_EQ(store->get("y"), Bytes{2});
  EXPECT_TRUE(store->deleteKey("x"));
  EXPECT_FALSE(store->deleteKey("x"));
  COHORT_EXPECT_THROW_WITH(store->getNumKeys(), c10::NotImplementedError, "does not count its keys");
}

TEST(GenerationStoreTest, AWaitEndsWithTheKeyAndAtItsTimeout) {
  StoreOfGeneration of_test;
  const auto store = of_test.at(7), impatient = of_test.at(7, milliseconds(1));
  COHORT_EXPECT_THROW_WITH(impatient->get("key"), TimeoutError, "waited 1 ms for the keys key");
  COHORT_EXPECT_THROW_WITH(store->wait({"a", "key"}, milliseconds(1)), TimeoutError, "keys a, key");
  impatient->setTimeout(milliseconds(2));
  COHORT_EXPECT_THROW_WITH(impatient->wait({"key"}), TimeoutError, "waited 2 ms");
  std::thread waiter([&] { EXPECT_EQ(store->get_to_str("key"), "value"); });
  of_test.at(7)->compareSet("key", "", "value");
  waiter.join();
}

TEST(GenerationStoreTest, ATimeoutOfZeroIsNone) {
  StoreOfGeneration of_test;
  const auto store = of_test.at(7, c10d::Store::kNoTimeout);
  std::thread waiter([&] {
    EXPECT_NO_THROW(store->wait({"key"}));
    EXPECT_NO_THROW(store->wait({"key"}, milliseconds(0)));
  });
  store->set("key", Bytes{1});
  waiter.join();
}

// comm's calls have deadlines of their own, which are sooner than the store's timeout.
TEST(GenerationStoreTest, RequestsEndAtTheDeadlineOfTheCallThatMakesThem) {
  StoreOfGeneration of_test;
  const auto store = of_test.at(7);
  {
    const comm::StoreDeadline until(base::Deadline(milliseconds(2)));
    COHORT_EXPECT_THROW_WITH(store->wait({"never"}), TimeoutError, " ms for the keys never");
    COHORT_EXPECT_THROW_WITH(store->wait({"never"}, milliseconds(0)), TimeoutError, "the keys never");
    COHORT_EXPECT_THROW_WITH(store->set("key", Bytes{1}), TimeoutError, "before the store at");
  }
  EXPECT_FALSE(store->check({"key"}));
}

TEST(GenerationStoreTest, KeysGoWithTheirGeneration) {
  StoreOfGeneration of_test;
  const auto before = of_test.at(7), after = of_test.at(9);
  before->set("key", Bytes{1});
  std::thread waiter([&] {
    COHORT_EXPECT_THROW_WITH(before->wait({"never"}), GenerationEnded, "of a generation that has ended");
  });
  EXPECT_FALSE(after->check({"key"}));
  waiter.join();
  EXPECT_EQ(of_test.server.num_keys(), 0U);
  COHORT_EXPECT_THROW_WITH(before->set("key", Bytes{1}), GenerationEnded, "of a generation that has ended");
}

// The owner may take seconds to say whether its generation has ended.
TEST(GenerationStoreTest, AWrongCallAsksForNoNewsOfTheEnd) {
  StoreOfGeneration of_test;
  const auto store = of_test.at(7);
  store->set("key", Bytes{'x'});
  COHORT_EXPECT_THROW_WITH(store->add("key", 1), UsageError, "cannot be added");
  COHORT_EXPECT_THROW_WITH(store->multiSet({"key"}, {}), UsageError, "1 keys and 0 values");
  EXPECT_EQ(of_test.owner->num_waits, 0);
  of_test.client->close();
  EXPECT_THROW(store->get("key"), CommError);
  EXPECT_EQ(of_test.owner->num_waits, 1);
}

TEST(GenerationStoreTest, AfterTheEndNothingIsAskedOfTheStore) {
  StoreOfGeneration of_test;
  const auto store = of_test.at(7);
  store->set("key", Bytes{1});
  of_test.owner->error = std::make_exception_ptr(GenerationEnded("test", "it has ended"));
  COHORT_EXPECT_THROW_WITH(store->get("key"), GenerationEnded, "it has ended");
  COHORT_EXPECT_THROW_WITH(store->set("key", Bytes{2}), GenerationEnded, "it has ended");
  EXPECT_EQ(of_test.client->get("generation/7/key"), "\x01");
}

TEST(GenerationStoreTest, TheRequestAfterALostLinkHasAnotherOne) {
  const membership::NetStoreServer server{{}};
  StoreClient client(std::chrono::seconds(20), std::chrono::seconds(2));
  const auto connect = [&] { return client.at(server.address()); };
  const auto store = c10::make_intrusive<GenerationStore>(connect, std::make_shared<EndOfTest>(), "prefix/",
                                                          std::chrono::seconds(20));
  const auto before = connect();
  EXPECT_EQ(connect(), before);
  store->set("key", Bytes{1});
  before->close();
  EXPECT_EQ(store->get("key"), Bytes{1});
  const auto after = connect();
  EXPECT_NE(after, before);
  client.close();
  EXPECT_TRUE(after->is_down());
  COHORT_EXPECT_THROW_WITH(store->get("key"), CommError, "was closed");
}

// A group's own timeout may be short, and a name server or a host that is gone takes long.
TEST(GenerationStoreTest, AClientConnectsByTheDeadlineOfTheCall) {
  StoreClient client(std::chrono::seconds(20), std::chrono::seconds(2));
  const base::Deadline waited(std::chrono::seconds(10));
  COHORT_EXPECT_THROW_WITH(client.at("127.0.0.1:1", base::Deadline(milliseconds(2))), RendezvousError, "");
  EXPECT_FALSE(waited.expired());
}

TEST(GenerationStoreTest, AStoreThatFailsSaysThatTheGenerationHasEnded) {
  StoreOfGeneration of_test;
  const auto store = of_test.at(7);
  std::thread waiter(
      [&] { COHORT_EXPECT_THROW_WITH(store->wait({"never"}), CommError, "the client of the store"); });
  of_test.client->close();
  waiter.join();
  of_test.owner->error = std::make_exception_ptr(GenerationEnded("test", "it has ended"));
  COHORT_EXPECT_THROW_WITH(store->wait({"never"}), GenerationEnded, "it has ended");
}

}  // namespace
}  // namespace cohort::elastic
