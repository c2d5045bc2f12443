#pragma once

#include "cohort/base/error.h"

namespace cohort::net {

/// The host of an address has a name that nobody knows, or knows no more: that of a container which has
/// ended, for instance.
class UnknownHost : public RendezvousError {
 public:
  using RendezvousError::RendezvousError;
};

}  // namespace cohort::net
