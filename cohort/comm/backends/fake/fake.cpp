// Each collective computes its result at once, in the caller's memory, and records the call. The numbers are
// those of a group whose ranks all hold what this one holds. So a sum is a product with the size, and each
// gathered part is the input. Always: a call is recorded after its arguments were used, so one that throws
// leaves no record. Surprising: shapes are those that c10d gets, and Group may have flattened tensors by
// then.
#include "cohort/comm/backends/fake/fake.h"

#include <ATen/ops/mul.h>
#include <ATen/ops/pow.h>

#include "cohort/base/error.h"
#include "cohort/comm/group.h"
#include "cohort/comm/internal/backend.h"

namespace cohort::comm {
namespace {

// Done when it is made.
class DoneWork : public c10d::Work {
 public:
  DoneWork(int rank, c10d::OpType type, std::vector<at::Tensor> tensors)
      : Work(rank, type), tensors_(std::move(tensors)) {
    future_ = c10::make_intrusive<c10::ivalue::Future>(c10::ListType::create(c10::TensorType::get()));
    future_->markCompleted(c10::IValue(tensors_));
    finish();
  }
  bool isCompleted() override { return true; }
  bool wait(std::chrono::milliseconds) override { return true; }
  std::vector<at::Tensor> result() override { return tensors_; }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override { return future_; }

 private:
  std::vector<at::Tensor> tensors_;
  c10::intrusive_ptr<c10::ivalue::Future> future_;
};

}  // namespace

BackendInstance make_fake(const BackendOptions& options) {
  return {.backend = c10::make_intrusive<FakeBackend>(options.rank, options.size), .is_distributed = false};
}

FakeBackend& FakeBackend::of(const Group& group) {
  auto* fake = dynamic_cast<FakeBackend*>(group.process_group()->getBackend(c10::kCPU).get());
  if (fake == nullptr) throw UsageError("comm.fake", "the group's backend is " + group.backend());
  return *fake;
}

std::vector<FakeBackend::RecordedCall> FakeBackend::calls() const {
  const std::lock_guard lock(mutex_);
  return calls_;
}

FakeBackend::WorkPtr FakeBackend::record(const char* name, const std::vector<at::Tensor>& tensors,
                                         c10d::OpType type, int peer) {
  RecordedCall call{.name = name,
                    .shapes = {},
                    .dtype = tensors.empty() ? at::kFloat : tensors[0].scalar_type(),
                    .peer = peer};
  for (const at::Tensor& tensor : tensors) call.shapes.push_back(tensor.sizes().vec());
  const std::lock_guard lock(mutex_);
  calls_.push_back(std::move(call));
  return c10::make_intrusive<DoneWork>(rank_, type, tensors);
}

void FakeBackend::reduce_alike(at::Tensor& tensor, const c10d::ReduceOp& op) const {
  switch (static_cast<c10d::ReduceOp::RedOpType>(op)) {
    case c10d::ReduceOp::SUM:
      tensor.mul_(size_);
      return;
    case c10d::ReduceOp::PRODUCT:
      tensor.pow_(size_);
      return;
    case c10d::ReduceOp::BXOR:
      // x ^ x is 0: an even number of ranks gives zeros, and an odd one x.
      if (size_ % 2 == 0) tensor.zero_();
      return;
    // Of equal tensors these are the tensor itself.
    case c10d::ReduceOp::AVG:
    case c10d::ReduceOp::MIN:
    case c10d::ReduceOp::MAX:
    case c10d::ReduceOp::BAND:
    case c10d::ReduceOp::BOR:
      return;
    default:
      TORCH_CHECK(false, "Backend fake does not support this reduce operation");
  }
}

FakeBackend::WorkPtr FakeBackend::allreduce(std::vector<at::Tensor>& tensors,
                                            const c10d::AllreduceOptions& options) {
  for (at::Tensor& tensor : tensors) reduce_alike(tensor, options.reduceOp);
  return record("all_reduce", tensors, c10d::OpType::ALLREDUCE);
}

FakeBackend::WorkPtr FakeBackend::allreduce_coalesced(std::vector<at::Tensor>& tensors,
                                                      const c10d::AllreduceCoalescedOptions& options) {
  return allreduce(tensors, options);
}

FakeBackend::WorkPtr FakeBackend::broadcast(std::vector<at::Tensor>& tensors,
                                            const c10d::BroadcastOptions& options) {
  return record("broadcast", tensors, c10d::OpType::BROADCAST, static_cast<int>(options.rootRank));
}

FakeBackend::WorkPtr FakeBackend::reduce(std::vector<at::Tensor>& tensors,
                                         const c10d::ReduceOptions& options) {
  for (at::Tensor& tensor : tensors) reduce_alike(tensor, options.reduceOp);
  return record("reduce", tensors, c10d::OpType::REDUCE, static_cast<int>(options.rootRank));
}

FakeBackend::WorkPtr FakeBackend::_allgather_base(at::Tensor& output, at::Tensor& input,
                                                  const c10d::AllgatherOptions&) {
  at::Tensor parts = output.view({size_, -1});
  if (input.numel() > 0) parts.copy_(input.view({1, -1}).expand_as(parts));
  return record("all_gather", {output, input}, c10d::OpType::_ALLGATHER_BASE);
}

FakeBackend::WorkPtr FakeBackend::_reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                                                       const c10d::ReduceScatterOptions& options) {
  // All ranks hold this input, so what they send here is this rank's own part.
  if (output.numel() > 0) output.view({-1}).copy_(input.view({size_, -1}).select(0, rank_));
  reduce_alike(output, options.reduceOp);
  return record("reduce_scatter", {output, input}, c10d::OpType::_REDUCE_SCATTER_BASE);
}

