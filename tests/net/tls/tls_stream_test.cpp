#include <gtest/gtest.h>
#include <poll.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <chrono>
#include <filesystem>
#include <memory>
#include <optional>
#include <random>
#include <string>

#include "cohort/base/error.h"
#include "cohort/base/files/fd.h"
#include "cohort/base/threads/wait.h"
#include "cohort/net/internal/tls/stream.h"
#include "tests/support/environment.h"
#include "tests/support/net/certificates.h"
#include "tests/support/patience.h"
#include "tests/support/temp_dir.h"
#include "tests/support/throws.h"

namespace cohort::net {
namespace {

using test::Authority;

TEST(TlsContextTest, EachFileThatCannotBeUsedIsNamedWithTheReason) {
  const Authority authority;
  const TlsOptions good = authority.make_node("good"), other = authority.make_node("other");
  EXPECT_NO_THROW(TlsContext{good});
  const std::filesystem::path folder = good.key.parent_path();
  const auto expect = [&](std::filesystem::path TlsOptions::*file, const std::filesystem::path& path,
                          const std::string& problem) {
    TlsOptions bad = good;
    bad.*file = path;
    COHORT_EXPECT_THROW_WITH(TlsContext(bad), UsageError, path.string() + ", " + problem);
  };
  for (const auto file : {&TlsOptions::certificate, &TlsOptions::key, &TlsOptions::authorities}) {
    expect(file, folder / "missing", "cannot be read: No such file or directory");
    expect(file, folder, "is no regular file");
    test::write_file(folder / "text", "no certificate");
    std::filesystem::permissions(folder / "text", std::filesystem::perms::owner_read);
    expect(file, folder / "text",
           file == &TlsOptions::key ? "has no private key in PEM" : "has no certificate in PEM");
    std::filesystem::remove(folder / "text");
  }
  expect(&TlsOptions::certificate, other.certificate.parent_path() / "missing", "cannot be read");
  COHORT_EXPECT_THROW_WITH(
      TlsContext({good.certificate, other.key, good.authorities}), UsageError,
      other.key.string() + ", does not belong to the certificate " + good.certificate.string());
  authority.encrypt(folder / "encrypted");
  expect(&TlsOptions::key, folder / "encrypted", "has a passphrase, and nobody is asked for it");
  std::filesystem::permissions(other.key, std::filesystem::perms::others_read,
                               std::filesystem::perm_options::add);
  expect(&TlsOptions::key, other.key, "may be read by others. Try: chmod 600 " + other.key.string());
  test::write_file(folder / "damaged", "-----BEGIN CERTIFICATE-----\nMIIB\n-----END CERTIFICATE-----\n");
  expect(&TlsOptions::certificate, folder / "damaged", "has a certificate that is damaged");
  const TlsOptions old = authority.make_node("old", std::chrono::seconds(-1));
  COHORT_EXPECT_THROW_WITH(TlsContext{old}, UsageError,
                           old.certificate.string() + ", has expired: it was valid until ");
}

// So long as it lives this process can open no file.
class NoDescriptors {
 public:
  NoDescriptors() {
    ::getrlimit(RLIMIT_NOFILE, &before_);
    const rlimit none{0, before_.rlim_max};
    ::setrlimit(RLIMIT_NOFILE, &none);
  }
  ~NoDescriptors() { ::setrlimit(RLIMIT_NOFILE, &before_); }

