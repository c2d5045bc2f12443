#pragma once

#include <ATen/core/Generator.h>
#include <c10/core/Device.h>

#include <cstdint>

/// Random numbers of LibTorch's operators, where several threads of a process train: docs/guide/core.md.
namespace cohort::core {

/// What the random operators of one piece of work draw is a function of.
struct RandomKey {
  std::uint64_t seed = 0;
  std::uint64_t step = 0;
  std::uint64_t rank = 0;
  std::uint64_t part = 0;   ///< replica, or micro-batch
  std::uint64_t layer = 0;  ///< of the top level, where these are told apart

  /// Returns the seed of the generator.
  std::uint64_t generator_seed() const;
  /// Returns a key with a new seed, drawn from what the calling thread's operators draw from now; so it is a
  /// function of at::manual_seed(), or of reseed_generators().
  static RandomKey draw();
};

/// While it lives, operators that the calling thread runs on the CPU without a generator of their own
/// (dropout, rand, normal_, ...) draw from one that starts at `key`, and leave LibTorch's global one, which
/// threads would take turns at by chance, alone. Scopes nest; the innermost counts. Other threads, also those
/// that an operator uses itself, do not see it.
///
///     core::RandomScope scope({.seed = seed, .step = step, .part = micro_batch, .layer = 3});
///     y = layer->forward(x);       // the same numbers on any thread, in any order of micro-batches
///
/// On a GPU operators cannot be given a generator so: with its device, the default generator of that GPU is
/// reseeded with the key, and stays so. An operator that was registered, by a plug-in, after the first scope
/// is not reached. Threads: ends on the thread that made it.
class RandomScope {
 public:
  explicit RandomScope(const RandomKey& key, c10::Device device = c10::kCPU);
  /// Continues with a generator; without one, operators draw from the global generator again.
  explicit RandomScope(at::Generator generator);
  /// The same, and operators that are given LibTorch's global CPU generator draw from `global` instead.
  RandomScope(at::Generator generator, at::Generator global);
  ~RandomScope();
  RandomScope(const RandomScope&) = delete;
  RandomScope& operator=(const RandomScope&) = delete;

  /// Returns the generator of the calling thread's innermost scope; undefined where there is none.
  static at::Generator current();
  /// Returns what its operators draw from that are given LibTorch's global CPU generator.
  static at::Generator global();

 private:
  struct Source {
    at::Generator generator;
    std::uint64_t seed = 0;
    bool is_open = false;  // a generator is made when it is asked for
    at::Generator global = {};
  };
  friend struct RandomSource;

  void enter(Source source);

  Source before_;
  bool key_before_ = false;
};

}  // namespace cohort::core
