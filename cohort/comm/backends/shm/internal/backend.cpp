// Each call checks its tensors on the caller's thread, and begins an operation whose coroutine is made when
// its turn comes. The coroutine has bare pointers to memory. Always: `keep` holds the tensors of these
// pointers until the operation is over, whether the caller still holds its work or not. Tensors of a
// coalesced call run one after the other, as a single operation with a single deadline.
#include "cohort/comm/backends/shm/internal/backend.h"

#include <tuple>

#include "cohort/base/error.h"
#include "cohort/comm/backends/shm/internal/arena.h"
#include "cohort/comm/backends/shm/internal/collectives.h"
#include "cohort/comm/backends/shm/shm.h"
#include "cohort/comm/internal/profiled_call.h"
#include "cohort/comm/internal/tensors.h"
#include "cohort/comm/store_adapter.h"

namespace cohort::comm::shm {
namespace {

using c10d::OpType;
using std::chrono::milliseconds;

constexpr CallSite caller(const char* call) {
  return {"shm", call};
}

class ShmWork : public c10d::Work {
 public:
  ShmWork(std::shared_ptr<Engine> engine, std::shared_ptr<Operation> operation, int rank, OpType type,
          Tensors results, std::shared_ptr<int> source)
      : Work(rank, type),
        engine_(std::move(engine)),
        operation_(std::move(operation)),
        results_(std::move(results)),
        source_(std::move(source)) {}

  bool isCompleted() override { return engine_->test(*operation_); }
  bool isSuccess() const override { return operation_->over.load() && operation_->error == nullptr; }
  std::exception_ptr exception() const override {
    return operation_->over.load() ? operation_->error : nullptr;
  }
  int sourceRank() const override { return *source_; }
  std::vector<at::Tensor> result() override { return results_; }
  void synchronize() override {}
  bool wait(milliseconds timeout) override {
    engine_->wait(*operation_, timeout.count() > 0 ? base::Deadline(timeout) : base::Deadline::never());
    return true;
  }
  void abort() override { engine_->cancel("it was aborted"); }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override {
    {
      const std::lock_guard lock(mutex_);
      if (future_ != nullptr) return future_;
      future_ = c10::make_intrusive<c10::ivalue::Future>(c10::ListType::create(c10::TensorType::get()));
    }
    engine_->when_over(*operation_, [future = future_, operation = operation_, results = results_] {
      if (operation->error) {
        future->setError(operation->error);
      } else {
        future->markCompleted(c10::IValue(results));
      }
    });
    return future_;
  }

 private:
  const std::shared_ptr<Engine> engine_;
  const std::shared_ptr<Operation> operation_;
  const Tensors results_;
  const std::shared_ptr<int> source_;
  c10::intrusive_ptr<c10::ivalue::Future> future_;
};

}  // namespace

struct ShmBackend::OperationSpec {
  const char* name;
  OpType type;
  Tensors results;           // what the work returns
  Tensors keep = {};         // what must live until it is over
  milliseconds timeout{-1};  // as c10d's options have it
  std::function<Task()> make;
  bool is_message = false;
  Rounds rounds = Rounds::kMany;
  std::shared_ptr<int> source = std::make_shared<int>(-1);
};

ShmBackend::ShmBackend(std::unique_ptr<Communicator> ranks, milliseconds timeout)
    : Backend(ranks->rank(), ranks->size()), engine_(Engine::make(std::move(ranks))), timeout_(timeout) {}

c10::intrusive_ptr<c10d::Backend::Options> ShmBackend::getBackendOptions() {
  return c10::make_intrusive<Options>("shm", timeout_);
}

void ShmBackend::abort() {
  engine_->cancel("the group was aborted");
}

at::Tensor ShmBackend::allocateTensor(long size, at::TensorOptions options) {
  return shared_empty({size}, options);
}

ShmBackend::WorkPtr ShmBackend::begin(OperationSpec call) {
  const milliseconds timeout = call.timeout.count() > 0 ? call.timeout : timeout_;
  auto operation = std::make_shared<Operation>(base::Deadline(timeout));
  operation->call = call.name;
  operation->number = calls_.fetch_add(1);
  operation->make = std::move(call.make);
  operation->is_message = call.is_message;
  operation->rounds = call.rounds;
  // What comes out is the larger part of most calls; what send() and a root's peers have goes in.
  auto profiled =
      ProfiledCall::begin("shm", call.name, call.results.empty() ? call.keep : call.results, getGroupUid());
  using Kept = std::tuple<Tensors, Tensors, std::shared_ptr<int>, std::shared_ptr<ProfiledCall>>;
  operation->keep =
      std::make_shared<Kept>(call.results, std::move(call.keep), call.source, std::move(profiled));
  engine_->begin(operation);
  return c10::make_intrusive<ShmWork>(engine_, std::move(operation), rank_, call.type,
                                      std::move(call.results), std::move(call.source));
}

ShmBackend::WorkPtr ShmBackend::allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) {
  constexpr CallSite who = caller("all_reduce");
  check_one(who, tensors);
  const at::Tensor& tensor = tensors[0];
  const ReductionType numbers = reduction_type_of(who, tensor, options.reduceOp);
  scale(who, tensor, options.reduceOp);
  Communicator& ranks = engine_->ranks();
  return begin({.name = who.call,
                .type = OpType::ALLREDUCE,
                .results = tensors,
                .timeout = options.timeout,
                .make = [&ranks, data = data_of(tensor), numel = numbers.numel(tensor),
                         numbers] { return all_reduce(ranks, data, numel, numbers.dtype, numbers.op); },
                .rounds = rounds_of(ranks, CollectiveType::kAllReduce, tensor.nbytes())});
}

