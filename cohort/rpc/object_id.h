#pragma once

#include <compare>
#include <cstdint>

/// Numbers by which workers name what they share. A worker stands for its id.
namespace cohort::rpc {

/// An object that remote references point to: who asked for it, and its number there.
struct ObjectId {
  std::int32_t creator = 0;  ///< id of the worker that asked for it
  std::uint64_t number = 0;
  auto operator<=>(const ObjectId&) const = default;
};

/// A hold of one worker on an object: which worker made it, and its number there.
struct ForkId {
  std::int32_t maker = 0;  ///< id of the worker that made it
  std::uint64_t number = 0;
  auto operator<=>(const ForkId&) const = default;
};

}  // namespace cohort::rpc
