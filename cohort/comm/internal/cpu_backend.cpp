// c10d's virtual functions, for backends that work on memory of the CPU. Each overload checks its tensors on
// the caller's thread and describes itself as a CpuCall: a type, flat lists of tensors, a peer. The backends
// implement begin() for that, and need not know c10d's many signatures. Always: what is rejected is rejected
// before a tensor is scaled, and before the call has a number, so that a rejection on one rank leaves the
// numbers of its later calls as they are on the others.
#include "cohort/comm/internal/cpu_backend.h"

namespace cohort::comm {
namespace {

using c10d::OpType;

std::vector<Span> spans_of(const Tensors& tensors) {
  std::vector<Span> spans;
  spans.reserve(tensors.size());
  for (const at::Tensor& tensor : tensors) spans.push_back(span_of(tensor));
  return spans;
}

}  // namespace

CpuBackend::CpuBackend(const char* name, int rank, int size, std::chrono::milliseconds timeout)
    : Backend(rank, size), name_(name), timeout_(timeout) {}

c10::intrusive_ptr<c10d::Backend::Options> CpuBackend::getBackendOptions() {
  return c10::make_intrusive<Options>(name_, timeout_);
}

// For backends whose calls end before begin() returns: nobody ever waits for this work.
CpuBackend::WorkPtr CpuBackend::completed(const CpuCall& call) const {
  auto work = c10::make_intrusive<CpuWork>(rank_, call.op_type, call.outputs);
  work->end();
  return work;
}

CpuBackend::WorkPtr CpuBackend::submit(CpuCall&& call) {
  check(call);
  return start(std::move(call));
}

CpuBackend::WorkPtr CpuBackend::submit(CpuCall&& call, const c10d::ReduceOp& op) {
  const CallSite who = caller(call.type);
  call.reductions.reserve(call.outputs.size());
  for (const at::Tensor& output : call.outputs) {
    call.reductions.push_back(reduction_type_of(who, output, op));
  }
  check(call);
  // A call without inputs works in place, so its tensors are scaled where they are. Inputs that are the
  // caller's stay as they are.
  if (call.inputs.empty()) {
    for (const at::Tensor& tensor : call.outputs) scale(who, tensor, op);
  } else {
    for (at::Tensor& input : call.inputs) input = scaled(who, input, op);
  }
  return start(std::move(call));
}

CpuBackend::WorkPtr CpuBackend::start(CpuCall&& call) {
  // c10d's options say "the group's timeout" by a negative one (kUnsetTimeout).
  if (call.timeout.count() <= 0) call.timeout = timeout_;
  call.number = next_number_.fetch_add(1);
  // What comes out is the larger part of most calls. send(), and gather() on ranks that are not the root,
  // have inputs alone.
  call.profiled = ProfiledCall::begin(name_, name_of(call.type),
                                      call.outputs.empty() ? call.inputs : call.outputs, pg_uid_);
  return begin(std::move(call));
}

CpuBackend::WorkPtr CpuBackend::allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) {
  check_one(caller(CallType::kAllReduce), tensors);
  return submit({.type = CallType::kAllReduce,
                 .op_type = OpType::ALLREDUCE,
                 .timeout = options.timeout,
                 .outputs = tensors},
                options.reduceOp);
}

CpuBackend::WorkPtr CpuBackend::allreduce_coalesced(Tensors& tensors,
                                                    const c10d::AllreduceCoalescedOptions& options) {
  const CallSite who = caller(CallType::kAllReduce);
  check_any(who, tensors);
  return submit({.type = CallType::kAllReduce,
                 .op_type = OpType::ALLREDUCE_COALESCED,
                 .timeout = options.timeout,
                 .outputs = tensors},
                options.reduceOp);
}

CpuBackend::WorkPtr CpuBackend::broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) {
  const CallSite who = caller(CallType::kBroadcast);
  check_one(who, tensors);
  return submit({.type = CallType::kBroadcast,
                 .op_type = OpType::BROADCAST,
                 .timeout = options.timeout,
                 .outputs = tensors,
                 .peer = check_rank(who, options.rootRank, size_)});
}

CpuBackend::WorkPtr CpuBackend::reduce(Tensors& tensors, const c10d::ReduceOptions& options) {
  const CallSite who = caller(CallType::kReduce);
  check_one(who, tensors);
  return submit({.type = CallType::kReduce,
                 .op_type = OpType::REDUCE,
                 .timeout = options.timeout,
                 .outputs = tensors,
                 .peer = check_rank(who, options.rootRank, size_)},
                options.reduceOp);
}

