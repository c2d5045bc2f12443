#pragma once

#include <c10/util/intrusive_ptr.h>

#include <memory>

namespace c10d {
class Work;  // <torch/csrc/distributed/c10d/Work.hpp>
}

namespace cohort::comm {

struct PendingState;

/// A collective that was begun. Ownership: keeps its tensors.
class Pending {
 public:
  /// For this module and its tests.
  using State = PendingState;
  Pending();
  Pending(Pending&&) noexcept;
  Pending& operator=(Pending&&) noexcept;
  /// Waits, up to the deadline, if nobody did; an error is logged then.
  ~Pending();

  /// Blocks until the result is in the tensors that were given; on a GPU, until later work on the current
  /// stream comes after it. A further call does nothing.
  /// Throws: TimeoutError, PeerError, CommError, each naming collective, number, rank and shape; UsageError
  /// for what the backend rejects, and where ranks called different things. If a collective on GPUs exceeds
  /// its timeout, LibTorch's watchdog ends the process instead; see docs/guide/comm.md.
  void wait();
  /// True once wait() would not block.
  bool done() const;
  /// c10d's own work; waits until it has begun, and throws as wait(). What comes back into views that are not
  /// contiguous comes in wait().
  const c10::intrusive_ptr<c10d::Work>& work() const;

 private:
  friend class Group;
  explicit Pending(std::shared_ptr<State> state);
  std::shared_ptr<State> state_;
};

}  // namespace cohort::comm
