#pragma once

#include <ATen/core/Generator.h>
#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>

#include <chrono>
#include <cstdint>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "cohort/base/threads/deadline.h"
#include "cohort/core/random_scope.h"

/// What a function draws, so that it draws the same when it runs again.
namespace cohort::core {

/// How long one thread waits while another has lent the global generator to a function.
inline constexpr std::chrono::minutes kGlobalGeneratorPatience(10);

/// Returns the generator that operators on a GPU draw from unless they are handed one, for each of `devices`
/// that is a GPU, in their order.
std::vector<at::Generator> generators_of_gpus(const std::vector<c10::Device>& devices);

/// The states, as they are when it is made, of the generators that operators of the calling thread draw from:
/// the one of its RandomScope, LibTorch's global one of the CPU, and others that are named.
/// Threads: other threads may draw from all of them meanwhile.
class GeneratorStates {
 public:
  /// Of no generators: a second run draws on.
  GeneratorStates() = default;
  /// `generators`: the own generators of GPUs, and those that operators are handed.
  explicit GeneratorStates(const std::vector<at::Generator>& generators);

  /// Where the calling thread's generators of the CPU stand.
  struct After {
    at::Tensor scope;   ///< undefined where operators draw from the global one
    at::Tensor global;  ///< undefined in an After that was made by default: then holds() is true
    /// Reads where the calling thread's generators stand now.
    static After now();
    /// True if they stand there now.
    bool holds() const;
  };

  /// What stands for the global generator in a second run: a copy, so that other threads see nothing of it;
  /// or the generator itself, for the time of the run, which what draws without an operator, seeds it, or
  /// draws on a thread of its own meets too.
  enum class Global : std::uint8_t { kCopy, kItself };

  /// While it lives, operators of this thread draw what they drew when the states were taken. On the CPU they
  /// draw from copies. The other generators are restored at the end.
  /// Blocking: the global generator itself is locked for one thread at a time, which may lock it again.
  /// Throws: TimeoutError where another thread has it locked for longer than `patience`, as when that thread
  /// waits for this one.
  class Again {
   public:
    explicit Again(const GeneratorStates& states, Global global = Global::kCopy,
                   base::Deadline::Clock::duration patience = kGlobalGeneratorPatience);
    ~Again();
    Again(const Again&) = delete;
    Again& operator=(const Again&) = delete;
    /// Where the second run's own generators stand; an empty After where no states were taken.
    After after() const;

   private:
    class GlobalLock;
    void lend(at::Generator generator, const at::Tensor& state);

    std::unique_ptr<GlobalLock> global_lock_;  // null: the global generator is not set
    std::vector<std::pair<at::Generator, at::Tensor>> before_;
    std::optional<RandomScope> draws_;
  };

 private:
  bool is_taken_ = false;
  at::Generator scope_, global_;  // copies; scope_ is undefined where operators draw from the global one
  std::vector<std::pair<at::Generator, at::Tensor>> others_;
};

/// While it lives, these generators draw from new seeds; at the end they are where they were. A state is
/// taken and its seed set under one lock, so what other threads draw comes before, or from the new seed: none
/// of them draws a number twice.
class ReseededGenerators {
 public:
  /// A generator may stand among them twice.
  explicit ReseededGenerators(const std::vector<at::Generator>& generators);
  ~ReseededGenerators();
  ReseededGenerators(const ReseededGenerators&) = delete;
  ReseededGenerators& operator=(const ReseededGenerators&) = delete;

 private:
  std::vector<std::pair<at::Generator, at::Tensor>> before_;
};

/// LibTorch's global generator of the CPU, which is restored at the end where it was seeded meanwhile. What
/// Again lends on another thread at the same time is no news of it: then it counts as unchanged. It begins
/// when no other thread has lent the generator. Blocking and Throws: as Again.
class GlobalGeneratorAsFound {
 public:
  explicit GlobalGeneratorAsFound(base::Deadline::Clock::duration patience = kGlobalGeneratorPatience);
  ~GlobalGeneratorAsFound();
  GlobalGeneratorAsFound(const GlobalGeneratorAsFound&) = delete;
  GlobalGeneratorAsFound& operator=(const GlobalGeneratorAsFound&) = delete;
  /// True if the global generator's state has the bytes of `state`.
  bool stands_at(const at::Tensor& state) const;
  /// True if it stands where it stood.
  bool holds() const;
  /// True if nothing was drawn from it since it was seeded, before or meanwhile.
  bool is_seeded() const;
  /// It is restored whatever becomes of it.
  void restore_at_end() { restores_at_end_ = true; }

 private:
  bool is_as_found() const;  // under the lender's mutex

  std::int64_t lent_before_ = 0;
  at::Tensor before_;
  bool restores_at_end_ = false;
};

}  // namespace cohort::core
