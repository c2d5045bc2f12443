#pragma once

#include <cstdint>
#include <string>
#include <string_view>

/// What processes of a generation say to each other.
namespace cohort::elastic {

enum class WireType : std::uint32_t {
  kHello,  ///< the sender has entered the generation; number: its committed steps, value: 1 where its state is whole, and 2 where it
           ///< is in the run already, hash: of its first state, text: Arithmetic
  kGoodbye,   ///< it has left it, for another one or none; number: its committed steps
  kSlice,     ///< bytes of an exchange; number: which one, value: 1 where the sender waits for kTaken
  kTaken,     ///< the bytes are read; number: the exchange
  kAskState,  ///< what does the state consist of?
  kState,     ///< text: that; hash: of the tensors, where several processes have them
  kAskChunk,  ///< bytes [number, value) of the state
  kChunk,     ///< the same, and hash; no bytes: the sender's state has not so many
  kHasState,  ///< the sender has the newest state now
  kNewLink,   ///< never sent: the process has connected again, so what was sent to it before may not come
};
inline constexpr std::uint32_t kNumWireTypes = 9;  ///< that are sent

/// The header of a message.
struct Wire {
  WireType type = WireType::kHello;
  std::uint32_t from = 0;     ///< number of the sender in the generation
  std::uint32_t work_us = 0;  ///< of kSlice: how long the sender has worked in its last step; 0: not known
  std::uint64_t generation = 0, number = 0, value = 0, hash = 0;
  std::string text = {};

  bool operator==(const Wire&) const = default;
};

std::string encode(const Wire& wire);
/// Throws: CommError.
Wire decode(std::string_view header);

}  // namespace cohort::elastic
