// Each collective computes its result at once, in the caller's memory, and records the call. The numbers are
// those of a group whose ranks all hold what this one holds. So a sum is a product with the size, and each
// gathered part is the input. Always: a call is recorded after its arguments were used, so one that throws
// leaves no record. Surprising: shapes are those that c10d gets, and Group may have flattened tensors by
// then.
#include "cohort/comm/backends/fake/fake.h"

#include <ATen/ops/mul.h>
#include <ATen/ops/pow.h>

#include <cstring>
#include <mutex>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include "cohort/base/error.h"
#include "cohort/comm/group.h"
#include "cohort/comm/internal/backend.h"
#include "cohort/comm/internal/cpu_backend.h"

namespace cohort::comm {
namespace {

// A tensor may be gathered into its own place.
void copy(Span from, std::byte* to) {
  if (from.bytes > 0) std::memmove(to, from.data, from.bytes);
}

class RecordingBackend : public CpuBackend, public FakeBackend {
 public:
  explicit RecordingBackend(const BackendOptions& options)
      : CpuBackend("fake", options.rank, options.size, options.timeout) {}

  std::vector<RecordedCall> calls() const override {
    const std::lock_guard lock(mutex_);
    return calls_;
  }

 private:
  WorkPtr begin(CpuCall&& call) override {
    for (std::size_t i = 0; i < call.num_collectives(); ++i) run(call, i);
    record(call);
    return completed(call);
  }

  // Every other rank sends here what this one would send to itself.
  void check(const CpuCall& call) const override {
    if (call.type != CallType::kAllToAll) return;
    const Span own = call.sent[static_cast<std::size_t>(rank_)];
    for (const Span& part : call.received) {
      TORCH_CHECK(part.bytes == own.bytes, "Backend fake: other ranks would send ", own.bytes, " bytes, not ",
                  part.bytes);
    }
  }

  void run(const CpuCall& call, std::size_t i) const {
    const auto own = static_cast<std::size_t>(rank_);
    switch (call.type) {
      case CallType::kAllReduce:
      case CallType::kReduce:
        return reduce_alike(call.outputs[i], call.reductions[i].op);
      case CallType::kAllGather:
      case CallType::kGather:
        for (std::byte* const part : call.output_parts(i, size_)) copy(span_of(call.inputs[i]), part);
        return;
      case CallType::kScatter:
      case CallType::kReduceScatter: {
        const Span output = span_of(call.outputs[i]);
        const std::vector<std::byte*> parts = call.input_parts(i, size_);
        if (!parts.empty()) copy({parts[own], output.bytes}, output.data);
        if (!call.reductions.empty()) reduce_alike(call.outputs[i], call.reductions[i].op);
        return;
      }
      case CallType::kAllToAll:
        for (const Span& part : call.received) copy(call.sent[own], part.data);
        return;
      default:
        return;
    }
  }

  // Of equal tensors the average, the extremes, "and" and "or" are the tensor itself. x ^ x is 0: an even
  // number of ranks gives zeros, and an odd one x.
  void reduce_alike(at::Tensor tensor, Op op) const {
    if (op == Op::kSum) tensor.mul_(size_);
    if (op == Op::kProduct) tensor.pow_(size_);
    if (op == Op::kXor && size_ % 2 == 0) tensor.zero_();
  }

  // The parts of gather and scatter are as the tensor that every rank has.
  void record(const CpuCall& call) {
    Tensors tensors = call.type == CallType::kGather ? Tensors() : call.outputs;
    if (call.type != CallType::kScatter) {
      tensors.insert(tensors.end(), call.inputs.begin(), call.inputs.end());
    }
    RecordedCall recorded{.name = name_of(call.type), .shapes = {}, .dtype = at::kFloat, .peer = call.peer};
    if (!tensors.empty()) recorded.dtype = tensors[0].scalar_type();
    for (const at::Tensor& tensor : tensors) recorded.shapes.push_back(tensor.sizes().vec());
    const std::lock_guard lock(mutex_);
    calls_.push_back(std::move(recorded));
  }

  mutable std::mutex mutex_;
  std::vector<RecordedCall> calls_;
};

}  // namespace

BackendInstance make_fake(const BackendOptions& options) {
  return {.backend = c10::make_intrusive<RecordingBackend>(options),
          .is_distributed = false,
          .may_raise_sigpipe = false};
}

FakeBackend& FakeBackend::of(const Group& group) {
  auto* fake = dynamic_cast<FakeBackend*>(group.process_group()->getBackend(c10::kCPU).get());
  if (fake == nullptr) throw UsageError("comm.fake", "the group's backend is " + group.backend());
  return *fake;
}

}  // namespace cohort::comm
