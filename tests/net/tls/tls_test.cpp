// Nodes whose TCP is encrypted, and those who have no business there.
#include <gtest/gtest.h>
#include <malloc.h>
#include <openssl/ssl.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/uio.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <mutex>
#include <optional>
#include <random>
#include <string>
#include <vector>

#include "cohort/base/error.h"
#include "cohort/base/log.h"
#include "cohort/base/secret.h"
#include "cohort/base/threads/wait.h"
#include "cohort/net/internal/handshake.h"
#include "cohort/net/internal/socket.h"
#include "cohort/net/internal/tls/stream.h"
#include "cohort/net/node.h"
#include "tests/net/recorder.h"
#include "tests/net/relay.h"
#include "tests/support/comes_true.h"
#include "tests/support/deadline_slack.h"
#include "tests/support/net/certificates.h"
#include "tests/support/patience.h"
#include "tests/support/slowdown.h"
#include "tests/support/throws.h"

namespace cohort::net {
namespace {

using std::chrono::milliseconds;
using test::Authority;
using test::message_of;
using test::patience;
using test::Worker;
using Clock = std::chrono::steady_clock;

// How long a certificate is valid that is to expire: a node that has it begins, and connects, before. An end
// is in whole seconds, so it comes up to a second earlier.
constexpr std::chrono::seconds kShortTime(1 + test::kSlowdown);

NodeOptions with_tls(TlsOptions files) {
  NodeOptions options;
  options.tls = std::move(files);
  return options;
}

// What the nodes of this process warn of.
class Warnings {
 public:
  Warnings() {
    base::set_log_sink([this](base::LogLevel, std::string_view line) {
      const std::lock_guard lock(mutex_);
      lines_ += std::string(line) + "\n";
    });
  }
  ~Warnings() { base::set_log_sink(nullptr); }
  std::string lines() {
    const std::lock_guard lock(mutex_);
    return lines_;
  }
  bool come_to_have(const std::string& part) {
    return test::comes_true([&] { return lines().find(part) != std::string::npos; });
  }