 private:
  rlimit before_{};
};

std::string subject_of(const TlsContext& context, TlsContext::Time now) {
  const std::unique_ptr<SSL, Releaser<&::SSL_free>> connection(context.make_connection(now));
  std::array<char, 64> name{};
  ::X509_NAME_get_text_by_NID(::X509_get_subject_name(::SSL_get_certificate(connection.get())),
                              NID_commonName, name.data(), name.size());
  return name.data();
}

// What is wrong with a file may end without a change of it.
TEST(TlsContextTest, FilesThatCouldNotBeUsedAreTriedAgainOnceASecond) {
  const Authority authority;
  const TlsOptions files = authority.make_node("old"), later = authority.make_node("new");
  const TlsContext context(files);
  TlsContext::Time now;
  EXPECT_EQ(subject_of(context, now), "old");
  std::filesystem::rename(later.certificate, files.certificate);
  std::filesystem::rename(later.key, files.key);
  {
    const NoDescriptors none_are_left;
    EXPECT_EQ(subject_of(context, now), "old") << "those from before";
  }
  EXPECT_EQ(subject_of(context, now + std::chrono::milliseconds(999)), "old");
  now += std::chrono::seconds(1);
  {
    const NoDescriptors none_are_left;
    EXPECT_EQ(subject_of(context, now), "old") << "tried again, and not for another second";
  }
  EXPECT_EQ(subject_of(context, now + std::chrono::milliseconds(999)), "old");
  EXPECT_EQ(subject_of(context, now + std::chrono::seconds(1)), "new");
}

TEST(TlsOptionsTest, TheEnvironmentNamesAllThreeFilesOrNone) {
  const auto set = [](const char* name, const char* value) { return test::ScopedEnv(name, value); };
  {
    const auto a = set("COHORT_TLS_CERTIFICATE", ""), b = set("COHORT_TLS_KEY", ""),
               c = set("COHORT_TLS_AUTHORITIES", "");
    EXPECT_FALSE(TlsOptions::of_process());
  }
  const auto a = set("COHORT_TLS_CERTIFICATE", "c.pem"), b = set("COHORT_TLS_AUTHORITIES", "a.pem");
  {
    const auto c = set("COHORT_TLS_KEY", "");
    COHORT_EXPECT_THROW_WITH(TlsOptions::of_process(), UsageError, "COHORT_TLS_KEY is not set");
  }
  const auto c = set("COHORT_TLS_KEY", "k.pem");
  const std::optional<TlsOptions> options = TlsOptions::of_process();
  ASSERT_TRUE(options);
  EXPECT_EQ(options->certificate, "c.pem");
  EXPECT_EQ(options->key, "k.pem");
  EXPECT_EQ(options->authorities, "a.pem");
}

// Two ends of a pair of sockets, each with a certificate of the authority.
struct Pair {
  explicit Pair(const Authority& authority, int socket_bytes = 0)
      : caller_context(authority.make_node("caller")), listener_context(authority.make_node("listener")) {
    std::array<int, 2> ends{};
    if (::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0, ends.data()) != 0) std::abort();
    for (std::size_t i = 0; i < 2; ++i) {
      sockets[i] = base::Fd(ends[i]);
      if (socket_bytes > 0) ::setsockopt(ends[i], SOL_SOCKET, SO_SNDBUF, &socket_bytes, sizeof socket_bytes);
    }
    caller.emplace(caller_context, ends[0], Role::kCaller);
    listener.emplace(listener_context, ends[1], Role::kListener);
  }
  void shake_hands() {
    for (int i = 0; i < 1000 && !(caller->is_ready() && listener->is_ready()); ++i) {
      caller->handshake();
      listener->handshake();
    }
    ASSERT_TRUE(caller->is_ready() && listener->is_ready());
  }
  TlsContext caller_context, listener_context;
  std::array<base::Fd, 2> sockets;
  std::optional<TlsStream> caller, listener;
};

bool is_readable(const base::Fd& socket) {
  pollfd file{socket.get(), POLLIN, 0};
  return ::poll(&file, 1, 0) == 1;
}

// Reads only where the socket is readable, as a loop does: what stayed inside would be missed.
TEST(TlsStreamTest, WhoReadsWhenTheSocketIsReadableMissesNothing) {
  const Authority authority;
  for (const int socket_bytes : {4096, 0}) {
    Pair pair(authority, socket_bytes);
    pair.shake_hands();
    pair.caller->set_records_of_a_key(5);  // and more keys on the way
    std::mt19937 random(7);
    std::string sent(3'000'000, '\0'), came;
    for (char& byte : sent) byte = static_cast<char>(random());
    std::string room(TlsStream::kMinReadBytes + 50'000, '\0');
    std::size_t written = 0;
    const base::Deadline deadline = test::patience();
    while (came.size() < sent.size() && !deadline.expired()) {
      if (written < sent.size()) {
        // Parts of any size, the last of them unlike those of the next call.
        std::vector<iovec> parts;
        std::size_t end = written;
        for (std::size_t i = random() % 9 + 1; i > 0; --i) {
          const std::size_t size =
              std::min<std::size_t>(sent.size() - end, random() % 3 == 0 ? random() % 90'000 : 40);
          if (size > 0) parts.push_back({sent.data() + end, size});
          end += size;
        }
        // Those that were to be written and were not come again.
        parts.push_back({sent.data() + end, std::min<std::size_t>(sent.size() - end, 100'000)});
        const ssize_t size = pair.caller->write(parts);
        if (size > 0) written += static_cast<std::size_t>(size);
        ASSERT_TRUE(size >= 0 || errno == EAGAIN) << pair.caller->error();
      }
      if (!is_readable(pair.sockets[1])) continue;
      const std::size_t first = random() % 40'000;
      const iovec parts[] = {{room.data(), first}, {room.data() + first, room.size() - first}};
      const ssize_t size = pair.listener->read(parts);
      ASSERT_TRUE(size > 0 || (size < 0 && errno == EAGAIN)) << pair.listener->error();
      if (size > 0) came.append(room, 0, static_cast<std::size_t>(size));
    }
    EXPECT_TRUE(came == sent);
  }
}

TEST(TlsStreamTest, BothEndsHaveTheBindingOfTheirConnectionAlone) {
  const Authority authority;
  Pair first(authority), second(authority);
  first.shake_hands();
  second.shake_hands();
  EXPECT_EQ(first.caller->channel_binding(), first.listener->channel_binding());
  EXPECT_EQ(first.caller->channel_binding().size(), 32U);
  EXPECT_NE(first.caller->channel_binding(), second.caller->channel_binding());
}

TEST(TlsStreamTest, WhatCameBeforeTheEndIsReadAfterAWriteThatFailed) {
  const Authority authority;
  Pair pair(authority);
  pair.shake_hands();
  std::string sent(50'000, 'x'), room(200'000, '\0');
  const iovec from{sent.data(), sent.size()}, to{room.data(), room.size()};
  ASSERT_EQ(pair.listener->write({&from, 1}), 50'000);
  pair.sockets[1].close();
  EXPECT_EQ(pair.caller->write({&from, 1}), -1);
  EXPECT_EQ(errno, EPIPE);
  EXPECT_EQ(pair.caller->read({&to, 1}), 50'000);
  EXPECT_EQ(pair.caller->read({&to, 1}), 0);
}

TEST(TlsStreamTest, AnEndThatClosesAndOneThatIsNoTlsAreTold) {
  const Authority authority;
  Pair pair(authority);
  pair.shake_hands();
  pair.sockets[0].close();
  std::string room(TlsStream::kMinReadBytes, '\0');
  const iovec part{room.data(), room.size()};
  EXPECT_EQ(pair.listener->read({&part, 1}), 0);
  EXPECT_EQ(pair.listener->error(), "the connection was closed");

  Pair cut(authority);
  cut.caller->handshake();
  cut.sockets[1].close();
  EXPECT_EQ(cut.caller->handshake(), TlsStatus::kLost);
  EXPECT_FALSE(cut.caller->error().empty());

  Pair damaged(authority);
  damaged.shake_hands();
  const std::string record =
      std::string("\x17\x03\x03\0\x20", 5) + std::string(32, 'x');  // which nobody encrypted
  ASSERT_EQ(::send(damaged.sockets[0].get(), record.data(), record.size(), 0), 37);
  EXPECT_EQ(damaged.listener->read({&part, 1}), -1);
  EXPECT_EQ(errno, EPROTO);
  EXPECT_NE(damaged.listener->error().find("TLS with who connected failed: "), std::string::npos)
      << damaged.listener->error();
}

// For the first message OpenSSL would take as much memory as it says that it has, up to 128 KiB.
TEST(TlsStreamTest, FirstBytesThatBeginNoTlsAreRejectedBeforeOpenSslReadsThem) {
  const Authority authority;
  const std::string long_hello("\x16\x03\x01\x40\x00\x01\x01\x86\xa0", 9),
      finished("\x16\x03\x03\0\x40\x14\0\0\x20", 9);
  for (const std::string& bytes : {long_hello, finished}) {
    Pair pair(authority);
    ASSERT_EQ(::send(pair.sockets[0].get(), bytes.data(), bytes.size(), 0), 9);
    COHORT_EXPECT_THROW_WITH(pair.listener->handshake(), CommError, "is none that begins a TLS handshake");
  }
  Pair pair(authority);
  ASSERT_EQ(::send(pair.sockets[0].get(), "C", 1, 0), 1);
  COHORT_EXPECT_THROW_WITH(pair.listener->handshake(), CommError, "who connected does not use TLS");
  std::array<char, 16> answer{};
  EXPECT_EQ(::recv(pair.sockets[0].get(), answer.data(), answer.size(), 0), 7) << "an alert";
  ASSERT_EQ(::send(pair.sockets[1].get(), "H", 1, 0), 1);
  COHORT_EXPECT_THROW_WITH(pair.caller->handshake(), CommError, "who listens there does not use TLS");
}

}  // namespace
}  // namespace cohort::net
