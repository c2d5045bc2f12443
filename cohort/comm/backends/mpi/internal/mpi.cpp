// Each call checks its tensors on the caller's thread and becomes a list of steps for the engine. gather,
// scatter, all_to_all, and an all_gather into separate tensors are exchanges of messages between the ranks.
// Always: collectives of a group share its queue, and messages have none; each kind has a communicator of its
// own. So a message and a collective that are under way together cannot be taken for each other.
#include "cohort/comm/backends/mpi/internal/mpi.h"

#include <ATen/ops/cat.h>

#include "cohort/base/error.h"
#include "cohort/comm/backends/mpi/internal/process.h"
#include "cohort/comm/internal/backend.h"

namespace cohort::comm::mpi {
namespace {

using c10d::OpType;
using std::chrono::milliseconds;

constexpr CallSite caller(const char* call) {
  return {"mpi", call};
}

// A part for each rank.
std::vector<Message> one_each(const CallSite& who, const Tensors& tensors, int size) {
  check_one_each(who, tensors, size);
  std::vector<Message> messages;
  for (const at::Tensor& tensor : tensors) messages.emplace_back(tensor, static_cast<int>(messages.size()));
  return messages;
}

// Rows of dimension 0, dealt out to the ranks.
std::vector<Message> dealt_out(const CallSite& who, const at::Tensor& tensor,
                               const std::vector<std::int64_t>& rows, int size) {
  std::vector<Message> messages;
  for (const Span part : rows_of(who, tensor, rows, size)) {
    messages.emplace_back(tensor, part, static_cast<int>(messages.size()));
  }
  return messages;
}

}  // namespace

MpiBackend::MpiBackend(Engine& engine, CommunicatorsPtr comms, milliseconds timeout)
    : Backend(comms->rank, comms->size), engine_(engine), comms_(std::move(comms)), timeout_(timeout) {
  engine_.set_exit_timeout(timeout);
}

MpiBackend::WorkPtr MpiBackend::submit(const char* name, OpType type, Tensors results, Steps steps,
                                       milliseconds timeout) {
  auto call = c10::make_intrusive<MpiWork>(CallText{name, number_.fetch_add(1), pg_uid_, rank_, size_}, type,
                                           std::move(results), std::move(steps),
                                           timeout.count() > 0 ? timeout : timeout_, comms_->queue);
  engine_.submit(call);
  return call;
}

MpiBackend::WorkPtr MpiBackend::submit_message(const char* name, OpType type, Tensors results, Steps steps) {
  auto call = c10::make_intrusive<MpiWork>(CallText{name, number_.fetch_add(1), pg_uid_, rank_, size_}, type,
                                           std::move(results), std::move(steps), timeout_, nullptr);
  engine_.submit(call);
  return call;
}

MpiBackend::WorkPtr MpiBackend::reduce_all(Tensors& tensors, const c10d::ReduceOp& op, milliseconds timeout) {
  constexpr CallSite who = caller("all_reduce");
  std::vector<ReductionType> numbers;
  for (const at::Tensor& tensor : tensors) {
    check_tensor(who, tensor);
    numbers.push_back(reduction_type_of(who, tensor, op));
  }
  Steps steps;
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    scale(who, tensors[i], op);
    add_reduce(steps, comms_, tensors[i], numbers[i]);
  }
  return submit(who.call, OpType::ALLREDUCE, tensors, std::move(steps), timeout);
}

MpiBackend::WorkPtr MpiBackend::allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) {
  return reduce_all(tensors, options.reduceOp, options.timeout);
}

MpiBackend::WorkPtr MpiBackend::allreduce_coalesced(Tensors& tensors,
                                                    const c10d::AllreduceCoalescedOptions& options) {
  return reduce_all(tensors, options.reduceOp, options.timeout);
}