ShmBackend::WorkPtr ShmBackend::allreduce_coalesced(Tensors& tensors,
                                                    const c10d::AllreduceCoalescedOptions& options) {
  constexpr CallSite who = caller("all_reduce");
  TORCH_CHECK(!tensors.empty(), who, ": got no tensors");
  check_tensors(who, tensors);
  std::vector<ReductionType> numbers;
  for (const at::Tensor& tensor : tensors)
    numbers.push_back(reduction_type_of(who, tensor, options.reduceOp));
  for (const at::Tensor& tensor : tensors) scale(who, tensor, options.reduceOp);
  return begin({.name = who.call,
                .type = OpType::ALLREDUCE_COALESCED,
                .results = tensors,
                .timeout = options.timeout,
                .make = [&ranks = engine_->ranks(), tensors, numbers] {
                  std::vector<Task> tasks;
                  for (std::size_t i = 0; i < tensors.size(); ++i) {
                    tasks.push_back(all_reduce(ranks, data_of(tensors[i]), numbers[i].numel(tensors[i]),
                                               numbers[i].dtype, numbers[i].op));
                  }
                  return sequence(std::move(tasks));
                }});
}

ShmBackend::WorkPtr ShmBackend::broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) {
  constexpr CallSite who = caller("broadcast");
  check_one(who, tensors);
  const int root = check_rank(who, options.rootRank, size_);
  return begin({.name = who.call,
                .type = OpType::BROADCAST,
                .results = tensors,
                .timeout = options.timeout,
                .make = [&ranks = engine_->ranks(), data = span_of(tensors[0]),
                         root] { return shm::broadcast(ranks, data, root); },
                .rounds = rounds_of(engine_->ranks(), CollectiveType::kBroadcast, tensors[0].nbytes())});
}

ShmBackend::WorkPtr ShmBackend::reduce(Tensors& tensors, const c10d::ReduceOptions& options) {
  constexpr CallSite who = caller("reduce");
  check_one(who, tensors);
  const int root = check_rank(who, options.rootRank, size_);
  const at::Tensor& tensor = tensors[0];
  const ReductionType numbers = reduction_type_of(who, tensor, options.reduceOp);
  scale(who, tensor, options.reduceOp);
  return begin(
      {.name = who.call,
       .type = OpType::REDUCE,
       .results = tensors,
       .timeout = options.timeout,
       .make = [&ranks = engine_->ranks(), data = data_of(tensor), numel = numbers.numel(tensor), numbers,
                root] { return shm::reduce(ranks, data, numel, numbers.dtype, numbers.op, root); },
       .rounds = rounds_of(engine_->ranks(), CollectiveType::kReduce, tensor.nbytes())});
}

