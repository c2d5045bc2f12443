#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/record_function.h>

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

namespace cohort::comm {

/// A call of a backend of ours in LibTorch's profiler: "shm:all_reduce", as Gloo's is "gloo:all_reduce", from
/// begin() until it goes, on any thread. Its inputs are the tensors, their bytes and the group's name.
class ProfiledCall {
 public:
  /// Null where nobody profiles.
  static std::shared_ptr<ProfiledCall> begin(const char* backend, const char* call,
                                             std::span<const at::Tensor> tensors, const std::string& group);
  ProfiledCall(const ProfiledCall&) = delete;
  ProfiledCall& operator=(const ProfiledCall&) = delete;

 private:
  ProfiledCall() = default;
  at::RecordFunction record_{at::RecordScope::USER_SCOPE};
};

}  // namespace cohort::comm
