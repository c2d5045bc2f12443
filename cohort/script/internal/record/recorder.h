#pragma once

#include <ATen/core/Generator.h>
#include <c10/core/DispatchKey.h>
#include <c10/util/ThreadLocalDebugInfo.h>

#include <cstdint>
#include <memory>

#include "cohort/script/internal/ir/tape.h"

namespace cohort::script {

/// Which dispatch key the recorder sits on: below autograd, so that it sees what backward runs too, and above
/// BackendSelect, so that it sees what makes tensors. Note [Two keys]
enum class RecorderKey {
  kAuto,    ///< the first if it is free, else the second
  kFirst,   ///< Fake: a fallback for all operators
  kSecond,  ///< FuncTorchDynamicLayerBackMode: a kernel for each operator
};

/// While it lives, operators of the calling thread, those that backward runs there too, are written to
/// `tape`. They run as ever. Recordings nest: the innermost has them. Whatever throws inside, nothing stays
/// switched on. Operators that another thread runs on this one's behalf mark the tape unsupported, and so do
/// those that draw in a RandomScope that begins meanwhile: a replay would draw from the caller's. Throws:
/// UsageError for kFirst where the key is taken. Threads: ends on the thread that made it.
class Recording {
 public:
  explicit Recording(Tape& tape, RecorderKey key = RecorderKey::kAuto);
  ~Recording();
  Recording(const Recording&) = delete;
  Recording& operator=(const Recording&) = delete;

  /// True while the calling thread records.
  static bool is_active() { return tape() != nullptr; }
  /// What it records to; null: it does not.
  static Tape* tape();

 private:
  Tape& tape_;
  Tape* before_;
  at::Generator generator_;
  at::Generator* generator_before_;
  c10::DispatchKey key_;
  bool key_before_;
  std::shared_ptr<c10::DebugInfoBase> lost_calls_;
  c10::DebugInfoGuard told_;
  std::uint64_t observer_;  // a handle
};

}  // namespace cohort::script
