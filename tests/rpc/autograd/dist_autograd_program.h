#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string>

/// Random programs of distributed autograd: functions of a seed, that call each other on other workers.
///
/// A program runs at a place, and takes a tensor. Each of its statements makes a new tensor of it, as one of
/// the kinds in dist_autograd_program.cpp says: by calls, or as plain code in one process. Programs know
/// places, not workers. So a program is the same on any number of workers.
namespace cohort::rpc::programs {

constexpr std::int64_t kPlaces = 4;

/// Place p lies on worker "w(p % number)" of this process. While no program runs.
void set_num_workers(std::int64_t number);
std::string worker_of(std::int64_t place);

/// The leaves that programs at a place use: two.
const at::Tensor& weight_of(std::int64_t place, std::int64_t index);

enum class Execution : std::uint8_t { kRemote, kPlain };

/// Runs the program at this place: calls are nested `depth` deep.
at::Tensor run_program(Execution execution, std::int64_t place, std::int64_t seed, std::int64_t depth,
                       const at::Tensor& x);

/// The kinds of its statements: "call, sine".
std::string describe_program(std::int64_t seed, std::int64_t depth);

}  // namespace cohort::rpc::programs
