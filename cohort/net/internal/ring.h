#pragma once

#include <sys/uio.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <span>

namespace cohort::net {

/// What the two sides of a ring share, besides its bytes. Zero is an empty ring whose reader is awake.
struct RingState {
  alignas(64) std::atomic<std::uint64_t> written{0};  ///< bytes so far, by the writer
  alignas(64) std::atomic<std::uint64_t> read{0};     ///< bytes so far, by the reader
  /// Set by a side that asks for a wake-up; cleared by the other, which sends it then.
  alignas(64) std::atomic<std::uint32_t> reader_sleeps{0};
  std::atomic<std::uint32_t> writer_waits{0};
};
static_assert(std::atomic<std::uint64_t>::is_always_lock_free &&
                  std::atomic<std::uint32_t>::is_always_lock_free,
              "two processes share them");

/// Bytes that one process writes and another one reads, in memory that both map. Neither waits: who has
/// nothing to do asks for a wake-up, which goes another way (a byte over a socket).
///
/// Neither trusts what the other wrote: each counts for itself, and reads of the shared state the other's
/// counter alone. Threads: one at a time on each side.
class RingWriter {
 public:
  RingWriter(RingState& state, std::span<std::byte> bytes) : state_(&state), bytes_(bytes) {}

  /// Copies what there is room for, and returns how many bytes.
  /// Throws: CommError where the reader says that it has read what was not written.
  std::size_t write(std::span<const iovec> parts);
  /// After write(): whether the reader sleeps, once.
  bool take_wakeup();
  /// Asks for a wake-up once there is room. False where there is room already.
  bool wait_for_room();
  bool has_room() const;

 private:
  std::size_t room() const;

  RingState* state_;
  std::span<std::byte> bytes_;
  std::uint64_t written_ = 0;
};

class RingReader {
 public:
  RingReader(RingState& state, std::span<const std::byte> bytes) : state_(&state), bytes_(bytes) {}

  bool has_bytes() const;
  /// The next bytes that lie together, none where there are none now. The writer may change them while they
  /// are read. Throws: CommError where the writer says that there are more bytes than the ring has.
  std::span<const std::byte> peek() const;
  /// The writer may use the place of so many bytes again.
  void consume(std::size_t num_bytes);
  /// After consume(): whether the writer waits for room and has some, once.
  bool take_wakeup();
  /// Asks for a wake-up once there are bytes. False where there are some already, and then the reader is
  /// awake.
  bool sleep();
  void wake();

 private:
  RingState* state_;
  std::span<const std::byte> bytes_;
  std::uint64_t read_ = 0;
};

}  // namespace cohort::net