 private:
  std::mutex mutex_;
  std::string lines_;
};

base::Fd connect_socket(const std::string& address) {
  base::Fd fd = start_connect(resolve(address));
  pollfd ready{fd.get(), POLLOUT, 0};
  ::poll(&ready, 1, 5'000);
  return fd;
}

// Reads what comes until the other side closes. Returns how long that took.
milliseconds time_until_closed(const base::Fd& fd) {
  const auto begin = Clock::now();
  std::string buffer(4096, '\0');
  while (Clock::now() - begin < std::chrono::seconds(20)) {
    pollfd ready{fd.get(), POLLIN, 0};
    if (::poll(&ready, 1, 1'000) == 1 && ::read(fd.get(), buffer.data(), buffer.size()) <= 0) break;
  }
  return std::chrono::duration_cast<milliseconds>(Clock::now() - begin);
}

// The first message of a TLS client.
std::string client_hello() {
  SSL_CTX* const context = ::SSL_CTX_new(::TLS_client_method());
  SSL* const ssl = ::SSL_new(context);
  BIO* const output = ::BIO_new(::BIO_s_mem());
  ::SSL_set_bio(ssl, ::BIO_new(::BIO_s_mem()), output);
  ::SSL_connect(ssl);
  char* bytes = nullptr;
  const long size = BIO_get_mem_data(output, &bytes);
  std::string hello(bytes, static_cast<std::size_t>(size));
  ::SSL_free(ssl);
  ::SSL_CTX_free(context);
  return hello;
}

TEST(TlsTest, MessagesOf1ByteTo100MegabytesGoBothWays) {
  const Authority authority;
  NodeOptions of_a = with_tls(authority.make_node("a")), of_b = with_tls(authority.make_node("b"));
  of_a.window = of_b.window = std::size_t{256} << 20;  // the recorder keeps all
  Worker a("a", of_a), b("b", of_b, true);
  const auto peer = a.node->connect(b.node->listen("127.0.0.1:0"), patience());
  EXPECT_EQ(peer->name(), "b");
  const std::vector<std::size_t> sizes{1, 1'000, 16'384, 16'385, 300'000, 100'000'000, 2};
  for (const std::size_t size : sizes) peer->send(message_of(0, std::to_string(size), size));
  ASSERT_TRUE(test::comes_true([&] { return a.heard->count() == sizes.size(); })) << a.heard->count();
  const std::vector<Message> messages = a.heard->take();
  for (std::size_t i = 0; i < sizes.size(); ++i) {
    EXPECT_EQ(messages[i].header, std::to_string(sizes[i]));
    ASSERT_EQ(messages[i].payloads[0].bytes.size(), sizes[i]);
    const Message sent = message_of(0, "", sizes[i]);
    EXPECT_EQ(std::memcmp(messages[i].payloads[0].bytes.data(), sent.payloads[0].bytes.data(), sizes[i]), 0);
  }
  EXPECT_EQ(peer->metrics().links, 1);
  EXPECT_TRUE(a.node->close(patience()).empty());
  EXPECT_TRUE(test::comes_true([&] { return b.heard->is_down(); }));
  EXPECT_EQ(b.heard->down().text, "a has left");
}

TEST(TlsTest, TheWireHasNeitherMessagesNorNames) {
  const Authority authority;
  for (const bool has_tls : {false, true}) {
    const auto options = [&](const char* name) {
      return has_tls ? with_tls(authority.make_node(name)) : NodeOptions();
    };
    Worker a("a worker's name", options("a")), b("b", options("b"), true);
    test::Relay relay(b.node->listen("127.0.0.1:0"));
    const auto peer = a.node->connect(relay.address(), patience());
    peer->send(message_of(0, "a plain text", 10));
    ASSERT_TRUE(test::comes_true([&] { return a.heard->count() == 1; }));
    for (const char* text : {"a worker's name", "a plain text", "COHORTNT"}) {
      EXPECT_EQ(relay.has_passed(text), !has_tls) << text;
    }
  }
}

TEST(TlsTest, BrokenConnectionsLoseAndRepeatNothing) {
  const Authority authority;
  Worker a("a", with_tls(authority.make_node("a"))), b("b", with_tls(authority.make_node("b")), true);
  test::Relay relay(b.node->listen("127.0.0.1:0"));
  const auto peer = a.node->connect(relay.address(), patience());
  std::mt19937 random(1);
  constexpr std::size_t kMessages = 1'000;
  for (std::size_t i = 0; i < kMessages; ++i) {
    peer->send(message_of(0, std::to_string(i), random() % 30 == 0 ? random() % 600'000 : random() % 2'000));
    if (i % 100 != 99) continue;
    i % 200 == 99 ? relay.cut() : relay.cut_after(1 + random() % 3'000);  // also within a handshake
    base::sleep(milliseconds(random() % 30), patience());
  }
  ASSERT_TRUE(test::comes_true([&] { return a.heard->count() == kMessages; })) << a.heard->count();
  const std::vector<Message> messages = a.heard->take();
  for (std::size_t i = 0; i < kMessages; ++i) {
    EXPECT_EQ(messages[i].header, std::to_string(i));
    if (messages[i].payloads.empty()) continue;
    const auto bytes = messages[i].payloads[0].bytes;
    const Message sent = message_of(0, "", bytes.size());
    EXPECT_EQ(std::memcmp(bytes.data(), sent.payloads[0].bytes.data(), bytes.size()), 0);
  }
  EXPECT_GT(peer->metrics().links, 1);
  EXPECT_FALSE(a.heard->is_down() || b.heard->is_down());
}

TEST(TlsTest, ANodeWithTlsAndOneWithoutAreToldAtOnceWhichIsWhich) {
  const Authority authority;
  for (const bool listener_has_tls : {true, false}) {
    Warnings warnings;
    const NodeOptions tls = with_tls(authority.make_node("node"));
    Worker a("a", listener_has_tls ? NodeOptions() : tls), b("b", listener_has_tls ? tls : NodeOptions());
    const std::string address = b.node->listen("127.0.0.1:0");
    const auto begin = Clock::now();
    COHORT_EXPECT_THROW_WITH(a.node->connect(address, patience()), RendezvousError,
                             listener_has_tls
                                 ? "] who listens there uses TLS, and this process does not. Try: "
                                 : "] who listens there does not use TLS, and this process does. Try: ");
    EXPECT_LT(Clock::now() - begin, milliseconds(500) + test::deadline_slack());
    EXPECT_TRUE(warnings.come_to_have(listener_has_tls
                                          ? "who connected does not use TLS, and this process does. Try: "
                                          : "who connected uses TLS, and this process does not. Try: "))
        << warnings.lines();
    EXPECT_NE(warnings.lines().find("a connection from 127.0.0.1:"), std::string::npos) << warnings.lines();
  }
}

TEST(TlsTest, LocalSocketsStayAsTheyAre) {
  const Authority authority;
  Worker a("a"), b("b", with_tls(authority.make_node("b")), true);
  const auto peer = a.node->connect(b.node->listen("unix:@cohort-" + base::random_word()), patience());
  peer->send(message_of(0, "hello"));
  EXPECT_TRUE(test::comes_true([&] { return a.heard->count() == 1; }));
}

// The caller does not believe the listener's authority, or the listener the caller's.
TEST(TlsTest, ACertificateOfAnotherAuthorityIsRejectedByTheSideThatSeesIt) {
  const Authority authority, stranger("another authority");
  const TlsOptions good = authority.make_node("good");
  TlsOptions bad = stranger.make_node("bad");
  Worker b("b", with_tls(good));
  const std::string address = b.node->listen("127.0.0.1:0");
  {
    Warnings warnings;
    Worker a("a", with_tls(bad));
    COHORT_EXPECT_THROW_WITH(
        a.node->connect(address, patience()), RendezvousError,
        "[net.tls] the certificate of who listens there is not accepted: unable to get local issuer "
        "certificate (CN = good); authorities: " +
            stranger.file().string());
    EXPECT_TRUE(warnings.come_to_have("who connected does not accept this process's certificate, " +
                                      good.certificate.string() + ": unknown CA"))
        << warnings.lines();
  }
  Warnings warnings;
  bad.authorities = good.authorities;
  Worker a("a", with_tls(bad));
  base::sleep(milliseconds(1100), patience());  // a warning a second
  COHORT_EXPECT_THROW_WITH(a.node->connect(address, patience()), RendezvousError,
                           "who listens there does not accept this process's certificate, " +
                               bad.certificate.string() + ": unknown CA");
  EXPECT_TRUE(
      warnings.come_to_have("the certificate of who connected is not accepted: "
                            "unable to get local issuer certificate (CN = bad)"))
      << warnings.lines();
}

TEST(TlsTest, ACertificateThatExpiresWhileANodeLivesIsRejectedByBothSides) {
  const Authority authority;
  Worker good("good", with_tls(authority.make_node("good"))),
      old("old", with_tls(authority.make_node("old", kShortTime)));
  const std::string address = good.node->listen("127.0.0.1:0"), old_address = old.node->listen("127.0.0.1:0");
  base::sleep(kShortTime + milliseconds(100), patience());
  COHORT_EXPECT_THROW_WITH(good.node->connect(old_address, patience()), RendezvousError,
                           "is not accepted: certificate has expired (CN = old, valid until ");
  COHORT_EXPECT_THROW_WITH(old.node->connect(address, patience()), RendezvousError,
                           "old.pem: certificate expired");
}

// The peer lives, and only a new connection is impossible.
TEST(TlsTest, WhoseCertificateHasExpiredIsNotTakenForDead) {
  const Authority authority;
  Worker good("good", with_tls(authority.make_node("good"))),
      old("old", with_tls(authority.make_node("old", kShortTime)));
  test::Relay relay(good.node->listen("127.0.0.1:0"));
  const auto peer = old.node->connect(relay.address(), patience());
  base::sleep(kShortTime + milliseconds(100), patience());
  relay.cut();
  ASSERT_TRUE(test::comes_true([&] { return old.heard->is_down() && good.heard->is_down(); }));
  EXPECT_EQ(old.heard->down().kind, DownKind::kSilent) << old.heard->down().text;
  EXPECT_EQ(good.heard->down().kind, DownKind::kSilent) << good.heard->down().text;
}

TEST(TlsTest, FilesThatChangeAreReadAgainAndThoseThatAreDamagedAreNot) {
  const Authority authority;
  const TlsOptions files = authority.make_node("old", kShortTime);
  Worker good("good", with_tls(authority.make_node("good"))), old("old", with_tls(files));
  const std::string address = good.node->listen("127.0.0.1:0");
  const auto first = old.node->connect(address, patience());
  base::sleep(kShortTime + milliseconds(100), patience());
  Warnings warnings;
  std::filesystem::resize_file(files.key, 0);
  COHORT_EXPECT_THROW_WITH(old.node->connect(address, patience()), RendezvousError,
                           "old.pem: certificate expired");
  EXPECT_TRUE(warnings.come_to_have("cannot be used, so those from before stay: [net.tls] the key"))
      << warnings.lines();
  authority.make_node("old");  // the same files
  EXPECT_EQ(old.node->connect(address, patience())->name(), "good");
}

TEST(TlsTest, ACertificateThatIsRevokedMakesNoConnection) {
  const Authority authority;
  const TlsOptions files = authority.make_node("stolen");
  Worker a("a", with_tls(authority.make_node("a"))), b("b", with_tls(authority.make_node("b"))),
      stolen("stolen", with_tls(files));
  const std::string address = a.node->listen("127.0.0.1:0");
  EXPECT_EQ(stolen.node->connect(address, patience())->name(), "a");
  authority.revoke(files.certificate);
  Warnings warnings;
  COHORT_EXPECT_THROW_WITH(stolen.node->connect(address, patience()), RendezvousError,
                           "who listens there does not accept this process's certificate, " +
                               files.certificate.string() + ": certificate revoked");
  EXPECT_TRUE(warnings.come_to_have("is not accepted: certificate revoked (CN = stolen)"))
      << warnings.lines();
  EXPECT_EQ(b.node->connect(address, patience())->name(), "a");
}

TEST(TlsTest, TheSecretIsCheckedInsideTls) {
  const Authority authority;
  NodeOptions of_a = with_tls(authority.make_node("a")), of_b = with_tls(authority.make_node("b"));
  of_a.secret = base::Secret::make();
  of_b.secret = base::Secret::make();
  Worker a("a", of_a), b("b", of_b), c("c", of_a);
  COHORT_EXPECT_THROW_WITH(a.node->connect(b.node->listen("127.0.0.1:0"), patience()), RendezvousError,
                           "who listens there does not know the job's secret");
  EXPECT_EQ(a.node->connect(c.node->listen("127.0.0.1:0"), patience())->name(), "c");
}

TEST(TlsTest, ACallerOfAnotherVersionIsToldInsideTls) {
  const Authority authority;
  Worker a("a", with_tls(authority.make_node("a")));
  const base::Fd fd = connect_socket(a.node->listen("127.0.0.1:0"));
  const TlsContext context(authority.make_node("caller"));
  TlsStream tls(context, fd.get(), Role::kCaller);
  test::wait_until([&] { return tls.handshake() == TlsStatus::kReady; });
  std::string first = Handshake(Role::kCaller, std::nullopt, base::random_word()).take_output();
  const std::string version = first.substr(8, 2);
  ++first[8];
  const iovec bytes{first.data(), first.size()};
  ASSERT_EQ(tls.write({&bytes, 1}), static_cast<ssize_t>(first.size()));
  std::string answer(TlsStream::kMinReadBytes, '\0');
  const iovec room{answer.data(), answer.size()};
  ssize_t size = -1;
  test::wait_until([&] {
    size = tls.read({&room, 1});
    return size >= 0;
  });
  EXPECT_EQ(answer.substr(0, static_cast<std::size_t>(std::max<ssize_t>(size, 0))), version);
}

TEST(TlsTest, AStrangerWithoutACertificateIsToldAndSentAway) {
  const Authority authority;
  Warnings warnings;
  Worker a("a", with_tls(authority.make_node("a")));
  const base::Fd fd = connect_socket(a.node->listen("127.0.0.1:0"));
  SSL_CTX* const context = ::SSL_CTX_new(::TLS_client_method());
  SSL* const ssl = ::SSL_new(context);
  ::SSL_set_fd(ssl, fd.get());
  const auto finish = [&](const auto& step) {
    int result = 0;
    test::wait_until([&] {
      result = step();
      return result > 0 || ::SSL_get_error(ssl, result) != SSL_ERROR_WANT_READ;
    });
    return result;
  };
  EXPECT_EQ(finish([&] { return ::SSL_connect(ssl); }), 1) << "of TLS 1.3: the listener has not answered yet";
  EXPECT_EQ(::SSL_write(ssl, "COHORTNT", 8), 8);
  char byte = 0;
  EXPECT_LE(finish([&] { return ::SSL_read(ssl, &byte, 1); }), 0);
  ::SSL_free(ssl);
  ::SSL_CTX_free(context);
  EXPECT_LT(time_until_closed(fd), milliseconds(1000) + test::deadline_slack());
  EXPECT_TRUE(warnings.come_to_have("who connected has no certificate")) << warnings.lines();
}

// Those that say nothing, and those that begin a handshake and a long record after it, and say no more:
// OpenSSL has a buffer for each record then, besides that for messages.
TEST(TlsTest, StrangersAreGoneWithinASecondAndTakeLessThan64KilobytesEach) {
  const Authority authority;
  Worker a("a", with_tls(authority.make_node("a"))), b("b", with_tls(authority.make_node("b")));
  const std::string address = b.node->listen("127.0.0.1:0"),
                    hello = client_hello() + std::string("\x17\x03\x03\x40\x11", 5) + std::string(1000, 'x');
  a.node->connect(address, patience());
  constexpr std::size_t kStrangers = 60;
  std::vector<base::Fd> silent, halfway;
  for (std::size_t i = 0; i < 4; ++i) silent.push_back(connect_socket(address));
  base::sleep(milliseconds(50), patience());
  [[maybe_unused]] const std::size_t before = ::mallinfo2().uordblks + ::mallinfo2().hblkhd;
  for (std::size_t i = 0; i < kStrangers; ++i) {
    halfway.push_back(connect_socket(address));
    ASSERT_EQ(::send(halfway.back().get(), hello.data(), hello.size(), MSG_NOSIGNAL),
              static_cast<ssize_t>(hello.size()));
  }
  pollfd last{halfway.back().get(), POLLIN, 0};
  ASSERT_EQ(::poll(&last, 1, 5'000), 1) << "the listener's part of the handshake";
  [[maybe_unused]] const std::size_t after = ::mallinfo2().uordblks + ::mallinfo2().hblkhd;
#ifndef COHORT_IS_SANITIZED
  EXPECT_LT((after - before) / kStrangers, 64U * 1024);
  EXPECT_GT((after - before) / kStrangers, 1024U) << "this counts nothing";
#endif
  EXPECT_LT(time_until_closed(silent.front()), milliseconds(1000) + test::deadline_slack());
  EXPECT_LT(time_until_closed(halfway.back()), milliseconds(1000) + test::deadline_slack());
  Worker c("c", with_tls(authority.make_node("c")));
  EXPECT_EQ(c.node->connect(address, patience())->name(), "b");
}

}  // namespace
}  // namespace cohort::net
