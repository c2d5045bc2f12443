// Each call is given to the engine as an operation, whose coroutine is made when the operation begins. The
// coroutine has bare pointers to memory. Always: the operation keeps the call, and with it the tensors of
// these pointers, until it is over, whether the caller still holds its work or not. The work keeps the
// results alone. Tensors of a coalesced call run one after the other, as a single operation with a single
// deadline.
#include "cohort/comm/backends/shm/internal/backend.h"

#include <array>

#include "cohort/base/error.h"
#include "cohort/comm/backends/shm/internal/arena.h"
#include "cohort/comm/backends/shm/internal/collectives.h"
#include "cohort/comm/backends/shm/shm.h"
#include "cohort/comm/store_adapter.h"

namespace cohort::comm::shm {
namespace {

using std::chrono::milliseconds;

class ShmWork : public CpuWork {
 public:
  ShmWork(std::shared_ptr<Engine> engine, std::shared_ptr<Operation> operation, int rank, const CpuCall& call)
      : CpuWork(rank, call.op_type, call.outputs),
        engine_(std::move(engine)),
        operation_(std::move(operation)) {}

  bool isCompleted() override { return engine_->test(*operation_); }
  bool isSuccess() const override { return operation_->over.load() && operation_->error == nullptr; }
  std::exception_ptr exception() const override {
    return operation_->over.load() ? operation_->error : nullptr;
  }
  int sourceRank() const override { return operation_->source; }
  // Without a time of its own it still ends: the operation has the deadline of its call.
  bool wait(milliseconds timeout) override {
    engine_->wait(*operation_, timeout.count() > 0 ? base::Deadline(timeout) : base::Deadline::never());
    return true;
  }
  void abort() override { engine_->cancel("it was aborted"); }
  FuturePtr getFuture() override {
    {
      const std::lock_guard lock(mutex_);
      if (future_ != nullptr) return future_;
      future_ = make_future();
    }
    // Without the mutex, since the function runs at once if the operation is over.
    engine_->when_over(*operation_, [future = future_, operation = operation_, results = results_] {
      complete(*future, operation->error, results);
    });
    return future_;
  }

 private:
  const std::shared_ptr<Engine> engine_;
  const std::shared_ptr<Operation> operation_;
};

// In the order of CallType. Messages have no rounds.
constexpr std::array kCollectives = {
    CollectiveType::kAllReduce,     CollectiveType::kBroadcast, CollectiveType::kReduce,
    CollectiveType::kAllGather,     CollectiveType::kGather,    CollectiveType::kScatter,
    CollectiveType::kReduceScatter, CollectiveType::kAllToAll,  CollectiveType::kRendezvous,
    CollectiveType::kRendezvous,    CollectiveType::kBarrier};

Rounds rounds_of_call(const Communicator& ranks, const CpuCall& call) {
  if (call.num_collectives() > 1) return Rounds::kMany;
  const Tensors& tensors = call.inputs.empty() ? call.outputs : call.inputs;
  return rounds_of(ranks, kCollectives[static_cast<std::size_t>(call.type)],
                   tensors.empty() ? 0 : tensors[0].nbytes());
}

// The call's collective on tensor `i`, or its message.
Task make_task(Engine& engine, Operation& operation, const CpuCall& call, std::size_t i) {
  Communicator& ranks = engine.ranks();
  const auto numel = [&] { return call.reductions[i].numel(call.outputs[i]); };
  const auto dtype = [&] { return call.reductions[i].dtype; };
  const auto op = [&] { return call.reductions[i].op; };
  switch (call.type) {
    case CallType::kAllReduce:
      return all_reduce(ranks, data_of(call.outputs[i]), numel(), dtype(), op());
    case CallType::kBroadcast:
      return broadcast(ranks, span_of(call.outputs[i]), call.peer);
    case CallType::kReduce:
      return reduce(ranks, data_of(call.outputs[i]), numel(), dtype(), op(), call.peer);
    case CallType::kAllGather:
      return all_gather(ranks, call.output_parts(i, ranks.size()), span_of(call.inputs[i]));
    case CallType::kGather:
      return gather(ranks, call.output_parts(i, ranks.size()), span_of(call.inputs[i]), call.peer);
    case CallType::kScatter:
      return scatter(ranks, span_of(call.outputs[i]), call.input_parts(i, ranks.size()), call.peer);
    case CallType::kReduceScatter:
      return reduce_scatter(ranks, data_of(call.outputs[i]), call.input_parts(i, ranks.size()), numel(),
                            dtype(), op());
    case CallType::kAllToAll:
      return all_to_all(ranks, call.received, call.sent);
    case CallType::kSend:
      return engine.messages().send(call.peer, span_of(call.inputs[i]), call.tag);
    case CallType::kRecv:
      return engine.messages().recv(call.peer, span_of(call.outputs[i]), call.tag, &operation.source);
    case CallType::kBarrier:
      break;
  }
  return barrier(ranks);
}

Task make_tasks(Engine& engine, Operation& operation) {
  const CpuCall& call = *static_cast<const CpuCall*>(operation.keep.get());
  const std::size_t count = call.num_collectives();
  if (count == 1) return make_task(engine, operation, call, 0);
  std::vector<Task> tasks;
  for (std::size_t i = 0; i < count; ++i) tasks.push_back(make_task(engine, operation, call, i));
  return sequence(std::move(tasks));
}

}  // namespace

ShmBackend::ShmBackend(std::unique_ptr<Communicator> ranks, milliseconds timeout)
    : CpuBackend("shm", ranks->rank(), ranks->size(), timeout), engine_(Engine::make(std::move(ranks))) {}

void ShmBackend::abort() {
  engine_->cancel("the group was aborted");
}

at::Tensor ShmBackend::allocateTensor(long size, at::TensorOptions options) {
  return shared_empty({size}, options);
}

void ShmBackend::check(const CpuCall& call) const {
  TORCH_CHECK(!call.is_message() || call.peer != rank_, caller(call.type), ": rank ", rank_, " cannot ",
              call.type == CallType::kSend ? "send to" : "receive from", " itself");
}

ShmBackend::WorkPtr ShmBackend::begin(CpuCall&& call) {
  auto operation = std::make_shared<Operation>(base::Deadline(call.timeout));
  operation->call = name_of(call.type);
  operation->number = call.number;
  operation->is_message = call.is_message();
  operation->rounds = rounds_of_call(engine_->ranks(), call);
  if (call.type == CallType::kRecv) operation->source = call.peer;
  // Two pointers, which std::function holds without memory of its own.
  operation->make = [engine = engine_.get(), begun = operation.get()] { return make_tasks(*engine, *begun); };
  auto work = c10::make_intrusive<ShmWork>(engine_, operation, rank_, call);
  operation->keep = std::make_shared<CpuCall>(std::move(call));
  engine_->begin(operation);
  return work;
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
