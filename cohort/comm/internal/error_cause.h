#pragma once

#include <exception>

/// What the errors of backends and stores stand for. Internal to this module.
namespace cohort::comm {

enum class ErrorCause {
  kUsage,    ///< the call was wrong, and nothing travelled
  kTimeout,  ///< a time was over
  kPeer,     ///< another process is gone, or does not take connections
  kOther
};

/// Returns what `error` stands for: an error of Cohort by its type, one of LibTorch, Gloo, NCCL or MPI by its
/// words: Note [Words of backends].
ErrorCause cause_of(const std::exception& error);

}  // namespace cohort::comm