ShmBackend::WorkPtr ShmBackend::allgather(TensorLists& outputs, Tensors& inputs,
                                          const c10d::AllgatherOptions& options) {
  constexpr CallSite who = caller("all_gather");
  check_one(who, inputs);
  check_list(who, outputs, inputs[0], size_);
  return begin({.name = who.call,
                .type = OpType::ALLGATHER,
                .results = outputs[0],
                .keep = inputs,
                .timeout = options.timeout,
                .make = [&ranks = engine_->ranks(), to = pointers(outputs[0]),
                         from = span_of(inputs[0])] { return all_gather(ranks, to, from); },
                .rounds = rounds_of(engine_->ranks(), CollectiveType::kAllGather, inputs[0].nbytes())});
}

ShmBackend::WorkPtr ShmBackend::_allgather_base(at::Tensor& output, at::Tensor& input,
                                                const c10d::AllgatherOptions& options) {
  Tensors outputs{output}, inputs{input};
  return allgather_into_tensor_coalesced(outputs, inputs, options);
}

ShmBackend::WorkPtr ShmBackend::allgather_coalesced(TensorLists& outputs, Tensors& inputs,
                                                    const c10d::AllgatherOptions& options) {
  constexpr CallSite who = caller("all_gather");
  // outputs[rank][i] is what inputs[i] is on that rank.
  check_tensors(who, inputs);
  TORCH_CHECK(outputs.size() == static_cast<std::size_t>(size_), who, ": got ", outputs.size(),
              " lists, expected one for each of ", size_, " ranks");
  Tensors results;
  std::vector<std::vector<std::byte*>> to(inputs.size());
  for (const Tensors& list : outputs) {
    TORCH_CHECK(list.size() == inputs.size(), who, ": got a list of ", list.size(), " tensors, expected ",
                inputs.size());
    for (std::size_t i = 0; i < list.size(); ++i) {
      check_alike(who, list[i], inputs[i]);
      to[i].push_back(data_of(list[i]));
      results.push_back(list[i]);
    }
  }
  return begin({.name = who.call,
                .type = OpType::ALLGATHER_COALESCED,
                .results = std::move(results),
                .keep = inputs,
                .timeout = options.timeout,
                .make = [&ranks = engine_->ranks(), to, inputs] {
                  std::vector<Task> tasks;
                  for (std::size_t i = 0; i < inputs.size(); ++i) {
                    tasks.push_back(all_gather(ranks, to[i], span_of(inputs[i])));
                  }
                  return sequence(std::move(tasks));
                }});
}

ShmBackend::WorkPtr ShmBackend::allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                                                const c10d::AllgatherOptions& options) {
  constexpr CallSite who = caller("all_gather");
  check_as_many(who, outputs.size(), inputs.size());
  for (std::size_t i = 0; i < inputs.size(); ++i) check_alike(who, outputs[i], inputs[i], size_);
  const Rounds rounds = inputs.size() == 1
                            ? rounds_of(engine_->ranks(), CollectiveType::kAllGather, inputs[0].nbytes())
                            : Rounds::kMany;
  return begin({.name = who.call,
                .type = OpType::_ALLGATHER_BASE,
                .results = outputs,
                .keep = inputs,
                .timeout = options.timeout,
                .make =
                    [&ranks = engine_->ranks(), outputs, inputs, size = size_] {
                      std::vector<Task> tasks;
                      for (std::size_t i = 0; i < inputs.size(); ++i) {
                        tasks.push_back(all_gather(ranks, parts_of(outputs[i], size), span_of(inputs[i])));
                      }
                      return sequence(std::move(tasks));
                    },
                .rounds = rounds});
}

ShmBackend::WorkPtr ShmBackend::gather(TensorLists& outputs, Tensors& inputs,
                                       const c10d::GatherOptions& options) {
  constexpr CallSite who = caller("gather");
  check_one(who, inputs);
  const int root = check_rank(who, options.rootRank, size_);
  Tensors results;
  if (rank_ == root) {
    check_list(who, outputs, inputs[0], size_);
    results = outputs[0];
  }
  return begin({.name = who.call,
                .type = OpType::GATHER,
                .results = results,
                .keep = inputs,
                .timeout = options.timeout,
                .make = [&ranks = engine_->ranks(), to = pointers(results), from = span_of(inputs[0]),
                         root] { return shm::gather(ranks, to, from, root); },
                .rounds = rounds_of(engine_->ranks(), CollectiveType::kGather, inputs[0].nbytes())});
}

