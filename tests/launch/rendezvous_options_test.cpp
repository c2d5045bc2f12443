#include "cohort/launch/rendezvous_options.h"

#include <gtest/gtest.h>

#include "cohort/base/error.h"
#include "cohort/base/host.h"
#include "cohort/launch/internal/members/endpoint_name.h"
#include "cohort/launch/internal/members/store_offers.h"
#include "tests/support/throws.h"

namespace cohort::launch {
namespace {

TEST(RendezvousOptionsTest, AnEndpointIsAHostAndMayHaveAPort) {
  const auto read = [](const char* text) { return read_endpoint_text(text, 29400).value_or("none"); };
  EXPECT_EQ(read("n1"), "n1:29400");
  EXPECT_EQ(read("n1.example:77"), "n1.example:77");
  EXPECT_EQ(read("[fe80::1]"), "[fe80::1]:29400");
  EXPECT_EQ(read("[fe80::1]:0"), "[fe80::1]:0");
  for (const char* bad :
       {"", ":1", "n1:", "n1:x", "n1:70000", "n1:-1", "fe80::1", "[]:1", "[::1", "[::1]7", "a b:1"}) {
    EXPECT_EQ(read(bad), "none") << bad;
  }
  for (const char* text : {"n1:29400", "[fe80::1]:77"}) {
    EXPECT_EQ(endpoint_text(split_endpoint(text)), text);
  }
  EXPECT_EQ(split_endpoint("[fe80::1]:77").host, "fe80::1");
  EXPECT_EQ(split_endpoint("[fe80::1]:77").port, 77);
}

TEST(RendezvousOptionsTest, AHostKnowsItself) {
  for (const std::string& own : {std::string("127.0.0.1"), std::string("localhost"), std::string("::1"),
                                 std::string("127.0.3.4"), base::host_name()}) {
    EXPECT_TRUE(names_this_host(own)) << own;
  }
  // Addresses for documentation (RFC 5737, 3849), which no interface has.
  for (const char* other : {"192.0.2.7", "2001:db8::7", "no-such-host.invalid"}) {
    EXPECT_FALSE(names_this_host(other)) << other;
  }
}

TEST(RendezvousOptionsTest, TheWayToAHostIsOfOneInterface) {
  EXPECT_EQ(address_towards("127.0.0.1"), "127.0.0.1");
}

TEST(RendezvousOptionsTest, AnErrorSaysWhyNoWayLeadsToAHost) {
  // What the system's resolver says of this name depends on the host.
  COHORT_EXPECT_THROW_WITH(address_towards("no..host"), RendezvousError,
                           "the name of the rendezvous endpoint no..host is not known here: Name or service");
  COHORT_EXPECT_THROW_WITH(address_towards("no-such-host.invalid"), RendezvousError,
                           "Try: `getent hosts no-such-host.invalid`");
  // The kernel rejects it, whatever routes there are (the user may not send to all).
  COHORT_EXPECT_THROW_WITH(address_towards("255.255.255.255"), RendezvousError,
                           "endpoint 255.255.255.255 (255.255.255.255: Permission denied)");
  COHORT_EXPECT_THROW_WITH(address_towards("255.255.255.255"), RendezvousError,
                           "Try: `ip route get 255.255.255.255`");
}

// As that of a pod that is starting.
TEST(EndpointNameTest, ANameThatIsNotKnownYetIsWaitedFor) {
  int num_asked = 0;
  const auto find_way = [&num_asked](const std::string& host) -> std::string {
    if (++num_asked < 4) throw RendezvousError("launch.run", host + " is not known");
    return "10.0.0.1";
  };
  const auto never = [] { return false; };
  EXPECT_TRUE(wait_for_endpoint_name("pod-0", base::Deadline(std::chrono::minutes(1)), never, find_way));
  EXPECT_EQ(num_asked, 4);
  EXPECT_TRUE(
      wait_for_endpoint_name("127.0.0.1", base::Deadline(std::chrono::milliseconds(0)), never, find_way));
  EXPECT_EQ(num_asked, 4) << "an address of this host needs no name server";
}

TEST(EndpointNameTest, TheWaitEndsByASignalAndAtItsDeadline) {
  const auto find_way = [](const std::string& host) -> std::string {
    throw RendezvousError("launch.run", host + " is not known");
  };
  int num_looks = 0;
  EXPECT_FALSE(wait_for_endpoint_name(
      "pod-0", base::Deadline(std::chrono::minutes(1)), [&] { return ++num_looks == 3; }, find_way));
  COHORT_EXPECT_THROW_WITH(
      wait_for_endpoint_name(
          "pod-0", base::Deadline(std::chrono::milliseconds(250)), [] { return false; }, find_way),
      RendezvousError, "pod-0 is not known");
}

TEST(StoreOffersTest, AStoreThatMayHaveBeenUsedIsNotOfferedAgain) {
  int count = 0;
  std::vector<std::weak_ptr<void>> stores;
  StoreOffers offers([&] {
    ServedStore store{"host:" + std::to_string(++count), std::make_shared<int>(count)};
    stores.emplace_back(store.keep);
    return store;
  });
  EXPECT_EQ(offers.address(), "host:1");
  EXPECT_TRUE(offers.note_generation(1, "host:1"));
  EXPECT_FALSE(offers.note_generation(1, "host:1"));
  EXPECT_EQ(offers.address(), "host:2");
  EXPECT_FALSE(offers.note_generation(2, "other:1"));
  EXPECT_EQ(offers.address(), "host:2");
  EXPECT_TRUE(offers.note_generation(4, "other:2")) << "generation 3 may have had it";
  EXPECT_EQ(offers.address(), "host:3");
  EXPECT_FALSE(stores[0].expired());
  EXPECT_TRUE(offers.note_generation(5, "host:3"));
  EXPECT_TRUE(stores[0].expired());
  EXPECT_FALSE(stores[1].expired()) << "ranks of the generation before may be on their way out";
}

}  // namespace
}  // namespace cohort::launch
