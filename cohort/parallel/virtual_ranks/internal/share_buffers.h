#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

#include "cohort/parallel/task_parts.h"
#include "cohort/parallel/virtual_ranks/slice_exchange.h"

namespace cohort::parallel {

/// Buffers of modules, such as running statistics, in a step of several virtual ranks. Each virtual rank
/// begins with those of the step's begin; virtual rank 0's are kept. Internal to VirtualRankSync. Ownership:
/// shares the buffers, and keeps two copies of them. Threads: one caller at a time.
class ShareBuffers {
 public:
  /// Buffers whose elements share memory (expand()) are left out: nothing can write to them.
  explicit ShareBuffers(const std::vector<NamedModule>& modules);
  /// Bytes of the copies that are kept of the modules' buffers.
  static std::int64_t bytes_of(const std::vector<NamedModule>& modules);

  /// A step begins: copies the buffers.
  void begin();
  /// The buffers become those of the step's begin.
  void restore();
  /// Copies the buffers as what the step leaves.
  void keep_result();
  /// Begins to send what keep_result() copied on process 0 to all; null: one process. Collective.
  void send_result(SliceExchange* exchange);
  /// What keep_result() copies lies in other memory from now on.
  void release_result();
  /// Waits for what was sent, and changes no buffer.
  void receive_result();
  /// The buffers become what was sent. After receive_result().
  void set_result();

 private:
  /// Copies of all buffers in one tensor of bytes for each device.
  struct Copies {
    std::vector<at::Tensor> bytes;
    std::vector<at::Tensor> tensors;
  };
  Copies make_copies() const;

  std::vector<at::Tensor> buffers_;
  Copies begin_, result_;
  std::vector<SliceExchange::Transfer> transfers_;
};

}  // namespace cohort::parallel