ShmBackend::WorkPtr ShmBackend::scatter(Tensors& outputs, TensorLists& inputs,
                                        const c10d::ScatterOptions& options) {
  constexpr CallSite who = caller("scatter");
  check_one(who, outputs);
  const int root = check_rank(who, options.rootRank, size_);
  Tensors parts;
  if (rank_ == root) {
    check_list(who, inputs, outputs[0], size_);
    parts = inputs[0];
  }
  return begin({.name = who.call,
                .type = OpType::SCATTER,
                .results = outputs,
                .keep = parts,
                .timeout = options.timeout,
                .make = [&ranks = engine_->ranks(), to = span_of(outputs[0]), from = pointers(parts), root] {
                  return shm::scatter(ranks, to, from, root);
                }});
}

ShmBackend::WorkPtr ShmBackend::reduce_scatter(Tensors& outputs, TensorLists& inputs,
                                               const c10d::ReduceScatterOptions& options) {
  constexpr CallSite who = caller("reduce_scatter");
  check_one(who, outputs);
  check_list(who, inputs, outputs[0], size_);
  const ReductionType numbers = reduction_type_of(who, outputs[0], options.reduceOp);
  Tensors parts = inputs[0];
  for (at::Tensor& part : parts) part = scaled(who, part, options.reduceOp);
  return begin({.name = who.call,
                .type = OpType::REDUCE_SCATTER,
                .results = outputs,
                .keep = parts,
                .timeout = options.timeout,
                .make = [&ranks = engine_->ranks(), to = data_of(outputs[0]), from = pointers(parts),
                         numel = numbers.numel(outputs[0]), numbers] {
                  return shm::reduce_scatter(ranks, to, from, numel, numbers.dtype, numbers.op);
                }});
}

ShmBackend::WorkPtr ShmBackend::_reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                                                     const c10d::ReduceScatterOptions& options) {
  Tensors outputs{output}, inputs{input};
  return reduce_scatter_tensor_coalesced(outputs, inputs, options);
}

ShmBackend::WorkPtr ShmBackend::reduce_scatter_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                                                const c10d::ReduceScatterOptions& options) {
  constexpr CallSite who = caller("reduce_scatter");
  check_as_many(who, outputs.size(), inputs.size());
  std::vector<ReductionType> numbers;
  for (std::size_t i = 0; i < inputs.size(); ++i) {
    check_alike(who, inputs[i], outputs[i], size_);
    numbers.push_back(reduction_type_of(who, outputs[i], options.reduceOp));
  }
  Tensors wholes = inputs;
  for (at::Tensor& whole : wholes) whole = scaled(who, whole, options.reduceOp);
  return begin({.name = who.call,
                .type = OpType::_REDUCE_SCATTER_BASE,
                .results = outputs,
                .keep = wholes,
                .timeout = options.timeout,
                .make = [&ranks = engine_->ranks(), outputs, wholes, numbers, size = size_] {
                  std::vector<Task> tasks;
                  for (std::size_t i = 0; i < wholes.size(); ++i) {
                    tasks.push_back(shm::reduce_scatter(ranks, data_of(outputs[i]), parts_of(wholes[i], size),
                                                        numbers[i].numel(outputs[i]), numbers[i].dtype,
                                                        numbers[i].op));
                  }
                  return sequence(std::move(tasks));
                }});
}

ShmBackend::WorkPtr ShmBackend::alltoall_base(at::Tensor& output, at::Tensor& input,
                                              std::vector<std::int64_t>& output_rows,
                                              std::vector<std::int64_t>& input_rows,
                                              const c10d::AllToAllOptions& options) {
  constexpr CallSite who = caller("all_to_all");
  check_same_type(who, output, input);
  return begin(
      {.name = who.call,
       .type = OpType::ALLTOALL_BASE,
       .results = {output},
       .keep = {input},
       .timeout = options.timeout,
       .make = [&ranks = engine_->ranks(), to = rows_of(who, output, output_rows, size_),
                from = rows_of(who, input, input_rows, size_)] { return all_to_all(ranks, to, from); }});
}

