#pragma once

#include "cohort/base/error.h"

namespace cohort::net {

/// Nothing has shown that a process is at an address: nobody listens there, or nobody has answered until the
/// deadline, as where its host is off.
class NoAnswer : public RendezvousError {
 public:
  using RendezvousError::RendezvousError;
};

}  // namespace cohort::net
