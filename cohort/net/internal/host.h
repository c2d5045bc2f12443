#pragma once

#include <sys/types.h>

#include <string>

/// Where a process runs, as far as another one can see its end.
namespace cohort::net {

/// Equal for processes that can see each other's process numbers: one boot of one machine, one network and
/// one PID namespace.
std::string place_of_process();

}  // namespace cohort::net
