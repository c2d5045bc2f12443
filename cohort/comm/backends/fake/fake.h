#pragma once

#include <c10/core/ScalarType.h>

#include <cstdint>
#include <string>
#include <vector>

/// A backend for tests: any world size in one process, nothing travels, and every call is recorded.
///
///     auto group = comm::make_group(c10::make_intrusive<c10d::HashStore>(), 3, 64, "fake", 1s);
///     ...
///     comm::FakeBackend::of(group).calls();
///
/// The numbers are those of a group whose other ranks hold what this one holds: a sum over 64 ranks is 64
/// times the tensor, an average the tensor itself. recv() leaves its tensor alone.
namespace cohort::comm {

class Group;

/// What a group's fake backend has recorded. Threads: any.
class FakeBackend {
 public:
  struct RecordedCall {
    std::string name;  ///< as Group's method
    std::vector<std::vector<std::int64_t>> shapes;
    at::ScalarType dtype = at::kFloat;
    int peer = -1;  ///< root or peer, where there is one
  };

  /// Returns the group's, which lives as long as the group. Throws: UsageError if its backend is another.
  static FakeBackend& of(const Group& group);
  /// Returns a copy, in the order of the calls.
  virtual std::vector<RecordedCall> calls() const = 0;

 protected:
  ~FakeBackend() = default;
};

}  // namespace cohort::comm