MpiBackend::WorkPtr MpiBackend::broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) {
  constexpr CallSite who = caller("broadcast");
  Steps steps;
  add_broadcast(steps, comms_, check_one(who, tensors), check_rank(who, options.rootRank, size_));
  return submit(who.call, OpType::BROADCAST, tensors, std::move(steps), options.timeout);
}

MpiBackend::WorkPtr MpiBackend::reduce(Tensors& tensors, const c10d::ReduceOptions& options) {
  constexpr CallSite who = caller("reduce");
  const at::Tensor& tensor = check_one(who, tensors);
  const int root = check_rank(who, options.rootRank, size_);
  const ReductionType numbers = reduction_type_of(who, tensor, options.reduceOp);
  Steps steps;
  scale(who, tensor, options.reduceOp);
  add_reduce(steps, comms_, tensor, numbers, root);
  return submit(who.call, OpType::REDUCE, tensors, std::move(steps), options.timeout);
}

MpiBackend::WorkPtr MpiBackend::allgather(TensorLists& outputs, Tensors& inputs,
                                          const c10d::AllgatherOptions& options) {
  constexpr CallSite who = caller("all_gather");
  const at::Tensor& input = check_one(who, inputs);
  check_list(who, outputs, input, size_);
  Steps steps;
  add_gather_to_all(steps, outputs[0], input);
  return submit(who.call, OpType::ALLGATHER, outputs[0], std::move(steps), options.timeout);
}

MpiBackend::WorkPtr MpiBackend::_allgather_base(at::Tensor& output, at::Tensor& input,
                                                const c10d::AllgatherOptions& options) {
  Tensors outputs{output}, inputs{input};
  return allgather_into_tensor_coalesced(outputs, inputs, options);
}

MpiBackend::WorkPtr MpiBackend::allgather_coalesced(TensorLists& outputs, Tensors& inputs,
                                                    const c10d::AllgatherOptions& options) {
  // outputs[rank][i] is what inputs[i] is on that rank.
  constexpr CallSite who = caller("all_gather");
  check_as_many(who, outputs.size(), static_cast<std::size_t>(size_));
  check_tensors(who, inputs);
  Steps steps;
  Tensors results;
  for (std::size_t i = 0; i < inputs.size(); ++i) {
    Tensors of_ranks;
    for (const Tensors& list : outputs) {
      check_as_many(who, list.size(), inputs.size());
      check_tensor(who, list[i]);
      check_alike(who, list[i], inputs[i]);
      of_ranks.push_back(list[i]);
    }
    add_gather_to_all(steps, of_ranks, inputs[i]);
    results.insert(results.end(), of_ranks.begin(), of_ranks.end());
  }
  return submit(who.call, OpType::ALLGATHER_COALESCED, std::move(results), std::move(steps), options.timeout);
}

void MpiBackend::add_gather_to_all(Steps& steps, const Tensors& outputs, const at::Tensor& input) const {
  std::vector<Message> to;
  for (int rank = 0; rank < size_; ++rank) to.emplace_back(input, rank);
  add_exchange(steps, comms_, std::move(to), one_each(caller("all_gather"), outputs, size_));
}

MpiBackend::WorkPtr MpiBackend::allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                                                const c10d::AllgatherOptions& options) {
  constexpr CallSite who = caller("all_gather");
  check_as_many(who, outputs.size(), inputs.size());
  Steps steps;
  for (std::size_t i = 0; i < inputs.size(); ++i) {
    check_alike(who, outputs[i], inputs[i], size_);
    add_all_gather(steps, comms_, outputs[i], inputs[i]);
  }
  return submit(who.call, OpType::_ALLGATHER_BASE, outputs, std::move(steps), options.timeout);
}

MpiBackend::WorkPtr MpiBackend::gather(TensorLists& outputs, Tensors& inputs,
                                       const c10d::GatherOptions& options) {
  constexpr CallSite who = caller("gather");
  const at::Tensor& input = check_one(who, inputs);
  const int root = check_rank(who, options.rootRank, size_);
  std::vector<Message> from;
  Tensors results;
  if (rank_ == root) {
    check_list(who, outputs, input, size_);
    results = outputs[0];
    from = one_each(who, results, size_);
  }
  Steps steps;
  add_exchange(steps, comms_, {{input, root}}, std::move(from));
  return submit(who.call, OpType::GATHER, std::move(results), std::move(steps), options.timeout);
}

