#pragma once

#include <mutex>

namespace cohort::rpc {

/// It is held while an optimizer of this process changes parameters or its state, and while they are copied
/// to be sent.
inline std::mutex& parameters_mutex() {
  static std::mutex mutex;
  return mutex;
}

}  // namespace cohort::rpc
