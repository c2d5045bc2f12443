#include "cohort/net/internal/session.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <random>

#include "cohort/base/error.h"
#include "cohort/net/internal/bytes.h"
#include "tests/support/throws.h"

namespace cohort::net {
namespace {

using std::chrono::milliseconds;

Message message_of(std::uint32_t channel, std::size_t size, const std::string& header = "") {
  const std::shared_ptr<std::byte> memory = allocate_aligned(size);
  std::memset(memory.get(), static_cast<int>(channel), size);
  Message message;
  message.channel = channel;
  message.header = header;
  message.payloads.push_back({memory, {memory.get(), size}});
  return message;
}

// The next bytes of an outbox, all of them written.
std::string take(Outbox& box, std::size_t most = 64 << 20) {
  std::string bytes;
  for (std::vector<iovec> parts; box.has_bytes() && bytes.size() < most; parts.clear()) {
    box.gather(parts, 0, 0, 1);
    std::size_t size = 0;
    for (const iovec& part : parts) {
      bytes.append(static_cast<const char*>(part.iov_base), part.iov_len);
      size += part.iov_len;
    }
    if (size == 0) break;
    box.written(size);
  }
  return bytes;
}

struct Receiver {
  explicit Receiver(std::size_t window = 64 << 20) : box(window, allocate_aligned, released) {}
  void feed(const std::string& bytes) {
    box.consume(std::as_bytes(std::span(bytes)), [](const FrameHeader&) {}, messages);
  }
  std::shared_ptr<Released> released = std::make_shared<Released>();
  Inbox box;
  std::vector<Message> messages;
};

std::string frame(FrameKind kind, std::uint64_t number, const std::string& body) {
  FrameHeader header;
  header.kind = kind;
  header.length = static_cast<std::uint32_t>(body.size());
  header.message = number;
  return encode(header) + body;
}
std::string table(std::uint32_t channel, const std::vector<std::uint64_t>& sizes) {
  std::string bytes;
  put(bytes, channel);
  put(bytes, static_cast<std::uint32_t>(sizes.size()));
  for (const std::uint64_t size : sizes) put(bytes, size);
  return bytes;
}

TEST(OutboxTest, AShortMessageWaitsForOnePieceOfALongOne) {
  Outbox box(64 << 20);
  Receiver receiver;
  box.push(message_of(1, 10 << 20));
  receiver.feed(take(box, 1));
  EXPECT_TRUE(receiver.messages.empty());
  box.push(message_of(2, 100, "short"));
  receiver.feed(take(box, 1));
  ASSERT_EQ(receiver.messages.size(), 1U);
  EXPECT_EQ(receiver.messages[0].header, "short");
  receiver.feed(take(box));
  ASSERT_EQ(receiver.messages.size(), 2U);
  EXPECT_EQ(receiver.messages[1].payloads[0].bytes.size(), std::size_t{10 << 20});
}

TEST(OutboxTest, ManyShortMessagesDoNotHoldBackALongOne) {
  Outbox box(64 << 20);
  Receiver receiver;
  box.push(message_of(1, 600'000, "long"));
  for (int i = 0; i < 10'000; ++i) box.push(message_of(2, 200));
  std::size_t before = 0;
  while (box.has_bytes() && (receiver.messages.empty() || receiver.messages.back().channel == 2)) {
    receiver.feed(take(box, 1));
    before = receiver.messages.size();
  }
  EXPECT_LT(before, 3'000U);
  EXPECT_EQ(receiver.messages.back().header, "long");
}

TEST(OutboxTest, TheWindowHoldsBackWhatHasNotBegun) {
  Outbox box(1'000'000);
  box.push(message_of(1, 900'000));
  box.push(message_of(2, 300'000));
  box.push(message_of(3, 10));
  Receiver receiver(1'000'000);
  receiver.feed(take(box));
  ASSERT_EQ(receiver.messages.size(), 2U) << "the short message fits";
  EXPECT_TRUE(box.is_blocked());
  EXPECT_EQ(box.num_queued(), 1U);
  receiver.messages.clear();  // used
  box.on_peer_state(receiver.box.acknowledged(), receiver.released->bytes);
  EXPECT_FALSE(box.is_blocked());
  receiver.feed(take(box));
  EXPECT_EQ(receiver.messages.size(), 1U);
}

// The header of a message that waited says what is true as it goes, over each link.
TEST(OutboxTest, AMessageThatHasNotBegunMayBeReplaced) {
  constexpr std::size_t kWindow = 1'000'000;
  Outbox box(kWindow);
  Receiver receiver(kWindow);
  const std::uint64_t begun = box.push(message_of(1, 900'000, "begun")),
                      first = box.push(message_of(2, 800'000, "first")),
                      second = box.push(message_of(2, 700'000, "second"));
  box.push(message_of(2, 10, "third"));
  receiver.feed(take(box));
  ASSERT_EQ(receiver.messages.size(), 1U);
  EXPECT_TRUE(box.is_blocked());
  Message other = message_of(1, 10, "other");
  EXPECT_FALSE(box.replace(begun, other)) << "its bytes are on their way";
  EXPECT_EQ(other.header, "other");
  other.channel = 2;
  EXPECT_TRUE(box.replace(second, other));
  EXPECT_EQ(other.header, "second");
  EXPECT_FALSE(box.has_bytes()) << "the first of the channel has no room";
  other = message_of(2, 0, "shorter");
  EXPECT_TRUE(box.replace(first, other));
  EXPECT_EQ(other.header, "first");
  EXPECT_EQ(box.num_queued(), 3U);
  receiver.feed(take(box));
  std::vector<std::string> headers;
  for (const Message& message : receiver.messages) headers.push_back(message.header);
  EXPECT_EQ(headers, (std::vector<std::string>{"begun", "shorter", "other", "third"}));
  EXPECT_FALSE(box.replace(first, other)) << "it has gone";
  receiver.messages.clear();
  box.on_peer_state(receiver.box.acknowledged(), receiver.released->bytes);
  EXPECT_EQ(box.bytes_on_the_way(), 0U);
  EXPECT_EQ(box.num_kept(), 0U);
}

TEST(OutboxTest, AMessageIsToldWhenItBegins) {
  Outbox box(1'000'000);
  int num_begun = 0;
  const auto tell = [&num_begun](std::span<char> header) {
    ++num_begun;
    header[0] = static_cast<char>('0' + num_begun);
  };
  box.push(message_of(1, 900'000));
  Message waits = message_of(2, 300'000, "?");
  waits.on_begin = tell;
  box.push(std::move(waits));
  Receiver receiver(1'000'000);
  receiver.feed(take(box));
  EXPECT_EQ(num_begun, 0) << "it waits for the window";
  receiver.messages.clear();
  box.on_peer_state(receiver.box.acknowledged(), receiver.released->bytes);
  take(box);  // which is lost with the link
  EXPECT_EQ(num_begun, 1) << "for all its pieces";
  receiver.box.restart();
  box.restart(receiver.box.acknowledged());
  receiver.feed(take(box));
  ASSERT_EQ(receiver.messages.size(), 1U);
  EXPECT_EQ(receiver.messages[0].header, "2");
}

// The receiver has asked for them: its handlers may wait for them while calls fill the window.
TEST(OutboxTest, AnswersDoNotWaitForTheWindow) {
  Outbox box(1'000'000);
  Receiver receiver(1'000'000);
  box.push(message_of(1, 900'000));
  box.push(message_of(2, 800'000, "call"));
  for (const std::size_t size : {std::size_t{10}, std::size_t{2'000'000}}) {
    box.push(message_of(kAnswerChannels + static_cast<std::uint32_t>(size), size, "answer"));
  }
  receiver.feed(take(box));
  ASSERT_EQ(receiver.messages.size(), 3U);
  EXPECT_EQ(receiver.messages[0].header, "answer") << "short ones go first";
  EXPECT_EQ(receiver.messages[2].header, "answer");
  EXPECT_TRUE(box.is_blocked());
  receiver.messages.clear();
  EXPECT_EQ(receiver.released->bytes, cost_of(1, 900'000));
  box.on_peer_state(receiver.box.acknowledged(), receiver.released->bytes);
  receiver.feed(take(box));
  ASSERT_EQ(receiver.messages.size(), 1U);
  EXPECT_EQ(receiver.messages[0].header, "call");
}

TEST(OutboxTest, ShortOnesOfOneKindDoNotHoldBackALongOneOfTheOther) {
  for (const std::uint32_t of_long : {std::uint32_t{1}, kAnswerChannels + 1}) {
    Outbox box(64 << 20);
    Receiver receiver;
    box.push(message_of(of_long, 600'000, "long"));
    const std::uint32_t of_short = of_long < kAnswerChannels ? kAnswerChannels : 0;
    for (int i = 0; i < 10'000; ++i) box.push(message_of(of_short, 200));
    std::size_t before = 0;
    while (box.has_bytes() && (receiver.messages.empty() || receiver.messages.back().header != "long")) {
      receiver.feed(take(box, 1));
      before = receiver.messages.size();
    }
    EXPECT_LT(before, 4'000U);
  }
}

TEST(OutboxTest, CallsAndAnswersTakeTurns) {
  Outbox box(64 << 20);
  Receiver receiver;
  for (int i = 0; i < 100; ++i) {
    box.push(message_of(0, 100, "call"));
    box.push(message_of(kAnswerChannels, 100, "answer"));
  }
  receiver.feed(take(box, 5'000));
  ASSERT_GT(receiver.messages.size(), 10U);
  const auto num_calls = std::count_if(receiver.messages.begin(), receiver.messages.end(),
                                       [](const Message& message) { return message.header == "call"; });
  EXPECT_NEAR(static_cast<double>(num_calls), static_cast<double>(receiver.messages.size()) / 2, 1);
}

TEST(OutboxTest, AMessageAboveTheWindowGoesAlone) {
  Outbox box(1'000);
  Receiver receiver(1'000);
  box.push(message_of(1, 700'000));
  box.push(message_of(1, 10));
  receiver.feed(take(box));
  ASSERT_EQ(receiver.messages.size(), 1U);
  receiver.messages.clear();
  box.on_peer_state(1, receiver.released->bytes);
  receiver.feed(take(box));
  EXPECT_EQ(receiver.messages.size(), 1U);
}

TEST(OutboxTest, WhatIsNotAcknowledgedGoesAgainAndComesOnce) {
  Outbox box(64 << 20);
  Receiver receiver;
  for (int i = 0; i < 3; ++i) box.push(message_of(1, 400'000, std::to_string(i)));
  box.push(message_of(2, 0, "empty"));
  const std::string bytes = take(box, 900'000);
  receiver.feed(bytes.substr(0, 700'000));  // the link breaks in mid-frame
  const std::size_t before = receiver.messages.size();
  EXPECT_GE(before, 1U);
  receiver.box.restart();
  box.restart(0);
  receiver.feed(take(box));
  ASSERT_EQ(receiver.messages.size(), 4U);
  int next = 0;
  for (const Message& message : receiver.messages) {
    if (message.channel == 1) {
      EXPECT_EQ(message.header, std::to_string(next++));
    }
  }
  receiver.messages.clear();
  box.on_peer_state(receiver.box.acknowledged(), receiver.released->bytes);
  EXPECT_EQ(box.num_kept(), 0U);
  EXPECT_EQ(box.bytes_on_the_way(), 0U) << "what came twice counts once";
}

// Messages after a long one had come whole: once the long one is whole too, all of them are acknowledged,
// also those that have not gone again.
TEST(OutboxTest, WhatCameOverAnEarlierLinkIsAcknowledgedBeforeItGoesAgain) {
  Outbox box(64 << 20);
  Receiver receiver;
  box.push(message_of(1, 400'000));
  receiver.feed(take(box, 1));  // a piece of it
  for (int i = 0; i < 5; ++i) box.push(message_of(2, 100));
  for (int i = 0; i < 5; ++i) receiver.feed(take(box, 1));  // a frame each
  EXPECT_EQ(receiver.messages.size(), 5U);
  EXPECT_EQ(receiver.box.acknowledged(), 0U);
  receiver.box.restart();
  box.restart(0);
  receiver.feed(take(box, 300'000));
  EXPECT_EQ(receiver.messages.size(), 6U);
  EXPECT_EQ(receiver.box.acknowledged(), 6U);
  box.on_peer_state(6, 0);
  EXPECT_EQ(box.num_kept(), 0U);
  EXPECT_FALSE(box.has_bytes());
  box.push(message_of(2, 100));
  receiver.feed(take(box));
  EXPECT_EQ(receiver.messages.size(), 7U);
}

TEST(OutboxTest, WhatCannotBeIsAnError) {
  Outbox box(1'000'000);
  COHORT_EXPECT_THROW_WITH(box.on_peer_state(1, 0), CommError, "message 1 was acknowledged");
  COHORT_EXPECT_THROW_WITH(box.on_peer_state(0, 5), CommError, "5 bytes released");
  COHORT_EXPECT_THROW_WITH(box.restart(3), CommError, "the peer has message 3 of 0");
  box.push(message_of(1, 600'000));
  take(box, 1);
  COHORT_EXPECT_THROW_WITH(box.on_peer_state(1, 0), CommError, "before all of it was sent");
  Message many;
  many.payloads.resize(kMaxPayloads + 1);
  COHORT_EXPECT_THROW_WITH(box.push(std::move(many)), UsageError, "16001 payloads");
  Message long_header;
  long_header.header.resize(kMaxHeaderBytes + 1);
  COHORT_EXPECT_THROW_WITH(box.push(std::move(long_header)), UsageError, "expected at most 67108864");
}

TEST(InboxTest, WhatNoPeerSendsIsAnError) {
  const auto error_of = [](const std::vector<std::string>& frames, std::size_t window = 1'000'000) {
    Receiver receiver(window);
    try {
      for (const std::string& bytes : frames) receiver.feed(bytes);
    } catch (const CommError& error) {
      return std::string(error.what());
    }
    return std::string("none");
  };
  const std::string begin = frame(FrameKind::kBegin, 1, table(0, {0, 100}));
  EXPECT_EQ(error_of({begin}), "none");
  EXPECT_NE(error_of({begin, begin}).find("message 1 begins twice"), std::string::npos);
  EXPECT_NE(error_of({frame(FrameKind::kBegin, 2, table(0, {0}))}).find("begins after message 0"),
            std::string::npos);
  EXPECT_NE(error_of({frame(FrameKind::kBegin, 0, table(0, {5}))}).find("no number"), std::string::npos);
  EXPECT_NE(
      error_of({frame(FrameKind::kBegin, 1, table(0, {1ULL << 40}))}).find("the header of a message has"),
      std::string::npos);
  EXPECT_NE(error_of({frame(FrameKind::kData, 1, "x")}).find("has not begun"), std::string::npos);
  EXPECT_NE(
      error_of({begin, frame(FrameKind::kData, 1, std::string(101, 'x'))}).find("longer than its table"),
      std::string::npos);
  EXPECT_NE(error_of({frame(FrameKind::kBegin, 1, table(0, {0}) + "x")}).find("longer than its table"),
            std::string::npos);
  EXPECT_NE(error_of({frame(FrameKind::kBegin, 1, table(0, {}))}).find("0 parts"), std::string::npos);
  EXPECT_NE(error_of({frame(FrameKind::kBegin, 1, "abc")}).find("no table"), std::string::npos);
  std::string cut_table = table(0, {1, 2});
  cut_table.resize(cut_table.size() - 3);
  EXPECT_NE(error_of({frame(FrameKind::kBegin, 1, cut_table)}).find("table of a message is longer"),
            std::string::npos);
  EXPECT_NE(error_of({frame(FrameKind::kBegin, 1, table(0, {~0ULL, ~0ULL}))}).find("64 TiB"),
            std::string::npos);
  EXPECT_NE(error_of({frame(FrameKind::kBegin, 1, table(0, {0, 1ULL << 45}))}).find("no memory"),
            std::string::npos);
  EXPECT_NE(error_of({begin, frame(FrameKind::kBegin, 2, table(0, {0, 2'000'000}))}).find("are not used yet"),
            std::string::npos);
  EXPECT_NE(error_of({frame(FrameKind::kAck, 0, "x")}).find("expected at most 0"), std::string::npos);
  EXPECT_NE(error_of({std::string(32, '\7')}).find("a frame is of kind"), std::string::npos);
}

TEST(InboxTest, RandomFramesAreMessagesOrAnError) {
  std::mt19937 random(5);
  int errors = 0, messages = 0;
  for (int round = 0; round < 4'000; ++round) {
    Receiver receiver(100'000);
    try {
      std::uint64_t number = 0;
      for (int i = 0; i < 8; ++i) {
        const bool begins = random() % 2 == 0;
        const std::string data(random() % 200, 'x');
        std::string body = begins ? table(random() % 3, {random() % 100, random() % 100}) + data : data;
        if (random() % 8 == 0) body[random() % std::max<std::size_t>(body.size(), 1)] ^= 1;
        std::string bytes =
            frame(begins ? FrameKind::kBegin : FrameKind::kData, begins ? ++number : number, body);
        if (random() % 8 == 0) bytes[random() % bytes.size()] ^= static_cast<char>(1 << random() % 8);
        receiver.feed(bytes);
      }
    } catch (const CommError&) {
      ++errors;
    }
    messages += static_cast<int>(receiver.messages.size());
  }
  EXPECT_GT(errors, 100);
  EXPECT_GT(messages, 20);
}

TEST(SessionTest, SilenceIsSeenInTimeAndOnesOwnPauseIsNone) {
  Time now = Time() + std::chrono::hours(1);
  Session session(Role::kCaller, {}, allocate_aligned, nullptr, now);
  session.link_up(0, now);
  const Time begin = now;
  while (!session.ended()) {
    now = std::max(now + milliseconds(1), session.next_time());
    session.tick(now);
    for (std::vector<iovec> parts; session.wants_to_write(); parts.clear()) {
      session.gather(parts);
      session.written(kFrameHeaderBytes, now);
    }
  }
  EXPECT_EQ(session.ended()->kind, DownKind::kSilent);
  EXPECT_NEAR(static_cast<double>((now - begin) / milliseconds(1)), 2000, 5);

  Session paused(Role::kCaller, {}, allocate_aligned, nullptr, now);
  paused.link_up(0, now);
  paused.tick(now + std::chrono::hours(1));
  EXPECT_FALSE(paused.ended()) << "this process did not run for an hour";
}

// Written into a link that was broken already.
TEST(SessionTest, AGoodbyeThatGotLostIsSaidAgain) {
  const Time now = Time() + std::chrono::hours(1);
  Session session(Role::kListener, {}, allocate_aligned, nullptr, now);
  session.link_up(0, now);
  session.leave();
  const auto say_goodbye = [&] {
    session.tick(now);
    std::vector<iovec> parts;
    session.gather(parts);
    ASSERT_EQ(parts.size(), 1U);
    session.written(kFrameHeaderBytes, now);
    EXPECT_TRUE(session.has_left());
    EXPECT_GT(session.next_time(), now);
  };
  say_goodbye();
  session.link_down(now);
  session.link_up(0, now);
  EXPECT_FALSE(session.has_left());
  say_goodbye();
}

TEST(SessionTest, ACallerTriesAgainWithPausesThatGrow) {
  Time now = Time() + std::chrono::hours(1);
  Session session(Role::kCaller, {}, allocate_aligned, nullptr, now);
  std::vector<int> pauses;
  for (int i = 0; i < 13; ++i) {
    const Time before = now;
    while (!session.wants_link(now)) {
      now = std::max(now + milliseconds(1), std::min(session.next_time(), now + milliseconds(50)));
      session.tick(now);
    }
    pauses.push_back(static_cast<int>((now - before) / milliseconds(1)));
    session.start_link();
    EXPECT_FALSE(session.wants_link(now));
    session.connect_failed(true, now);
  }
  EXPECT_FALSE(session.ended()) << "it may come up later";
  EXPECT_LE(pauses[1], 2);
  EXPECT_GE(pauses.back(), 1000);
  EXPECT_LE(pauses.back(), 1050);
  session.link_up(0, now);
  session.link_down(now);
  session.connect_failed(true, now);
  ASSERT_TRUE(session.ended());
  EXPECT_EQ(session.ended()->kind, DownKind::kDied) << "it was there, and is not any more";
}

}  // namespace
}  // namespace cohort::net