CpuBackend::WorkPtr CpuBackend::allgather(TensorLists& outputs, Tensors& inputs,
                                          const c10d::AllgatherOptions& options) {
  const CallSite who = caller(CallType::kAllGather);
  check_list(who, outputs, check_one(who, inputs), size_);
  return submit({.type = CallType::kAllGather,
                 .op_type = OpType::ALLGATHER,
                 .timeout = options.timeout,
                 .outputs = outputs[0],
                 .inputs = inputs});
}

CpuBackend::WorkPtr CpuBackend::_allgather_base(at::Tensor& output, at::Tensor& input,
                                                const c10d::AllgatherOptions& options) {
  // c10d's call for one tensor is its call for a list with one tensor in it.
  Tensors outputs{output}, inputs{input};
  return allgather_into_tensor_coalesced(outputs, inputs, options);
}

CpuBackend::WorkPtr CpuBackend::allgather_coalesced(TensorLists& outputs, Tensors& inputs,
                                                    const c10d::AllgatherOptions& options) {
  const CallSite who = caller(CallType::kAllGather);
  check_any(who, inputs);
  TORCH_CHECK(outputs.size() == static_cast<std::size_t>(size_), who, ": got ", outputs.size(),
              " lists, expected one for each of ", size_, " ranks");
  Tensors of_inputs;  // those of the first input, then those of the second
  for (std::size_t i = 0; i < inputs.size(); ++i) {
    for (const Tensors& list : outputs) {
      TORCH_CHECK(list.size() == inputs.size(), who, ": got a list of ", list.size(), " tensors, expected ",
                  inputs.size());
      check_alike(who, list[i], inputs[i]);
      of_inputs.push_back(list[i]);
    }
  }
  return submit({.type = CallType::kAllGather,
                 .op_type = OpType::ALLGATHER_COALESCED,
                 .timeout = options.timeout,
                 .outputs = std::move(of_inputs),
                 .inputs = inputs});
}

CpuBackend::WorkPtr CpuBackend::allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                                                const c10d::AllgatherOptions& options) {
  const CallSite who = caller(CallType::kAllGather);
  check_as_many(who, outputs.size(), inputs.size());
  for (std::size_t i = 0; i < inputs.size(); ++i) check_alike(who, outputs[i], inputs[i], size_);
  return submit({.type = CallType::kAllGather,
                 .op_type = OpType::_ALLGATHER_BASE,
                 .timeout = options.timeout,
                 .outputs = outputs,
                 .inputs = inputs});
}

CpuBackend::WorkPtr CpuBackend::gather(TensorLists& outputs, Tensors& inputs,
                                       const c10d::GatherOptions& options) {
  const CallSite who = caller(CallType::kGather);
  const at::Tensor& input = check_one(who, inputs);
  const int root = check_rank(who, options.rootRank, size_);
  // On other ranks outputs are not used, so they may be anything.
  if (rank_ == root) check_list(who, outputs, input, size_);
  return submit({.type = CallType::kGather,
                 .op_type = OpType::GATHER,
                 .timeout = options.timeout,
                 .outputs = rank_ == root ? outputs[0] : Tensors(),
                 .inputs = inputs,
                 .peer = root});
}

CpuBackend::WorkPtr CpuBackend::scatter(Tensors& outputs, TensorLists& inputs,
                                        const c10d::ScatterOptions& options) {
  const CallSite who = caller(CallType::kScatter);
  const at::Tensor& output = check_one(who, outputs);
  const int root = check_rank(who, options.rootRank, size_);
  // As in gather(): on other ranks inputs are not used.
  if (rank_ == root) check_list(who, inputs, output, size_);
  return submit({.type = CallType::kScatter,
                 .op_type = OpType::SCATTER,
                 .timeout = options.timeout,
                 .outputs = outputs,
                 .inputs = rank_ == root ? inputs[0] : Tensors(),
                 .peer = root});
}

CpuBackend::WorkPtr CpuBackend::reduce_scatter(Tensors& outputs, TensorLists& inputs,
                                               const c10d::ReduceScatterOptions& options) {
  const CallSite who = caller(CallType::kReduceScatter);
  check_as_many(who, outputs.size(), inputs.size());
  Tensors parts;  // those of the first output, then those of the second
  for (std::size_t i = 0; i < inputs.size(); ++i) {
    check_one_each(who, inputs[i], size_);
    for (const at::Tensor& part : inputs[i]) {
      check_alike(who, part, outputs[i]);
      parts.push_back(part);
    }
  }
  return submit({.type = CallType::kReduceScatter,
                 .op_type = OpType::REDUCE_SCATTER,
                 .timeout = options.timeout,
                 .outputs = outputs,
                 .inputs = std::move(parts)},
                options.reduceOp);
}

