#pragma once

#include "cohort/base/error.h"

namespace cohort::net {

/// No name server has said until the deadline where the host of an address is, or that nobody knows it.
class LookupTimeout : public RendezvousError {
 public:
  using RendezvousError::RendezvousError;
};

}  // namespace cohort::net
