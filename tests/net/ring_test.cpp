#include "cohort/net/internal/ring.h"

#include <gtest/gtest.h>

#include <chrono>
#include <random>
#include <semaphore>
#include <thread>
#include <vector>

#include "cohort/base/error.h"
#include "tests/support/throws.h"

namespace cohort::net {
namespace {

std::byte byte_at(std::uint64_t position) {
  return static_cast<std::byte>(position * 31 + (position >> 8));
}

// Writes bytes whose values say their position, in a few parts.
std::size_t write_some(RingWriter& writer, std::uint64_t position, std::size_t size, std::size_t parts) {
  std::vector<std::byte> bytes(size);
  for (std::size_t i = 0; i < size; ++i) bytes[i] = byte_at(position + i);
  std::vector<iovec> list;
  for (std::size_t i = 0; i < parts; ++i) {
    const std::size_t from = i * size / parts, to = (i + 1) * size / parts;
    list.push_back({bytes.data() + from, to - from});
  }
  return writer.write(list);
}

bool are_right(std::span<const std::byte> bytes, std::uint64_t position) {
  for (const std::byte byte : bytes) {
    if (byte != byte_at(position++)) return false;
  }
  return true;
}

struct RingPair {
  explicit RingPair(std::size_t size) : memory(size) {}
  RingState state;
  std::vector<std::byte> memory;
  RingWriter writer{state, memory};
  RingReader reader{state, memory};
};

TEST(RingTest, WhatIsWrittenIsReadInOrderAndAroundTheEnd) {
  RingPair ring(10);
  EXPECT_FALSE(ring.reader.has_bytes());
  EXPECT_TRUE(ring.reader.peek().empty());
  EXPECT_EQ(write_some(ring.writer, 0, 7, 3), 7U);
  EXPECT_EQ(ring.reader.peek().size(), 7U);
  ring.reader.consume(5);
  EXPECT_EQ(write_some(ring.writer, 7, 20, 2), 8U) << "there is room for so many";
  EXPECT_FALSE(ring.writer.has_room());
  EXPECT_TRUE(are_right(ring.reader.peek(), 5));
  EXPECT_EQ(ring.reader.peek().size(), 5U) << "up to the end of the memory";
  ring.reader.consume(5);
  EXPECT_TRUE(are_right(ring.reader.peek(), 10));
  EXPECT_EQ(ring.reader.peek().size(), 5U);
}

TEST(RingTest, AWakeupIsForWhoAskedForItOnce) {
  RingPair ring(8);
  EXPECT_EQ(write_some(ring.writer, 0, 1, 1), 1U);
  EXPECT_FALSE(ring.writer.take_wakeup()) << "the reader is awake";
  EXPECT_FALSE(ring.reader.sleep()) << "there is something to read";
  ring.reader.consume(1);
  EXPECT_TRUE(ring.reader.sleep());
  EXPECT_TRUE(ring.writer.take_wakeup());
  EXPECT_FALSE(ring.writer.take_wakeup());
  EXPECT_FALSE(ring.writer.wait_for_room());
  EXPECT_EQ(write_some(ring.writer, 1, 8, 1), 8U);
  EXPECT_TRUE(ring.writer.wait_for_room());
  ring.reader.consume(3);
  EXPECT_FALSE(ring.reader.take_wakeup()) << "less than half of it is free";
  ring.reader.consume(1);
  EXPECT_TRUE(ring.reader.take_wakeup());
  EXPECT_FALSE(ring.reader.take_wakeup());
}

TEST(RingTest, AnOtherSideThatLiesIsAnError) {
  RingPair ring(8);
  ring.state.written = 9;
  COHORT_EXPECT_THROW_WITH(ring.reader.peek(), CommError, "more bytes than the ring has");
  ring.state.read = 1;
  COHORT_EXPECT_THROW_WITH(write_some(ring.writer, 0, 1, 1), CommError, "bytes that were not written");
}

// Each counter belongs to one side, but both can write there.
TEST(RingTest, AnOtherSideThatChangesThisSidesCounterKeepsNobodyAwake) {
  RingPair ring(8);
  EXPECT_EQ(write_some(ring.writer, 0, 8, 1), 8U);
  ring.state.written = 4;
  EXPECT_FALSE(ring.writer.has_room());
  ring.state.written = 8;
  ring.reader.consume(8);
  ring.state.read = 5;
  EXPECT_FALSE(ring.reader.has_bytes());
  EXPECT_TRUE(ring.reader.sleep());
}

// Two threads that sleep whenever they have nothing to do: a lost wake-up would leave both asleep.
TEST(RingTest, TwoThreadsLoseNoByteAndNoWakeup) {
  constexpr std::uint64_t kBytes = 500'000;
  for (const std::size_t size : {1, 7, 64, 4096}) {
    RingPair ring(size);
    std::counting_semaphore<> reader_wakeup(0), writer_wakeup(0);
    const std::uint64_t bytes = size == 1 ? kBytes / 100 : kBytes;
    const auto wait = [](std::counting_semaphore<>& wakeup) {
      return wakeup.try_acquire_for(std::chrono::seconds(60));
    };
    bool writer_was_woken = true;
    std::thread writing([&] {
      std::mt19937 random(static_cast<unsigned>(size));
      for (std::uint64_t position = 0; position < bytes && writer_was_woken;) {
        const std::size_t most = std::min<std::uint64_t>(bytes - position, 1 + random() % (2 * size));
        const std::size_t written = write_some(ring.writer, position, most, 1 + random() % 3);
        position += written;
        if (ring.writer.take_wakeup()) reader_wakeup.release();
        if (written == 0 && ring.writer.wait_for_room()) writer_was_woken = wait(writer_wakeup);
      }
    });
    std::mt19937 random(static_cast<unsigned>(size) + 1);
    bool is_right = true, reader_was_woken = true;
    for (std::uint64_t position = 0; position < bytes && reader_was_woken;) {
      std::span<const std::byte> there = ring.reader.peek();
      if (there.empty()) {
        if (ring.reader.sleep()) reader_was_woken = wait(reader_wakeup);
        continue;
      }
      there = there.first(1 + random() % there.size());
      is_right = is_right && are_right(there, position);
      position += there.size();
      ring.reader.consume(there.size());
      if (ring.reader.take_wakeup()) writer_wakeup.release();
    }
    writing.join();
    EXPECT_TRUE(is_right && writer_was_woken && reader_was_woken) << size;
  }
}

}  // namespace
}  // namespace cohort::net