CpuBackend::WorkPtr CpuBackend::_reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                                                     const c10d::ReduceScatterOptions& options) {
  Tensors outputs{output}, inputs{input};
  return reduce_scatter_tensor_coalesced(outputs, inputs, options);
}

CpuBackend::WorkPtr CpuBackend::reduce_scatter_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                                                const c10d::ReduceScatterOptions& options) {
  const CallSite who = caller(CallType::kReduceScatter);
  check_as_many(who, outputs.size(), inputs.size());
  for (std::size_t i = 0; i < inputs.size(); ++i) check_alike(who, inputs[i], outputs[i], size_);
  return submit({.type = CallType::kReduceScatter,
                 .op_type = OpType::_REDUCE_SCATTER_BASE,
                 .timeout = options.timeout,
                 .outputs = outputs,
                 .inputs = inputs},
                options.reduceOp);
}

// A rank's part for itself goes over no connection, so no peer can notice that its sizes differ.
void CpuBackend::check_own_part(const CpuCall& call) const {
  const auto own = static_cast<std::size_t>(rank_);
  TORCH_CHECK(call.received[own].bytes == call.sent[own].bytes, caller(call.type), ": got ",
              call.sent[own].bytes, " bytes for this rank itself, expected ", call.received[own].bytes);
}

CpuBackend::WorkPtr CpuBackend::alltoall_base(at::Tensor& output, at::Tensor& input,
                                              std::vector<std::int64_t>& output_rows,
                                              std::vector<std::int64_t>& input_rows,
                                              const c10d::AllToAllOptions& options) {
  const CallSite who = caller(CallType::kAllToAll);
  check_same_type(who, output, input);
  CpuCall call{.type = CallType::kAllToAll,
               .op_type = OpType::ALLTOALL_BASE,
               .timeout = options.timeout,
               .outputs = {output},
               .inputs = {input},
               .received = rows_of(who, output, output_rows, size_),
               .sent = rows_of(who, input, input_rows, size_)};
  check_own_part(call);
  return submit(std::move(call));
}

// Tensors of different sizes, where alltoall_base() has rows of one tensor. Both become spans of bytes.
CpuBackend::WorkPtr CpuBackend::alltoall(Tensors& outputs, Tensors& inputs,
                                         const c10d::AllToAllOptions& options) {
  const CallSite who = caller(CallType::kAllToAll);
  check_one_each(who, outputs, size_);
  check_one_each(who, inputs, size_);
  for (std::size_t i = 0; i < inputs.size(); ++i) {
    check_same_type(who, outputs[i], inputs[i]);
    check_same_type(who, outputs[0], outputs[i]);
  }
  CpuCall call{.type = CallType::kAllToAll,
               .op_type = OpType::ALLTOALL,
               .timeout = options.timeout,
               .outputs = outputs,
               .inputs = inputs,
               .received = spans_of(outputs),
               .sent = spans_of(inputs)};
  check_own_part(call);
  return submit(std::move(call));
}

CpuBackend::WorkPtr CpuBackend::send(Tensors& tensors, int to, int tag) {
  const CallSite who = caller(CallType::kSend);
  check_one(who, tensors);
  // c10d has no options for messages, so start() takes the group's timeout.
  return submit({.type = CallType::kSend,
                 .op_type = OpType::SEND,
                 .inputs = tensors,
                 .peer = check_rank(who, to, size_),
                 .tag = tag});
}

CpuBackend::WorkPtr CpuBackend::recv(Tensors& tensors, int from, int tag) {
  const CallSite who = caller(CallType::kRecv);
  check_one(who, tensors);
  return submit({.type = CallType::kRecv,
                 .op_type = OpType::RECV,
                 .outputs = tensors,
                 .peer = check_rank(who, from, size_),
                 .tag = tag});
}

CpuBackend::WorkPtr CpuBackend::recvAnysource(Tensors& tensors, int tag) {
  check_one(caller(CallType::kRecv), tensors);
  return submit({.type = CallType::kRecv,
                 .op_type = OpType::RECVANYSOURCE,
                 .outputs = tensors,
                 .peer = -1,  // any
                 .tag = tag});
}

CpuBackend::WorkPtr CpuBackend::barrier(const c10d::BarrierOptions& options) {
  return submit({.type = CallType::kBarrier, .op_type = OpType::BARRIER, .timeout = options.timeout});
}

}  // namespace cohort::comm
