#pragma once

#include <ATen/core/grad_mode.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

#include "cohort/core/random_scope.h"
#include "cohort/rpc/codec.h"

/// What a handler takes over from the thread that made its call: the gradient mode, autocast, and a seed.
namespace cohort::rpc {

/// A type of device whose autocast is on, and its element type: LibTorch's numbers of them.
struct AutocastOn {
  std::int8_t device = 0, dtype = 0;
};
COHORT_NESTED(AutocastOn, device, dtype)

/// What travels with a call.
struct CallerState {
  bool grad_mode = true;  ///< false also in inference mode
  std::vector<AutocastOn> autocast;
  std::optional<std::uint64_t> seed;  ///< of what the handler draws

  /// Of this thread, for the call that it makes now.
  static CallerState of_next_call();
};
COHORT_NESTED(CallerState, grad_mode, autocast, seed)

/// While it lives, each call that this thread makes gets a seed: a function of `seed`, and of the number of
/// the call. Without `seed` calls get none. The newest scope counts. Threads: the one that made it.
class SeedScope {
 public:
  /// `first_call`: the number of its first call.
  explicit SeedScope(std::optional<std::uint64_t> seed, std::uint64_t first_call = 0);
  ~SeedScope();
  SeedScope(const SeedScope&) = delete;
  SeedScope& operator=(const SeedScope&) = delete;

  /// Of the next call of this thread; none outside of scopes.
  static std::optional<std::uint64_t> next();
  /// The newest scope of this thread; null where there is none.
  static SeedScope* current();

  std::optional<std::uint64_t> seed() const { return seed_; }
  /// The number of the next call.
  std::uint64_t num_calls() const { return num_calls_; }
  /// Another scope has made the calls before this number.
  void skip_to(std::uint64_t num_calls) { num_calls_ = num_calls; }

 private:
  const std::optional<std::uint64_t> seed_;
  std::uint64_t num_calls_;
  SeedScope* outer_;
};

/// While it lives, this thread has the state of a handler's caller, and nothing of its own: it may wait in
/// another handler. Throws: CommError for an autocast that Cohort does not send.
class CallerStateScope {
 public:
  explicit CallerStateScope(const CallerState& state);
  ~CallerStateScope();
  CallerStateScope(const CallerStateScope&) = delete;
  CallerStateScope& operator=(const CallerStateScope&) = delete;

 private:
  struct Autocast {
    bool is_on = false;
    at::ScalarType dtype = at::kBFloat16;
  };
  const at::AutoGradMode grad_mode_;
  const SeedScope seeds_;
  std::optional<core::RandomScope> global_, random_;
  bool is_cached_before_;
  std::array<Autocast, 2> before_;  // of the CPU, of GPUs
};

}  // namespace cohort::rpc