MpiBackend::WorkPtr MpiBackend::scatter(Tensors& outputs, TensorLists& inputs,
                                        const c10d::ScatterOptions& options) {
  constexpr CallSite who = caller("scatter");
  const at::Tensor& output = check_one(who, outputs);
  const int root = check_rank(who, options.rootRank, size_);
  std::vector<Message> to;
  if (rank_ == root) {
    check_list(who, inputs, output, size_);
    to = one_each(who, inputs[0], size_);
  }
  Steps steps;
  add_exchange(steps, comms_, std::move(to), {{output, root}});
  return submit(who.call, OpType::SCATTER, outputs, std::move(steps), options.timeout);
}

MpiBackend::WorkPtr MpiBackend::reduce_scatter(Tensors& outputs, TensorLists& inputs,
                                               const c10d::ReduceScatterOptions& options) {
  constexpr CallSite who = caller("reduce_scatter");
  check_as_many(who, outputs.size(), inputs.size());
  Tensors whole;
  for (std::size_t i = 0; i < inputs.size(); ++i) {
    check_one_each(who, inputs[i], size_);
    Tensors flat;
    for (const at::Tensor& input : inputs[i]) {
      check_alike(who, input, outputs[i]);
      flat.push_back(input.view({-1}));
    }
    whole.push_back(at::cat(flat));
  }
  return reduce_scatter_tensor_coalesced(outputs, whole, options);
}

MpiBackend::WorkPtr MpiBackend::_reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                                                     const c10d::ReduceScatterOptions& options) {
  Tensors outputs{output}, inputs{input};
  return reduce_scatter_tensor_coalesced(outputs, inputs, options);
}

MpiBackend::WorkPtr MpiBackend::reduce_scatter_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                                                const c10d::ReduceScatterOptions& options) {
  constexpr CallSite who = caller("reduce_scatter");
  check_as_many(who, outputs.size(), inputs.size());
  Steps steps;
  for (std::size_t i = 0; i < inputs.size(); ++i) {
    check_alike(who, inputs[i], outputs[i], size_);
    const ReductionType numbers = reduction_type_of(who, outputs[i], options.reduceOp);
    add_reduce_scatter(steps, comms_, outputs[i], scaled(who, inputs[i], options.reduceOp), numbers);
  }
  return submit(who.call, OpType::_REDUCE_SCATTER_BASE, outputs, std::move(steps), options.timeout);
}

MpiBackend::WorkPtr MpiBackend::alltoall_base(at::Tensor& output, at::Tensor& input,
                                              std::vector<std::int64_t>& output_rows,
                                              std::vector<std::int64_t>& input_rows,
                                              const c10d::AllToAllOptions& options) {
  constexpr CallSite who = caller("all_to_all");
  check_same_type(who, output, input);
  Steps steps;
  add_exchange(steps, comms_, dealt_out(who, input, input_rows, size_),
               dealt_out(who, output, output_rows, size_));
  return submit(who.call, OpType::ALLTOALL_BASE, {output}, std::move(steps), options.timeout);
}

MpiBackend::WorkPtr MpiBackend::alltoall(Tensors& outputs, Tensors& inputs,
                                         const c10d::AllToAllOptions& options) {
  constexpr CallSite who = caller("all_to_all");
  Steps steps;
  add_exchange(steps, comms_, one_each(who, inputs, size_), one_each(who, outputs, size_));
  return submit(who.call, OpType::ALLTOALL, outputs, std::move(steps), options.timeout);
}

int MpiBackend::check_tag(const CallSite& who, int tag) const {
  TORCH_CHECK(tag >= 0 && tag <= engine_.largest_tag(), who, ": tag is ", tag, ", expected 0 to ",
              engine_.largest_tag());
  return tag;
}