// Every other rank sends here what this one would send to itself.
FakeBackend::WorkPtr FakeBackend::alltoall_base(at::Tensor& output, at::Tensor& input,
                                                std::vector<std::int64_t>& output_rows,
                                                std::vector<std::int64_t>& input_rows,
                                                const c10d::AllToAllOptions&) {
  std::vector<std::int64_t> in = input_rows, out = output_rows;
  if (in.empty()) in.assign(static_cast<std::size_t>(size_), input.size(0) / size_);
  if (out.empty()) out.assign(static_cast<std::size_t>(size_), output.size(0) / size_);
  std::int64_t first = 0;
  for (int rank = 0; rank < rank_; ++rank) first += in[static_cast<std::size_t>(rank)];
  const at::Tensor mine = input.narrow(0, first, in[static_cast<std::size_t>(rank_)]);
  std::int64_t row = 0;
  for (const std::int64_t rows : out) {
    TORCH_CHECK(rows == mine.size(0), "Backend fake: other ranks would send ", mine.size(0), " rows, not ",
                rows);
    output.narrow(0, row, rows).copy_(mine);
    row += rows;
  }
  return record("all_to_all", {output, input}, c10d::OpType::ALLTOALL_BASE);
}

FakeBackend::WorkPtr FakeBackend::gather(std::vector<std::vector<at::Tensor>>& outputs,
                                         std::vector<at::Tensor>& inputs,
                                         const c10d::GatherOptions& options) {
  for (auto& list : outputs) {
    for (at::Tensor& output : list) output.copy_(inputs.at(0));
  }
  return record("gather", inputs, c10d::OpType::GATHER, static_cast<int>(options.rootRank));
}

FakeBackend::WorkPtr FakeBackend::scatter(std::vector<at::Tensor>& outputs,
                                          std::vector<std::vector<at::Tensor>>& inputs,
                                          const c10d::ScatterOptions& options) {
  if (!inputs.empty()) outputs.at(0).copy_(inputs[0].at(static_cast<std::size_t>(rank_)));
  return record("scatter", outputs, c10d::OpType::SCATTER, static_cast<int>(options.rootRank));
}

FakeBackend::WorkPtr FakeBackend::send(std::vector<at::Tensor>& tensors, int to, int) {
  return record("send", tensors, c10d::OpType::SEND, to);
}

FakeBackend::WorkPtr FakeBackend::recv(std::vector<at::Tensor>& tensors, int from, int) {
  return record("recv", tensors, c10d::OpType::RECV, from);
}

FakeBackend::WorkPtr FakeBackend::barrier(const c10d::BarrierOptions&) {
  return record("barrier", {}, c10d::OpType::BARRIER);
}

}  // namespace cohort::comm
