#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "cohort/comm/group.h"

namespace cohort::parallel {

/// Who sends which bytes to whom, for sums over virtual ranks. It adds nothing, so any transport gives the
/// same bits. Tensors are flat, contiguous, of bytes (at::kByte), and stay untouched until the transfer has
/// ended.
/// Collective: each process makes the same calls in the same order. Threads: one caller at a time.
class SliceExchange {
 public:
  /// Blocks until the bytes have come and may be sent no more. Throws: what the transport throws.
  using Transfer = std::function<void()>;

  virtual ~SliceExchange() = default;
  /// This process among those that exchange.
  virtual int rank() const = 0;
  virtual int size() const = 0;
  /// A step begins: where the transfers that follow fail, what is computed from here on is lost. Does
  /// nothing, as a rule.
  virtual void begin_step() {}
  /// Returns a flat tensor, not initialised, in memory from which transfers are fastest. It may outlive this.
  virtual at::Tensor empty(std::int64_t numel, const at::TensorOptions& options);

  /// Sends piece k of `input` to process k; `output` gets what the processes send here, in their order.
  /// `input_bytes`, `output_bytes`: of each piece, may be 0.
  [[nodiscard]] virtual Transfer all_to_all(at::Tensor output, const at::Tensor& input,
                                            const std::vector<std::int64_t>& output_bytes,
                                            const std::vector<std::int64_t>& input_bytes) = 0;
  /// `output` gets the inputs of all processes, which are of one size, in their order. `input` may lie in it,
  /// at its own place.
  [[nodiscard]] virtual Transfer all_gather(at::Tensor output, const at::Tensor& input) = 0;
  /// `bytes` become those of process 0.
  [[nodiscard]] virtual Transfer broadcast(at::Tensor bytes) = 0;
};

/// Returns the exchange over the collectives of `group`.
std::shared_ptr<SliceExchange> make_slice_exchange(comm::Group group);

}  // namespace cohort::parallel
