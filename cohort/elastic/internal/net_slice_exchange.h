#pragma once

#include <ATen/core/Tensor.h>

#include <chrono>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <span>
#include <utility>
#include <vector>

#include "cohort/base/threads/deadline.h"
#include "cohort/elastic/internal/process_inbox.h"
#include "cohort/net/node.h"
#include "cohort/parallel/virtual_ranks/slice_exchange.h"

namespace cohort::elastic {

/// The processes of an exchange.
struct ExchangePlace {
  std::uint64_t generation = 0;
  int process = 0, num_processes = 1;
  std::chrono::milliseconds timeout{600'000};  ///< of each transfer
};

/// The exchange of one generation, over its links. Transfers throw GenerationEnded, within milliseconds of
/// the news, or where bytes did not come in time: it names the processes.
///
/// After such an error tensors that were given to it must not be written any more: another process may still
/// read them.
class NetSliceExchange : public parallel::SliceExchange,
                         public std::enable_shared_from_this<NetSliceExchange> {
 public:
  NetSliceExchange(std::shared_ptr<net::Node> node, std::shared_ptr<ProcessInbox> inbox,
                   const ExchangePlace& place);

  int rank() const override { return place_.process; }
  int size() const override { return place_.num_processes; }
  void begin_step() override {
    if (!step_began_) step_began_ = base::Deadline::Clock::now();
  }
  /// Memory that processes of this host read without a copy.
  at::Tensor empty(std::int64_t numel, const at::TensorOptions& options) override;
  Transfer all_to_all(at::Tensor output, const at::Tensor& input,
                      const std::vector<std::int64_t>& output_bytes,
                      const std::vector<std::int64_t>& input_bytes) override;
  Transfer all_gather(at::Tensor output, const at::Tensor& input) override;
  Transfer broadcast(at::Tensor bytes) override;

  /// This process has waited so long for others outside of transfers, as in a group's call: that is no work.
  void add_wait(std::chrono::nanoseconds time) { waited_ += time; }
  /// A step that has taken `time` is committed. Returns how many seconds each process has worked in the step
  /// before it, its waits in transfers left out; 0 where this is not known. What this process has worked goes
  /// with the bytes of the next step.
  std::vector<double> end_step(std::chrono::nanoseconds time);
  /// When the step has begun that is being made. Nothing between two steps, where processes may exchange
  /// bytes too.
  std::optional<base::Deadline::Clock::time_point> step_began() const { return step_began_; }

 private:
  struct Operation;
  using Bytes = std::span<std::byte>;
  std::shared_ptr<Operation> begin(const char* name, std::vector<at::Tensor> tensors);
  void send(Operation& operation, int to, std::span<const std::byte> bytes, const at::Tensor& owner);
  void expect(Operation& operation, int from, Bytes to);
  Transfer transfer_of(std::shared_ptr<Operation> operation);
  void finish(Operation& operation);
  void handle(Letter& letter);
  void read_slice(Operation& operation, int from, const Letter& letter);
  void check_cpu(const at::Tensor& tensor) const;

  const std::shared_ptr<net::Node> node_;
  const std::shared_ptr<ProcessInbox> inbox_;
  const ExchangePlace place_;
  std::vector<std::shared_ptr<net::Peer>> peers_;  // by process; null: this one
  std::uint64_t num_begun_ = 0;                    // transfers
  std::optional<base::Deadline::Clock::time_point> step_began_;
  std::map<std::uint64_t, std::shared_ptr<Operation>> pending_;
  std::map<std::pair<std::uint64_t, int>, Letter> early_;  // of operations that have not begun here
  std::chrono::nanoseconds waited_{0};                     // in this step
  std::vector<std::uint32_t> work_us_;                     // by process, of the step before
};

}  // namespace cohort::elastic
