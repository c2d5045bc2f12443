// Payloads by handle between two sides of a session, without sockets.
#include "cohort/net/internal/handles.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <cstring>
#include <string>
#include <vector>

#include "cohort/base/error.h"
#include "cohort/net/internal/bytes.h"
#include "cohort/net/internal/session.h"
#include "tests/support/throws.h"

namespace cohort::net {
namespace {

constexpr std::size_t kLong = 1 << 20;
const Time kNow = Time() + std::chrono::hours(1);

// A side: its heap, and its session.
struct HandleSide {
  explicit HandleSide(Role role) {
    SessionOptions options;
    options.window = 4 * kLong;
    session.emplace(role, options, allocate_aligned, nullptr, kNow);
  }
  std::shared_ptr<std::byte> block(int mark) const {
    auto memory = heap->allocate(kLong);
    std::memset(memory.get(), mark, kLong);
    return memory;
  }
  const std::shared_ptr<SharedHeap> heap = std::make_shared<SharedHeap>(64 << 20, 64 << 20);
  std::optional<Session> session;
  std::vector<Message> messages;
};

struct HandlePair {
  HandlePair() { link(true); }

  // A new link, over which handles may go.
  void link(bool has_handles) {
    const auto handles = [&](HandleSide& own, std::shared_ptr<MappedHeap>& theirs, const HandleSide& other,
                             const std::shared_ptr<Holder>& holder) -> std::shared_ptr<Handles> {
      if (!has_handles) return nullptr;
      if (!theirs) theirs = MappedHeap::map(base::Fd(::dup(other.heap->descriptor())));
      return std::make_shared<Handles>(own.heap, theirs, holder);
    };
    const std::uint64_t of_a = a.session->received(), of_b = b.session->received();
    for (HandleSide* side : {&a, &b}) side->session->link_down(kNow);
    a.session->link_up(of_b, kNow, handles(a, b_for_a, b, holders[0]));
    b.session->link_up(of_a, kNow, handles(b, a_for_b, a, holders[1]));
  }
  // Passes bytes on until nobody has any, or `most` have gone from `a` to `b`. Returns how many did.
  std::size_t pass(std::size_t most = ~std::size_t{0}) {
    std::size_t passed = 0;
    for (bool has_moved = true; has_moved;) {
      has_moved = move(b, a, ~std::size_t{0}) > 0;
      const std::size_t moved = move(a, b, most - passed);
      passed += moved;
      has_moved = has_moved || moved > 0;
    }
    return passed;
  }
  static std::size_t move(HandleSide& from, HandleSide& to, std::size_t most) {
    std::size_t moved = 0;
    for (std::vector<iovec> parts; from.session->wants_to_write() && moved < most; parts.clear()) {
      from.session->gather(parts);
      std::string bytes;
      for (const iovec& part : parts) bytes.append(static_cast<const char*>(part.iov_base), part.iov_len);
      bytes.resize(std::min(bytes.size(), most - moved));
      from.session->written(bytes.size(), kNow);
      to.session->consume(std::as_bytes(std::span(bytes)), kNow, to.messages);
      moved += bytes.size();
    }
    return moved;
  }