MpiBackend::WorkPtr MpiBackend::send(Tensors& tensors, int to, int tag) {
  constexpr CallSite who = caller("send");
  Steps steps;
  add_send(steps, comms_, check_one(who, tensors), check_rank(who, to, size_), check_tag(who, tag));
  return submit_message(who.call, OpType::SEND, tensors, std::move(steps));
}

MpiBackend::WorkPtr MpiBackend::recv(Tensors& tensors, int from, int tag) {
  constexpr CallSite who = caller("recv");
  Steps steps;
  add_receive(steps, comms_, check_one(who, tensors), check_rank(who, from, size_), check_tag(who, tag));
  return submit_message(who.call, OpType::RECV, tensors, std::move(steps));
}

MpiBackend::WorkPtr MpiBackend::recvAnysource(Tensors& tensors, int tag) {
  constexpr CallSite who = caller("recv");
  const at::Tensor& tensor = check_one(who, tensors);
  TORCH_CHECK(is_one_message(tensor), who, " from any rank takes at most 1 GiB, got ", tensor.nbytes(),
              " bytes");
  Steps steps;
  add_receive(steps, comms_, tensor, MPI_ANY_SOURCE, check_tag(who, tag));
  return submit_message(who.call, OpType::RECVANYSOURCE, tensors, std::move(steps));
}

MpiBackend::WorkPtr MpiBackend::barrier(const c10d::BarrierOptions& options) {
  Steps steps;
  add_barrier(steps, comms_);
  return submit("barrier", OpType::BARRIER, {}, std::move(steps), options.timeout);
}

CommunicatorsPtr make_communicators(Engine& engine, const std::vector<int>& members, int rank,
                                    base::Deadline deadline) {
  auto comms = std::make_shared<Communicators>(engine);
  comms->rank = rank;
  comms->size = static_cast<int>(members.size());
  comms->queue = std::make_shared<OrderedQueue>();
  engine.run(
      [members, comms] {
        MPI_Group world = MPI_GROUP_NULL, group = MPI_GROUP_NULL;
        check(MPI_Comm_group(MPI_COMM_WORLD, &world), "MPI_Comm_group");
        check(MPI_Group_incl(world, static_cast<int>(members.size()), members.data(), &group),
              "MPI_Group_incl");
        check(MPI_Comm_create_group(MPI_COMM_WORLD, group, 0, &comms->collectives), "MPI_Comm_create_group");
        check(MPI_Comm_dup(comms->collectives, &comms->messages), "MPI_Comm_dup");
        for (const MPI_Comm comm : {comms->collectives, comms->messages}) {
          MPI_Comm_set_errhandler(comm, MPI_ERRORS_RETURN);
        }
        MPI_Group_free(&group);
        MPI_Group_free(&world);
      },
      deadline, "the other ranks of a group to make its communicator");
  return comms;
}

}  // namespace cohort::comm::mpi

// What load.cpp finds in this library.
extern "C" {

__attribute__((visibility("default"))) void cohort_mpi_start(cohort::base::Deadline deadline,
                                                             cohort::comm::mpi::Process& process) {
  const auto& engine = cohort::comm::mpi::Engine::start(deadline);
  process = {.job = engine.job(), .rank = engine.rank(), .size = engine.size()};
}

__attribute__((visibility("default"))) void cohort_make_mpi(const cohort::comm::BackendOptions& options,
                                                            const std::vector<int>& members,
                                                            cohort::base::Deadline deadline,
                                                            cohort::comm::BackendInstance& made) {
  using namespace cohort::comm::mpi;
  Engine& engine = Engine::start(deadline);
  made.backend = c10::make_intrusive<MpiBackend>(
      engine, make_communicators(engine, members, options.rank, deadline), options.timeout);
  made.type = c10d::ProcessGroup::BackendType::MPI;
  made.deterministic_rank_order = true;
}
}
