#include "cohort/base/threads/wait_for_listener.h"

#include <gtest/gtest.h>
#include <netdb.h>

#include <chrono>
#include <mutex>
#include <thread>
#include <vector>

#include "cohort/base/error.h"
#include "cohort/base/files/fd.h"
#include "cohort/base/log.h"
#include "tests/support/net/name_lookup.h"
#include "tests/support/net/port.h"
#include "tests/support/throws.h"

// Stands before that of the C library, since a machine's name servers may answer as late as they like: those
// of silent.test do not answer for 3 s, and nobody.test is unknown at once.
extern "C" __attribute__((visibility("default"))) int getaddrinfo(const char* name, const char* service,
                                                                  const addrinfo* hints, addrinfo** found) {
  const bool asks = cohort::test::asks_name_server(name, hints);
  if (asks && std::string_view(name) == "silent.test") std::this_thread::sleep_for(std::chrono::seconds(3));
  if (asks && std::string_view(name) == "nobody.test") return EAI_NONAME;
  return cohort::test::real_getaddrinfo(name, service, hints, found);
}

namespace cohort::base {
namespace {

using namespace std::chrono_literals;
using test::Port;

const ListenTarget kTarget{.where = "comm.init", .name = "rank 0", .hint = "start it"};

TEST(WaitForListenerTest, WhoListensIsFoundByNameAndByAddress) {
  const Port port(Port::Use::kListens);
  EXPECT_EQ(wait_for_listener("127.0.0.1", port.number(), Deadline(5s), kTarget), "127.0.0.1");
  EXPECT_EQ(wait_for_listener("localhost", port.number(), Deadline(5s), kTarget), "127.0.0.1");
}

TEST(WaitForListenerTest, WhoComesLaterIsFoundSoon) {
  const std::uint16_t number = test::free_port();
  const Fd fd(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  std::chrono::steady_clock::time_point listens;
  std::thread later([&] {
    std::this_thread::sleep_for(1500ms);  // somebody who starts later
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_port = htons(number);
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    EXPECT_EQ(::bind(fd.get(), reinterpret_cast<sockaddr*>(&address), sizeof address), 0);
    EXPECT_EQ(::listen(fd.get(), 1), 0);
    listens = std::chrono::steady_clock::now();
  });
  EXPECT_EQ(wait_for_listener("127.0.0.1", number, Deadline(20s), kTarget), "127.0.0.1");
  const auto found = std::chrono::steady_clock::now();
  later.join();
  EXPECT_LT(found - listens, 1s) << "it is tried ten times a second";
}

TEST(WaitForListenerTest, SilentNameServersHoldNobodyUp) {
  const Deadline waited(60s);
  COHORT_EXPECT_THROW_WITH(wait_for_listener("silent.test", 1, Deadline(300ms), kTarget), RendezvousError,
                           "no server has answered yet to which address the name has");
  EXPECT_LT(waited.elapsed(), 2500ms);
  EXPECT_EQ(
      wait_for_listener("silent.test", 1, Deadline(60s), kTarget, [&] { return waited.elapsed() > 900ms; }),
      std::nullopt);
  EXPECT_LT(waited.elapsed(), 2500ms);
}

TEST(WaitForListenerTest, WhoIsNotThereIsNamedAtTheDeadline) {
  const Port port(Port::Use::kRejects);
  const auto begin = std::chrono::steady_clock::now();
  COHORT_EXPECT_THROW_WITH(
      wait_for_listener("127.0.0.1", port.number(), Deadline(300ms), kTarget), RendezvousError,
      concat("[comm.init] cannot reach rank 0 at 127.0.0.1:", port.number(), " (waited "));
  EXPECT_LT(std::chrono::steady_clock::now() - begin, 10s);
  COHORT_EXPECT_THROW_WITH(wait_for_listener("127.0.0.1", port.number(), Deadline(0s), kTarget),
                           RendezvousError, "Connection refused");
  COHORT_EXPECT_THROW_WITH(wait_for_listener("::1", port.number(), Deadline(0s), kTarget), RendezvousError,
                           concat("at [::1]:", port.number()));
  COHORT_EXPECT_THROW_WITH(wait_for_listener("nobody.test", 1, Deadline(1s), kTarget), RendezvousError,
                           "the name cannot be resolved");
}

TEST(WaitForListenerTest, AnInterruptionEndsTheWait) {
  const Port port(Port::Use::kRejects);
  int questions = 0;
  EXPECT_FALSE(wait_for_listener("127.0.0.1", port.number(), Deadline(20s), kTarget,
                                 [&] { return ++questions == 3; }));
  EXPECT_EQ(questions, 3);
}

TEST(WaitForListenerTest, LoopbackIsToldFromOtherAddresses) {
  EXPECT_TRUE(is_loopback("127.0.1.1"));
  EXPECT_TRUE(is_loopback("::1"));
  EXPECT_FALSE(is_loopback("192.0.2.1"));
}

TEST(WaitForListenerTest, ATextFromElsewhereIsNotLookedUp) {
  for (const char* far : {"192.0.2.1", "2001:db8::1"}) EXPECT_TRUE(is_far_address(far)) << far;
  for (const char* text : {"", "127.0.0.1", "127.0.1.1", "::1", "localhost", "no address", "n1.example"}) {
    EXPECT_FALSE(is_far_address(text)) << text;
  }
}

TEST(WaitForListenerTest, NamesOfThisHostAloneAreKnown) {
  for (const char* host : {"127.0.0.1", "localhost", "::1", "[::1]"}) EXPECT_TRUE(is_this_host(host)) << host;
  for (const char* host : {"", "192.0.2.1", "n1", "0.0.0.0"}) EXPECT_FALSE(is_this_host(host)) << host;
}

}  // namespace
}  // namespace cohort::base
