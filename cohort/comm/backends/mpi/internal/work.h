#pragma once

#include <mpi.h>

#include <atomic>
#include <cstddef>
#include <deque>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "cohort/base/threads/deadline.h"
#include "cohort/comm/internal/cpu_call.h"

/// A call over MPI, as steps. Internal.
namespace cohort::comm::mpi {

/// The requests that a step has begun.
struct PendingRequests {
  std::vector<MPI_Request> requests;
  std::vector<std::int64_t> expected;  ///< bytes to receive, of each request; -1: MPI sees to it

  MPI_Request* add(std::int64_t bytes = -1) {
    expected.push_back(bytes);
    return &requests.emplace_back(MPI_REQUEST_NULL);
  }
};

/// Throws std::runtime_error with MPI's words.
void check(int code, const char* function);

/// Calls of one group that go one after the other, as MPI asks of collectives.
struct OrderedQueue {
  std::deque<const void*> calls;
  std::unique_ptr<std::byte[]> memory;
  std::size_t bytes = 0;

  /// Memory for the step that runs and those after it in the same call.
  std::byte* scratch(std::size_t size);
};

/// Whose call it is, for errors.
struct CallGroup {
  std::string name;
  int rank = 0;
  int size = 1;
};

/// A call that was begun. All but what c10d asks belongs to the engine's thread.
class MpiWork : public CpuWork {
 public:
  using Step = std::function<void(PendingRequests&)>;

  /// `queue` may be null: a message, which waits for nothing but its peer.
  MpiWork(CpuCall call, CallGroup group, std::vector<Step> steps, std::shared_ptr<OrderedQueue> queue);

  /// Where the deadline passes, or `timeout`, it throws, and the job ends soon after.
  bool wait(std::chrono::milliseconds timeout) override;
  int sourceRank() const override { return source_.load(); }
  std::uint64_t getSequencenumber() const override { return call_.number; }

 private:
  friend class Progress;
  bool is_late() const { return deadline_.expired() || is_cut_short_.load(); }
  std::string describe() const;
  /// Runs on until it has to wait; true once all steps are done.
  bool advance();
  bool has_arrived();
  /// After an error MPI may still read and write the tensors, which are kept for it.
  void end(std::exception_ptr error);

  CpuCall call_;
  const CallGroup group_;
  std::vector<Step> steps_;
  std::size_t next_ = 0;
  PendingRequests pending_;
  std::vector<MPI_Status> statuses_;
  base::Deadline deadline_;
  std::shared_ptr<OrderedQueue> queue_;
  std::atomic<bool> is_cut_short_{false};  // somebody waited for less than the deadline
  std::atomic<int> source_{-1};
};
using MpiWorkPtr = c10::intrusive_ptr<MpiWork>;

}  // namespace cohort::comm::mpi
