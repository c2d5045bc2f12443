// The rendezvous of nodes over a map instead of a store.
#include "cohort/launch/internal/rendezvous.h"

#include <gtest/gtest.h>
#include <poll.h>
#include <signal.h>

#include <array>
#include <atomic>
#include <functional>
#include <future>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "cohort/base/error.h"
#include "tests/launch/quick_store_client.h"
#include "tests/support/stores/map_store.h"
#include "tests/support/throws.h"

namespace cohort::launch {
namespace {

using std::chrono::milliseconds;
using test::MapStore;

RunOptions nodes(int node, int nnodes, int nproc) {
  RunOptions options;
  options.command = {"true"};
  options.nnodes = nnodes;
  options.node_rank = node;
  options.nproc_per_node = nproc;
  options.master_addr = "127.0.0.1";
  options.run_id = "job";
  return options;
}

// What nodes must agree on, from the error of two that do not.
std::string fingerprint_of(const RunOptions& options) {
  const auto kv_store = std::make_shared<MapStore>();
  AgentStoreClient store_client(kv_store, quick(0, options.nnodes));
  kv_store->set("here/1", R"({"fingerprint": "", "nproc": 1, "reached": "", "word": ""})");
  kv_store->set("heard/1", "1");
  SignalQueue signals({}, {});
  int signal = 0;
  try {
    join_rendezvous(options, store_client, signals, "", base::Deadline(milliseconds(5000)), signal);
  } catch (const RendezvousError& error) {
    const std::string text = error.what(), before = "node 0 has ";
    const std::size_t begin = text.find(before) + before.size();
    return text.substr(begin, text.find("; node 1 has") - begin);
  }
  return "";
}

TEST(RendezvousTest, NodesLearnWhichRanksTheyHave) {
  const auto kv_store = std::make_shared<MapStore>();
  AgentStoreClient first(kv_store, quick(0, 2)), second(kv_store, quick(1, 2));
  // Node 1 is played, but for what it must agree on.
  kv_store->set("here/1", R"({"fingerprint": "", "nproc": 3, "reached": "192.0.2.7", "word": ""})");
  kv_store->set("heard/1", "1");
  SignalQueue signals({}, {});
  int signal = 0;
  COHORT_EXPECT_THROW_WITH(
      join_rendezvous(nodes(0, 2, 2), first, signals, "", base::Deadline(milliseconds(5000)), signal),
      RendezvousError, "nodes disagree: node 0 has --nnodes 2, --rdzv-id job");
  COHORT_EXPECT_THROW_WITH(join_rendezvous(nodes(1, 2, 3), second, signals, "192.0.2.7",
                                           base::Deadline(milliseconds(5000)), signal),
                           RendezvousError, "nodes disagree");
}

// Two jobs with one secret, whose words somebody carries from one to the other.
TEST(RendezvousTest, ThePortByDefaultIsAPortLikeAnyOther) {
  RunOptions named = nodes(0, 2, 1);
  named.master_port = kDefaultPort;
  EXPECT_EQ(fingerprint_of(named), fingerprint_of(nodes(0, 2, 1)));
}

TEST(RendezvousTest, NodesThatMeetElsewhereDoNotAgree) {
  RunOptions here = nodes(0, 2, 1), there = here;
  there.master_port = 29501;
  EXPECT_NE(fingerprint_of(here), fingerprint_of(there));
  there = here;
  there.master_addr = "192.0.2.7";
  EXPECT_NE(fingerprint_of(here), fingerprint_of(there));
}

TEST(RendezvousTest, ANodeThatComesAfterItWouldHaveBeenLostIsAccepted) {
  const auto kv_store = std::make_shared<MapStore>();
  // By a clock of node 0 that is put forward by more than it is patient for.
  const auto ahead = std::make_shared<std::atomic<int>>(0);  // ms
  AgentStoreClientOptions options = quick(0, 2);
  options.now = [ahead] { return std::chrono::steady_clock::now() + milliseconds(ahead->load()); };
  AgentStoreClient first(kv_store, options);
  SignalQueue signals({}, {});
  int signal = 0;
  const auto sign = [&] { return kv_store->has("alive/0") ? kv_store->get("alive/0") : ""; };
  std::thread node_1([&] {
    for (int i = 0; i < 20; ++i) {  // it looks each time
      const std::string before = sign();
      *ahead += 500;
      EXPECT_TRUE(comes_true([&] { return sign() != before; }));
    }
    AgentStoreClient late(kv_store, quick(1, 2));
    int ignored = 0;
    const auto place = join_rendezvous(nodes(1, 2, 3), late, signals, "192.0.2.7",
                                       base::Deadline(milliseconds(10'000)), ignored);
    ASSERT_TRUE(place);
    EXPECT_EQ(place->first_rank, 2);
  });
  const auto place =
      join_rendezvous(nodes(0, 2, 2), first, signals, "", base::Deadline(milliseconds(10'000)), signal);
  node_1.join();
  ASSERT_TRUE(place);
  EXPECT_EQ(place->world_size, 5);
}

TEST(RendezvousTest, ThoseThatDidNotComeAreNamed) {
  const auto kv_store = std::make_shared<MapStore>();
  AgentStoreClient first(kv_store, quick(0, 4));
  kv_store->set("here/2", "{}");
  kv_store->set("heard/2", "1");
  SignalQueue signals({}, {});
  int signal = 0;
  COHORT_EXPECT_THROW_WITH(
      join_rendezvous(nodes(0, 4, 1), first, signals, "", base::Deadline(milliseconds(1000)), signal),
      RendezvousError, "nodes 1 and 3 of 4 did not come within ");
  EXPECT_TRUE(comes_true([&] { return kv_store->has("go"); })) << "who came is told";
  EXPECT_NE(kv_store->get("go").find("nodes 1 and 3 of 4 did not come"), std::string::npos);
}

// Node 0 gives signs and says nothing: its own time may end later.
TEST(RendezvousTest, ANodeThatFollowsNamesThemItselfAtItsDeadline) {
  const auto kv_store = std::make_shared<MapStore>();
  for (const auto& [key, value] : {std::pair("hello", "session"), {"here/0", "{}"}, {"here/2", "{}"}}) {
    kv_store->set(key, value);
  }
  AgentStoreClient second(kv_store, quick(1, 4));
  SignalQueue signals({}, {});
  int signal = 0;
  const base::Deadline waited(milliseconds(800));
  std::atomic<bool> is_over{false};
  std::thread node_0([&] {
    for (int i = 0; !is_over; ++i) {
      kv_store->set("alive/0", std::to_string(i));
      ::poll(nullptr, 0, 20);
    }
  });
  COHORT_EXPECT_THROW_WITH(join_rendezvous(nodes(1, 4, 1), second, signals, "", waited, signal),
                           RendezvousError, "node 3 of 4 did not come within ");
  EXPECT_LT(waited.elapsed(), std::chrono::seconds(10));
  EXPECT_TRUE(comes_true([&] { return kv_store->has("heard/1"); })) << "node 0 does not wait for it";
  is_over = true;
  node_0.join();
}

// Node 0's word comes in the very look that node 1 takes after its deadline to see who is missing: as that
// look asks for `at`.
class LateGoStore : public MapStore {
 public:
  explicit LateGoStore(std::string at) : at_(std::move(at)) {}
  bool has(const std::string& key) override {
    if (key == at_ && MapStore::has("here/1")) {
      const std::string text = MapStore::get("here/1"), before = R"("word":")";
      const std::size_t begin = text.find(before) + before.size();
      const std::string word = text.substr(begin, text.find('"', begin) - begin);
      set("go", R"({"error":"","ranks":[2,3],"reached":"","words":["",")" + word + R"("]})");
    }
    return MapStore::has(key);
  }

 private:
  const std::string at_;
};

// What node 1 of two gets.
std::optional<WorkerGroupSpec> place_with_late_go(const std::string& at) {
  std::optional<WorkerGroupSpec> place;
  for (int tries = 0; !place && tries < 5;
       ++tries) {  // that look has a second, which a busy machine may take
    const auto kv_store = std::make_shared<LateGoStore>(at);
    kv_store->set("hello", "session");
    kv_store->set("here/0", "{}");
    AgentStoreClientOptions options = quick(1, 2);
    // Once it has come time stands still, and its thread looks no more but when it is told to.
    const auto start = std::chrono::steady_clock::now();
    options.now = [kv_store, start] {
      return kv_store->MapStore::has("here/1") ? start : std::chrono::steady_clock::now();
    };
    AgentStoreClient second(kv_store, options);
    second.watch("hello");
    EXPECT_TRUE(comes_true([&] { return second.received("hello").has_value(); }));
    SignalQueue signals({}, {});
    int signal = 0;
    try {
      place = join_rendezvous(nodes(1, 2, 3), second, signals, "", base::Deadline(milliseconds(0)), signal);
    } catch (const RendezvousError& error) {
      EXPECT_NE(std::string(error.what()).find("its store has not answered"), std::string::npos)
          << error.what();
    }
  }
  return place;
}

TEST(RendezvousTest, AWordThatComesWithTheLastLookCounts) {
  for (const char* at : {"go", "here/0"}) {  // here/0: when that look has asked for the word already
    const auto place = place_with_late_go(at);
    ASSERT_TRUE(place) << at;
    EXPECT_EQ(place->first_rank, 2);
  }
}

TEST(RendezvousTest, ASignalEndsTheWait) {
  const auto kv_store = std::make_shared<MapStore>();
  AgentStoreClient first(kv_store, quick(0, 2));
  SignalQueue signals({SIGTERM}, {SIGUSR1});
  ::raise(SIGUSR1);
  ::raise(SIGTERM);
  int signal = 0;
  EXPECT_FALSE(
      join_rendezvous(nodes(0, 2, 1), first, signals, "", base::Deadline(milliseconds(10'000)), signal));
  EXPECT_EQ(signal, SIGTERM);
}

// Node 1 has come, and never says that it has heard.
TEST(RendezvousTest, ASecondSignalEndsTheWaitForThoseThatAreToHear) {
  const auto kv_store = std::make_shared<MapStore>();
  AgentStoreClient first(kv_store, quick(0, 3));
  kv_store->set("here/1", "{}");
  first.watch("here/1");
  EXPECT_TRUE(comes_true([&] { return first.received("here/1").has_value(); }));
  SignalQueue signals({SIGINT, SIGTERM}, {});
  ::raise(SIGTERM);
  ::raise(SIGINT);
  int signal = 0;
  EXPECT_FALSE(
      join_rendezvous(nodes(0, 3, 1), first, signals, "", base::Deadline(milliseconds(10'000)), signal));
  EXPECT_EQ(signal, SIGTERM);
  EXPECT_EQ(signals.take(), 0) << "the second one is ignored";
}

// Node 1 says that it has heard when it has been asked for a while: who does not wait for it is gone by then.
class HearsLateStore : public MapStore {
 public:
  bool has(const std::string& key) override {
    if (key == "heard/1" && ++num_looks_ == 20) set(key, "1");
    return MapStore::has(key);
  }

 private:
  int num_looks_ = 0;  // by one thread
};

TEST(RendezvousTest, ASignalThatComesTwiceAtOnceDoesNotEndTheWaitForThoseThatAreToHear) {
  bool is_heard = false;
  for (int tries = 0; !is_heard && tries < 10; ++tries) {  // a busy machine may be late to see the second
    const auto kv_store = std::make_shared<HearsLateStore>();
    AgentStoreClient first(kv_store, quick(0, 3));
    kv_store->set("here/1", "{}");
    first.watch("here/1");
    EXPECT_TRUE(comes_true([&] { return first.received("here/1").has_value(); }));
    SignalQueue signals({SIGTERM}, {});
    ::raise(SIGTERM);
    ::raise(SIGTERM);
    int signal = 0;
    EXPECT_FALSE(
        join_rendezvous(nodes(0, 3, 1), first, signals, "", base::Deadline(milliseconds(10'000)), signal));
    is_heard = first.received("heard/1").has_value();
    EXPECT_EQ(signal, SIGTERM);
    EXPECT_EQ(signals.take(), 0);
  }
  EXPECT_TRUE(is_heard);
}

TEST(RendezvousTest, ANodeThatASignalEndsIsNotWaitedFor) {
  const auto kv_store = std::make_shared<MapStore>();
  AgentStoreClient second(kv_store, quick(1, 2));
  kv_store->set("hello", "session");
  second.watch("hello");
  EXPECT_TRUE(comes_true([&] { return second.received("hello").has_value(); }));
  SignalQueue signals({SIGTERM}, {});
  ::raise(SIGTERM);
  int signal = 0;
  EXPECT_FALSE(
      join_rendezvous(nodes(1, 2, 1), second, signals, "", base::Deadline(milliseconds(10'000)), signal));
  EXPECT_EQ(signal, SIGTERM);
  EXPECT_TRUE(comes_true([&] { return kv_store->has("heard/1"); }));
}

// It said that it is here and died before it gave a sign.
TEST(RendezvousTest, ANodeThatDiesBeforeItsFirstSignIsLost) {
  const auto kv_store = std::make_shared<MapStore>();
  {
    const std::string fingerprint = fingerprint_of(nodes(0, 2, 2));
    AgentStoreClient first(kv_store, hasty(0, 2));
    SignalQueue signals({}, {});
    int signal = 0;
    kv_store->set("here/1",
                  R"({"fingerprint": ")" + fingerprint + R"(", "nproc": 3, "reached": "", "word": "w"})");
    const auto place =
        join_rendezvous(nodes(0, 2, 2), first, signals, "", base::Deadline(milliseconds(10'000)), signal);
    ASSERT_TRUE(place);
    EXPECT_TRUE(comes_true([&] { return !first.lost().empty(); }));
    EXPECT_EQ(first.lost().find("node 1 has given no sign for"), 0u) << first.lost();
  }
  // And node 0, for who has heard its first word.
  kv_store->set("hello", "session");
  kv_store->remove("go");
  AgentStoreClient second(kv_store, hasty(1, 2));
  kv_store->set("alive/0", "an old one");
  SignalQueue signals({}, {});
  int signal = 0;
  COHORT_EXPECT_THROW_WITH(
      join_rendezvous(nodes(1, 2, 3), second, signals, "", base::Deadline(milliseconds(10'000)), signal),
      RendezvousError, "node 0 has given no sign for");
}

// Whether it was asked who has heard.
class AskedStore : public MapStore {
 public:
  bool has(const std::string& key) override {
    if (key.starts_with("heard/")) is_asked = true;
    return MapStore::has(key);
  }
  std::atomic<bool> is_asked{false};
};

// One of three that is lost while the third is waited for: who has come is told, and who is lost is not
// waited for.
TEST(RendezvousTest, ANodeThatIsLostWhileOthersAreWaitedForEndsTheRendezvous) {
  const auto kv_store = std::make_shared<AskedStore>();
  AgentStoreClient first(kv_store, hasty(0, 3));
  kv_store->set("here/1", R"({"fingerprint": "", "nproc": 3, "reached": "", "word": "w"})");
  SignalQueue signals({}, {});
  int signal = 0;
  COHORT_EXPECT_THROW_WITH(
      join_rendezvous(nodes(0, 3, 2), first, signals, "", base::Deadline(milliseconds(10'000)), signal),
      RendezvousError, "node 1 has given no sign for");
  EXPECT_FALSE(kv_store->is_asked);
  EXPECT_TRUE(comes_true([&] { return kv_store->has("go"); }));
  EXPECT_NE(kv_store->get("go").find(R"("words":["","w",""])"), std::string::npos) << kv_store->get("go");
}

// The rendezvous of both nodes over `store`: what each gets, or the error. A process has one SignalQueue.
std::array<std::string, 2> outcomes(const std::shared_ptr<MapStore>& kv_store,
                                    const std::array<std::optional<base::Secret>, 2>& secrets,
                                    milliseconds timeout, SignalQueue& signals) {
  std::array<std::string, 2> results;
  std::vector<std::thread> threads;
  for (int node = 0; node < 2; ++node) {
    threads.emplace_back([&, node] {
      const auto at = static_cast<std::size_t>(node);
      try {
        AgentStoreClient store_client(kv_store, quick(node, 2, secrets[at]));
        int signal = 0;
        const auto place = join_rendezvous(nodes(node, 2, 2 + node), store_client, signals, "",
                                           base::Deadline(timeout), signal);
        results[at] = base::concat("from rank ", place->first_rank, " of ", place->world_size);
      } catch (const std::exception& error) {
        results[at] = error.what();
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  return results;
}

TEST(RendezvousTest, NodesWithOneSecretMeet) {
  const base::Secret secret = base::Secret::make();
  SignalQueue signals({}, {});
  EXPECT_EQ(outcomes(std::make_shared<MapStore>(), {secret, secret}, milliseconds(10'000), signals),
            (std::array<std::string, 2>{"from rank 0 of 5", "from rank 2 of 5"}));
}

TEST(RendezvousTest, NodesWithAnotherSecretOrNoneAreToldSo) {
  const std::optional<base::Secret> secret = base::Secret::make(), other_secret = base::Secret::make(), none;
  const auto expect_rejected = [](const std::string& text) {
    EXPECT_NE(text.find("was not signed with this job's secret"), std::string::npos) << text;
  };
  SignalQueue signals({}, {});
  // All three at the same time, as each takes until its deadline.
  const auto meet_with = [&](const std::optional<base::Secret>& first,
                             const std::optional<base::Secret>& second) {
    return std::async(std::launch::async, [&signals, first, second] {
      return outcomes(std::make_shared<MapStore>(), {first, second}, milliseconds(1500), signals);
    });
  };
  auto two_secrets = meet_with(secret, other_secret), second_alone = meet_with(none, secret),
       first_alone = meet_with(secret, none);
  const auto different = two_secrets.get();
  expect_rejected(different[1]);
  EXPECT_NE(different[0].find("node 1 of 2 did not come within"), std::string::npos) << different[0];
  expect_rejected(second_alone.get()[1]);
  // Node 1 takes a signed word for a session's name, and answers without a signature.
  expect_rejected(first_alone.get()[0]);
}

// All that was said at an earlier rendezvous with the same secret, played to those who come now.
TEST(RendezvousTest, ARecordOfAnEarlierRendezvousMakesNobodyGo) {
  const base::Secret secret = base::Secret::make();
  const auto earlier = std::make_shared<MapStore>();
  SignalQueue signals({}, {});
  int signal = 0;
  outcomes(earlier, {secret, secret}, milliseconds(10'000), signals);
  const auto play = [&](const std::shared_ptr<MapStore>& kv_store, const std::vector<std::string>& keys) {
    for (const std::string& key : keys) {
      if (earlier->has(key)) kv_store->set(key, earlier->get(key));
    }
  };
  {
    const auto kv_store = std::make_shared<MapStore>();
    play(kv_store, {"hello", "here/0", "go", "alive/0"});
    AgentStoreClient second(kv_store, quick(1, 2, secret));
    COHORT_EXPECT_THROW_WITH(
        join_rendezvous(nodes(1, 2, 1), second, signals, "", base::Deadline(milliseconds(10'000)), signal),
        RendezvousError, "what node 0 says is not of this rendezvous");
  }
  // An earlier rendezvous that came to nothing, with this node or without it.
  for (const bool had_come : {true, false}) {
    const auto failed = std::make_shared<MapStore>();
    {
      AgentStoreClient first(failed, quick(0, 3, secret));
      std::thread node_1([&] {
        if (!had_come) return;
        AgentStoreClient second(failed, quick(1, 3, secret));
        int ignored = 0;
        COHORT_EXPECT_THROW_WITH(join_rendezvous(nodes(1, 3, 1), second, signals, "",
                                                 base::Deadline(milliseconds(10'000)), ignored),
                                 RendezvousError, "node 2 of 3 did not come");
      });
      const milliseconds time(had_come ? 1000 : 400);  // for node 1 to be heard
      EXPECT_THROW(join_rendezvous(nodes(0, 3, 1), first, signals, "", base::Deadline(time), signal),
                   RendezvousError);
      node_1.join();
    }
    AgentStoreClient second(failed, quick(1, 3, secret));
    COHORT_EXPECT_THROW_WITH(
        join_rendezvous(nodes(1, 3, 1), second, signals, "", base::Deadline(milliseconds(10'000)), signal),
        RendezvousError,
        had_come ? "what node 0 says is not of this rendezvous" : "node 0 gave up before it heard this node");
  }
  const auto kv_store = std::make_shared<MapStore>();
  play(kv_store, {"here/1", "alive/1"});
  AgentStoreClient first(kv_store, quick(0, 2, secret));
  COHORT_EXPECT_THROW_WITH(
      join_rendezvous(nodes(0, 2, 1), first, signals, "", base::Deadline(milliseconds(700)), signal),
      RendezvousError, "was not signed with this job's secret");
}

}  // namespace
}  // namespace cohort::launch