ShmBackend::WorkPtr ShmBackend::alltoall(Tensors& outputs, Tensors& inputs,
                                         const c10d::AllToAllOptions& options) {
  constexpr CallSite who = caller("all_to_all");
  check_one_each(who, outputs, size_);
  check_one_each(who, inputs, size_);
  std::vector<Span> to, from;
  for (const at::Tensor& tensor : outputs) to.push_back(span_of(tensor));
  for (const at::Tensor& tensor : inputs) from.push_back(span_of(tensor));
  return begin({.name = who.call,
                .type = OpType::ALLTOALL,
                .results = outputs,
                .keep = inputs,
                .timeout = options.timeout,
                .make = [&ranks = engine_->ranks(), to, from] { return all_to_all(ranks, to, from); }});
}

ShmBackend::WorkPtr ShmBackend::send(Tensors& tensors, int to, int tag) {
  constexpr CallSite who = caller("send");
  check_one(who, tensors);
  check_rank(who, to, size_);
  TORCH_CHECK(to != rank_, who, ": rank ", rank_, " cannot send to itself");
  return begin({.name = who.call,
                .type = OpType::SEND,
                .results = {},
                .keep = tensors,
                .make = [engine = engine_.get(), to, tag,
                         data = span_of(tensors[0])] { return engine->messages().send(to, data, tag); },
                .is_message = true});
}

ShmBackend::WorkPtr ShmBackend::recv(Tensors& tensors, int from, int tag) {
  constexpr CallSite who = caller("recv");
  check_one(who, tensors);
  if (from >= 0) check_rank(who, from, size_);
  TORCH_CHECK(from != rank_, who, ": rank ", rank_, " cannot receive from itself");
  const auto source = std::make_shared<int>(from);
  return begin({.name = who.call,
                .type = from < 0 ? OpType::RECVANYSOURCE : OpType::RECV,
                .results = tensors,
                .make = [engine = engine_.get(), from, tag, data = span_of(tensors[0]),
                         source] { return engine->messages().recv(from, data, tag, source.get()); },
                .is_message = true,
                .source = source});
}

ShmBackend::WorkPtr ShmBackend::recvAnysource(Tensors& tensors, int tag) {
  return recv(tensors, -1, tag);
}

ShmBackend::WorkPtr ShmBackend::barrier(const c10d::BarrierOptions& options) {
  return begin({.name = "barrier",
                .type = OpType::BARRIER,
                .results = {},
                .timeout = options.timeout,
                .make = [&ranks = engine_->ranks()] { return shm::barrier(ranks); },
                .rounds = rounds_of(engine_->ranks(), CollectiveType::kBarrier)});
}

// Every barrier of this backend names the ranks that did not come.
void ShmBackend::monitoredBarrier(const c10d::BarrierOptions& options, bool /*wait_all_ranks*/) {
  barrier(options)->wait();
}

}  // namespace cohort::comm::shm

namespace cohort::comm {

c10::intrusive_ptr<c10d::Backend> make_shm_backend(const c10::intrusive_ptr<c10d::Store>& store, int rank,
                                                   int size, std::chrono::milliseconds timeout) {
  return make_shm_backend_until(store, rank, size, timeout, base::Deadline(timeout));
}

c10::intrusive_ptr<c10d::Backend> make_shm_backend_until(const c10::intrusive_ptr<c10d::Store>& store,
                                                         int rank, int size,
                                                         std::chrono::milliseconds timeout,
                                                         base::Deadline deadline) {
  static_assert(kMaxShmRanks == shm::kMaxRanks);
  if (size < 1 || size > shm::kMaxRanks || rank < 0 || rank >= size) {
    throw UsageError("comm.shm", base::concat("got rank ", rank, " of ", size, ", expected 1 to ",
                                              shm::kMaxRanks, " ranks"));
  }
  StoreAdapter kv_store(store);
  try {
    auto ranks = std::make_unique<shm::Communicator>(kv_store, rank, size, deadline);
    return c10::make_intrusive<shm::ShmBackend>(std::move(ranks), timeout);
  } catch (const std::exception& error) {
    try {
      kv_store.set("not made", base::concat("rank ", rank, ": ", error.what()));
    } catch (const std::exception&) {  // the store went with the rank that kept it
    }
    throw;
  }
}

}  // namespace cohort::comm
