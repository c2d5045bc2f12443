#include "cohort/net/internal/handshake.h"

#include <gtest/gtest.h>

#include <fstream>
#include <random>

#include "cohort/base/error.h"
#include "tests/support/throws.h"

namespace cohort::net {
namespace {

Hello hello_named(const std::string& name) {
  Hello hello;
  hello.name = name;
  hello.incarnation = name + " of today";
  hello.session = 7;
  hello.links = 2;
  hello.received = 1'000'000'000'000;
  hello.place = "here";
  hello.process = 4711;
  hello.began = "99";
  hello.address = "10.0.0.2:41234";
  hello.port = 29'500;
  return hello;
}

// Both sides' bytes, in pieces of at most `piece`, until nothing is left to say.
void talk(Handshake& caller, Handshake& listener, std::size_t piece) {
  const auto pass = [&](Handshake& from, Handshake& to) {
    const std::string bytes = from.take_output();
    for (std::size_t i = 0; i < bytes.size(); i += piece) to.feed(bytes.substr(i, piece));
    if (to.is_time_for_hello()) to.set_hello(hello_named(&to == &caller ? "caller" : "listener"));
    return !bytes.empty();
  };
  for (bool is_talking = true; is_talking;) {
    is_talking = pass(caller, listener);
    is_talking = pass(listener, caller) || is_talking;
  }
}

std::string word(char of) {
  return std::string(32, of);
}

TEST(HandshakeTest, BothSidesLearnWhoTheOtherIsInPiecesOfAnySize) {
  const base::Secret secret = base::Secret::make();
  for (const std::size_t piece : {1U, 2U, 7U, 60U, 4000U}) {
    Handshake caller(Role::kCaller, secret, word('a')), listener(Role::kListener, secret, word('b'));
    talk(caller, listener, piece);
    ASSERT_TRUE(caller.is_done() && listener.is_done()) << piece;
    EXPECT_EQ(caller.peer().name, "listener");
    const Hello& hello = listener.peer();
    EXPECT_EQ(hello.name, "caller");
    EXPECT_EQ(hello.incarnation, "caller of today");
    EXPECT_EQ(hello.session, 7U);
    EXPECT_EQ(hello.links, 2U);
    EXPECT_EQ(hello.received, 1'000'000'000'000U);
    EXPECT_EQ(hello.place, "here");
    EXPECT_EQ(hello.process, 4711);
    EXPECT_EQ(hello.began, "99");
    EXPECT_EQ(hello.address, "10.0.0.2:41234");
    EXPECT_EQ(hello.port, 29'500);
  }
}

TEST(HandshakeTest, BytesAfterItAreKept) {
  Handshake caller(Role::kCaller, std::nullopt, word('a')),
      listener(Role::kListener, std::nullopt, word('b'));
  listener.feed(caller.take_output());
  caller.feed(listener.take_output());
  caller.set_hello(hello_named("caller"));
  listener.feed(caller.take_output());
  listener.set_hello(hello_named("listener"));
  caller.feed(listener.take_output() + "first frame");
  ASSERT_TRUE(caller.is_done());
  EXPECT_EQ(caller.take_rest(), "first frame");
}

TEST(HandshakeTest, AnotherSecretIsSeenByBothBeforeANameIsTold) {
  const base::Secret secret = base::Secret::make(), other = base::Secret::make();
  const std::optional<base::Secret> none;
  for (const auto& [caller_secret, listener_secret] :
       {std::pair(std::optional(secret), std::optional(other)), {secret, none}, {none, secret}}) {
    Handshake caller(Role::kCaller, caller_secret, word('a')),
        listener(Role::kListener, listener_secret, word('b'));
    listener.feed(caller.take_output());
    COHORT_EXPECT_THROW_WITH(caller.feed(listener.take_output()), CommError,
                             "who listens there does not know");
    EXPECT_FALSE(caller.is_time_for_hello());
  }
  // A caller that does not check.
  Handshake caller(Role::kCaller, secret, word('a')), listener(Role::kListener, secret, word('b'));
  listener.feed(caller.take_output());
  listener.take_output();
  COHORT_EXPECT_THROW_WITH(listener.feed(std::string(64, '0')), CommError, "who connected does not know");
  EXPECT_FALSE(listener.is_trusted());
}

TEST(HandshakeTest, CodesCannotBeSentBackOrPlayedAgain) {
  const base::Secret secret = base::Secret::make();
  {  // the listener's own code, sent back
    Handshake caller(Role::kCaller, secret, word('a')), listener(Role::kListener, secret, word('b'));
    listener.feed(caller.take_output());
    const std::string answer = listener.take_output();
    EXPECT_THROW(listener.feed(answer.substr(answer.size() - 64)), CommError);
  }
  // What a caller once said, said again to a listener with another word.
  Handshake caller(Role::kCaller, secret, word('a')), first(Role::kListener, secret, word('b'));
  const std::string begin = caller.take_output();
  first.feed(begin);
  caller.feed(first.take_output());
  const std::string code = caller.take_output();
  Handshake second(Role::kListener, secret, word('c'));
  second.feed(begin);
  EXPECT_THROW(second.feed(code), CommError);
}

TEST(HandshakeTest, StrangersAndOtherVersionsAreRejectedAtOnce) {
  const base::Secret secret = base::Secret::make();
  Handshake http(Role::kListener, secret, word('b'));
  COHORT_EXPECT_THROW_WITH(http.feed("G"), CommError, "no handshake");
  Handshake later(Role::kListener, secret, word('b'));
  COHORT_EXPECT_THROW_WITH(later.feed("COHORTNT\11" + std::string(40, '\0')), CommError, "speaks version 9");
  Handshake shorter(Role::kListener, secret, word('b'));
  COHORT_EXPECT_THROW_WITH(shorter.feed(std::string("COHORTNT\4\0", 10)), CommError, "speaks version 4");
  Handshake caller(Role::kCaller, secret, word('a'));
  COHORT_EXPECT_THROW_WITH(caller.feed("\10" + std::string(1, '\0')), CommError, "speaks version 8");
  // The caller of another version is told this one.
  const std::string first = Handshake(Role::kCaller, secret, word('a')).take_output();
  EXPECT_EQ(later.take_output(), first.substr(8, 2));
  EXPECT_EQ(shorter.take_output(), first.substr(8, 2));
  Handshake flooded(Role::kListener, secret, word('b'));
  flooded.feed("COHORTNT");
  EXPECT_THROW(flooded.feed(std::string(100'000, 'x')), CommError);
}

TEST(HandshakeTest, CodesOfAnotherChannelDoNotMatch) {
  const base::Secret secret = base::Secret::make();
  for (const bool is_same : {true, false}) {
    Handshake caller(Role::kCaller, secret, word('a')), listener(Role::kListener, secret, word('b'));
    caller.bind_to("a channel");
    listener.bind_to(is_same ? "a channel" : "another one");
    if (is_same) {
      talk(caller, listener, 100);
      EXPECT_TRUE(caller.is_done() && listener.is_done());
    } else {
      COHORT_EXPECT_THROW_WITH(talk(caller, listener, 100), CommError, "who listens there does not know");
    }
  }
}

// Each learns it from the other's first bytes.
TEST(HandshakeTest, TlsOfTheOtherSideIsKnownAndAnswered) {
  Handshake listener(Role::kListener, std::nullopt, word('b'));
  listener.feed("\x16");
  COHORT_EXPECT_THROW_WITH(listener.feed(std::string("\x03\x01\x02\0", 4)), CommError,
                           "who connected uses TLS, and this process does not");
  const std::string answer = listener.take_output();
  EXPECT_FALSE(answer.empty() || answer[0] == '\x16' || answer[0] == '\x15');
  Handshake caller(Role::kCaller, std::nullopt, word('a'));
  COHORT_EXPECT_THROW_WITH(caller.feed(std::string("\x15\x03\x03\0\x02\x02\x46", 7)), CommError,
                           "who listens there uses TLS, and this process does not");
  Handshake neither(Role::kListener, std::nullopt, word('b'));
  COHORT_EXPECT_THROW_WITH(neither.feed("\x16GET"), CommError, "no handshake");
}

TEST(HandshakeTest, AnAgentOfTorchrunIsRejectedByName) {
  Handshake listener(Role::kListener, std::nullopt, word('b'));
  listener.feed(std::string("\0\xCE", 2));
  COHORT_EXPECT_THROW_WITH(listener.feed("\xF7\x85\x3C"), CommError,
                           "as agents of torchrun are. Try: `cohort run`");
  Handshake other(Role::kListener, std::nullopt, word('b'));
  COHORT_EXPECT_THROW_WITH(other.feed(std::string("\0GET", 4)), CommError, "no handshake");
}

// Whatever a stranger says, it is sent away, and never trusted.
TEST(HandshakeTest, RandomBytesAreNeverTrusted) {
  std::mt19937 random(3);
  const base::Secret secret = base::Secret::make();
  for (int round = 0; round < 3'000; ++round) {
    const Role role = random() % 2 == 0 ? Role::kCaller : Role::kListener;
    Handshake handshake(role, secret, word('a'));
    std::string bytes = role == Role::kListener ? std::string("COHORTNT\3\0", 10) : std::string("\3\0", 2);
    for (std::size_t i = random() % 300; i > 0; --i) bytes += static_cast<char>(random() % 256);
    try {
      while (!bytes.empty()) {
        const std::size_t size = 1 + random() % bytes.size();
        handshake.feed(bytes.substr(0, size));
        bytes.erase(0, size);
      }
    } catch (const CommError&) {
    }
    ASSERT_FALSE(handshake.is_trusted());
  }
}

}  // namespace
}  // namespace cohort::net