  HandleSide a{Role::kCaller}, b{Role::kListener};
  std::shared_ptr<MappedHeap> a_for_b, b_for_a;
  std::shared_ptr<Holder> holders[2] = {std::make_shared<Holder>(::getpid(), ""),
                                        std::make_shared<Holder>(::getpid(), "")};
};

Message moving(std::shared_ptr<std::byte> memory, std::size_t size = kLong) {
  Message message;
  message.header = "moving";
  const std::span<const std::byte> bytes(memory.get(), size);
  message.payloads.push_back({std::move(memory), bytes, true});
  return message;
}
int mark_of(const Message& message) {
  return std::to_integer<int>(message.payloads.at(0).bytes[kLong / 2]);
}

TEST(HandlesTest, APayloadGoesThereAndBackWithoutItsBytes) {
  HandlePair pair;
  pair.pass();
  auto memory = pair.a.block(3);
  const std::byte* const was = memory.get();
  Message message = moving(std::move(memory));
  message.payloads.insert(message.payloads.begin(), Payload());
  pair.a.session->send(std::move(message));
  EXPECT_LT(pair.pass(), 200U);
  ASSERT_EQ(pair.b.messages.size(), 1U);
  EXPECT_EQ(pair.b.messages[0].header, "moving");
  ASSERT_EQ(pair.b.messages[0].payloads.size(), 2U);
  EXPECT_FALSE(pair.b.messages[0].payloads[0].moves);
  Message back = std::move(pair.b.messages[0]);
  EXPECT_TRUE(back.payloads[1].moves);
  std::memset(const_cast<std::byte*>(back.payloads[1].bytes.data()), 9, kLong);
  back.credit.reset();
  pair.b.messages.clear();
  pair.b.session->send(std::move(back));
  pair.pass();
  ASSERT_EQ(pair.a.messages.size(), 1U);
  EXPECT_EQ(pair.a.messages[0].payloads[1].bytes.data(), was) << "the memory that was sent";
  EXPECT_EQ(std::to_integer<int>(was[kLong - 1]), 9);
  pair.a.messages.clear();
  pair.a.session->tick(kNow + std::chrono::milliseconds(10));  // it acknowledges
  pair.pass();
  EXPECT_EQ(pair.a.heap->bytes_in_use(), 0U);
  EXPECT_EQ(pair.a.session->outbox().bytes_by_handle(), kLong);
}

TEST(HandlesTest, WhatDoesNotMoveOrIsShortOrLiesElsewhereIsCopied) {
  HandlePair pair;
  pair.pass();
  const auto memory = pair.a.block(3);
  Message stays = moving(memory);
  stays.payloads[0].moves = false;
  pair.a.session->send(stays);
  pair.a.session->send(moving(memory, kLeastBytesByHandle - 1));
  pair.a.session->send(moving(allocate_aligned(kLong)));
  EXPECT_GT(pair.pass(), 2 * kLong);
  ASSERT_EQ(pair.b.messages.size(), 3U);
  for (const Message& message : pair.b.messages) {
    EXPECT_FALSE(message.payloads[0].moves);
    EXPECT_FALSE(pair.a_for_b->find(message.payloads[0].bytes));
  }
  EXPECT_EQ(mark_of(pair.b.messages[0]), 3);
}

TEST(HandlesTest, BeforeThePeerSaysThatItMapsTheHeapPayloadsAreCopied) {
  HandlePair pair;
  pair.a.session->send(moving(pair.a.block(3)));
  EXPECT_GT(HandlePair::move(pair.a, pair.b, ~std::size_t{0}), kLong);
  ASSERT_EQ(pair.b.messages.size(), 1U);
  EXPECT_EQ(mark_of(pair.b.messages[0]), 3);
}

TEST(HandlesTest, AMessageThatGoesAgainIsTakenOnce) {
  for (const bool comes_over_handles : {true, false}) {
    for (const std::size_t at : {0, 40, 70, 1000}) {
      HandlePair pair;
      pair.pass();
      for (int i = 0; i < 2; ++i) pair.a.session->send(moving(pair.a.block(i)));
      pair.pass(at);
      pair.link(comes_over_handles);
      pair.pass();
      ASSERT_EQ(pair.b.messages.size(), 2U) << at;
      for (int i = 0; i < 2; ++i) EXPECT_EQ(mark_of(pair.b.messages[static_cast<std::size_t>(i)]), i) << at;
      pair.b.messages.clear();
      pair.b.session->tick(kNow + std::chrono::milliseconds(10));
      pair.pass();
      EXPECT_EQ(pair.a.session->outbox().num_kept(), 0U);
      EXPECT_EQ(pair.a.heap->bytes_in_use(), 0U) << at;
    }
  }
}

TEST(HandlesTest, PayloadsByHandleCountInTheWindow) {
  HandlePair pair;
  pair.pass();
  for (int i = 0; i < 6; ++i) pair.a.session->send(moving(pair.a.block(i)));
  pair.pass();
  EXPECT_EQ(pair.b.messages.size(), 3U) << "4 MiB may be on their way";
  pair.b.messages.clear();
  pair.b.session->tick(kNow + std::chrono::milliseconds(10));
  pair.pass();
  EXPECT_EQ(pair.b.messages.size(), 3U);
}

TEST(HandlesTest, ShortMessagesPassManyLongOnesThatGoByHandle) {
  HandlePair pair;
  pair.pass();
  for (std::uint32_t i = 0; i < 3; ++i) {
    Message message = moving(pair.a.block(1));
    message.channel = kAnswerChannels + 1 + i;
    pair.a.session->send(std::move(message));
  }
  for (int i = 0; i < 3'000; ++i) {
    Message message;
    message.channel = kAnswerChannels;
    message.header.assign(300, 's');
    pair.a.session->send(std::move(message));
  }
  pair.pass(600'000);
  std::size_t num_long = 0;
  for (const Message& message : pair.b.messages) num_long += message.payloads.size();
  EXPECT_GE(num_long, 1U) << "long ones have turns";
  EXPECT_GT(pair.b.messages.size(), 100U);
}

TEST(HandlesTest, TheEndOfASessionLeavesWhatTheOtherSideHas) {
  HandlePair pair;
  pair.pass();
  pair.a.session->send(moving(pair.a.block(1)));
  pair.pass();
  Message kept = std::move(pair.b.messages.at(0));
  pair.a.session->send(moving(pair.a.block(2)));  // does not arrive
  pair.a.session->end(DownKind::kSilent, "has been silent");
  {
    const std::vector<Message> unacknowledged = pair.a.session->take_unacknowledged();
    ASSERT_EQ(unacknowledged.size(), 1U) << "the first has come, and its receiver may write it";
    EXPECT_EQ(mark_of(unacknowledged[0]), 2);
  }
  EXPECT_EQ(pair.a.heap->bytes_in_use(), kLong);
  EXPECT_TRUE(pair.holders[0]->is_lost());
  EXPECT_EQ(mark_of(kept), 1);
  kept = {};
  EXPECT_EQ(pair.a.heap->bytes_in_use(), 0U);
}

// A frame that `a` did not make.
std::string error_of_table(std::uint64_t header, const std::vector<std::uint64_t>& sizes,
                           const std::string& bytes, bool has_handles = true) {
  HandlePair pair;
  if (!has_handles) pair.link(false);
  std::string body;
  put(body, std::uint32_t{0});
  put(body, static_cast<std::uint32_t>(1 + sizes.size()));
  put(body, header);
  for (const std::uint64_t size : sizes) put(body, size);
  body += bytes;
  FrameHeader frame;
  frame.kind = FrameKind::kBegin;
  frame.length = static_cast<std::uint32_t>(body.size());
  frame.message = 1;
  const std::string all = encode(frame) + body;
  pair.b.session->consume(std::as_bytes(std::span(all)), kNow, pair.b.messages);
  EXPECT_TRUE(pair.b.messages.empty());
  return pair.b.session->ended() ? pair.b.session->ended()->text : "none";
}

TEST(HandlesTest, MalformedHandlesEndTheSession) {
  const auto has = [](const std::string& text, const char* part) {
    EXPECT_NE(text.find(part), std::string::npos) << text;
  };
  const std::uint64_t size = 1000 | kByHandle;
  Handle handle{4, kHeapHeaderBytes, 3, false};
  has(error_of_table(0, {size}, encode(handle), false), "a handle comes over a link that has none");
  has(error_of_table(size, {}, encode(handle)), "the header of a message comes by handle");
  has(error_of_table(0, {size}, encode(handle) + "x"), "longer than its table says");
  has(error_of_table(0, {size}, encode(handle)), "has ticket 4, but slot 3 has 0");
  has(error_of_table(0, {kByHandle}, encode(handle)), "a handle came of no bytes");
  has(error_of_table(0, {kByHandle | 1ULL << 45, kByHandle | 1ULL << 45, 1}, ""), "64 TiB");
  has(error_of_table(0, {kByHandle | 1ULL << 40}, encode(handle)), "begins at");
  handle.is_receivers = true;
  has(error_of_table(0, {size}, encode(handle)),
      "is sent back, slot 3, ticket 4, which the peer does not have");
  std::string bytes = encode(handle);
  bytes[20] = 2;
  has(error_of_table(0, {size}, bytes), "a handle is of heap 2");
}

}  // namespace
}  // namespace cohort::net
